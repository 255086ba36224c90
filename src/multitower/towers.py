"""replicate(): trace a single-device step once, split the batch, run the trace on every device.

One call of a replicated step, in reading order:

    Replicated.__call__   takes the arguments apart into tensors and Python values
    TowerStep.program     traces the step once for that kind of batch, whatever N, binds it to each tower's variables
                          and wires the towers together
    TowerStep.emit        splits the rows, calls the towers, puts the results together
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from . import batches, upstream
from .collectives import choose_reduce, group
from .device import devices as resolve_devices
from .errors import BatchError, MultitowerError
from .hooks import keras_in_towers
from .placement import bind, choose_placement, created_outside, variables_device, variables_on
from .tower import Tower, Weighting, current, traced_for
from .wiring import TurnsError, wire

_HOST = "/device:CPU:0"


def replicate(step, devices=None, *, whole=(), placement="replicated", reduce="auto", batch_norm="global"):
    """Turn a function of a batch, written for one device, into the same function over N towers.

    The step is traced once, whatever N, and called on every device with that tower's rows of the batch. In it, Keras'
    `optimizer.apply`, `metric.update_state`, `model.compute_loss` and BatchNormalization work on the global batch;
    everything else sees the shard, and `multitower.all_reduce` and `all_gather` combine what you like.

    The rule for exactness: the loss is a mean over the rows of the batch, or comes from `model.compute_loss`; then the
    update is that of one device for the whole batch, however it is split. Gradients that do not go through a Keras
    optimizer are yours to combine: `multitower.all_reduce(gradient, "mean")`.

    Args:
        step: function of tensors. Every array or tensor of rank ≥ 1 among its arguments, at any depth of dicts, tuples
            and lists, ragged and sparse ones included, is rows of the batch and is split: of B rows, tower i of N gets
            B // N, one more if i < B mod N. Scalar tensors go to every tower. Other Python values are constants of the
            trace, as they are for tf.function.
        devices: see `multitower.devices`.
        whole: name or names of arguments of `step` that go to every tower undivided.
        placement: where variables live: "replicated", "shared" or "independent"; see `multitower.Trainer`. Shared,
            what tower 0 writes is what all towers read: a step of yours has to write the same on all of them.
        reduce: how towers meet: "host", "gather", "ring", "nccl" or "auto"; see `multitower.Trainer`.
        batch_norm: "global", or "tower" for statistics of each tower's shard.

    Returns:
        A `Replicated`, called like `step`. Of its results, tensors whose first dimension is rows come back for the
        global batch, in the order of its rows; other floating-point tensors are means over the rows of the global
        batch (exactly the result where all towers agree); other tensors are tower 0's.

    Raises:
        DeviceError: the devices do not exist, or do not allow what was asked for.
        BatchError: at a call: no rows, tensors with different numbers of rows, nothing to split.

    Example:
        >>> import tensorflow as tf, multitower as mt
        >>> w = tf.Variable([[1.0], [1.0]])
        >>> def step(x, y):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean((x @ w - y) ** 2)
        ...     w.assign_sub(0.1 * mt.all_reduce(tape.gradient(loss, w), "mean"))
        ...     return loss
        >>> on_towers = mt.replicate(step, devices="cpu:1")
        >>> float(on_towers(tf.ones([3, 2]), tf.ones([3, 1])))
        1.0
    """
    names = [whole] if isinstance(whole, str) else list(whole)
    towers = TowerStep(step, resolve_devices(devices), placement=placement, reduce=reduce, batch_norm=batch_norm)
    return Replicated(towers, _signature(step, names), names)


def _signature(step, whole):
    """The signature of the step, where arguments have to be found by name."""
    if not whole:
        return None
    signature = inspect.signature(upstream.python_function(step))
    unknown = [name for name in whole if name not in signature.parameters]
    if unknown:
        raise BatchError(
            f"whole={whole!r} names {', '.join(unknown)}, which the step does not take; "
            f"its arguments are {', '.join(signature.parameters)}"
        )
    return signature


class Replicated:
    """A step over N towers; made by `replicate`, called like the step it was made from."""

    def __init__(self, towers, signature=None, whole=()):
        self._towers = towers
        self._signature = signature
        self._whole = whole
        self._functions = {}
        self._known = {}

    def __call__(self, *args, **kwargs):
        if current() is not None:
            raise MultitowerError("a replicated step was called inside a tower; call the step itself there")
        kind = _kind((args, kwargs)) if tf.executing_eagerly() else None
        if kind in self._known:
            tensors = tf.nest.flatten((args, kwargs))
            if (
                len({t.shape[0] for t in tensors} | {0}) == 2
            ):  # one number of rows, not 0; else `batches.check` says what
                return self._run(self._known[kind], tensors)
        batch = tf.nest.map_structure(batches.leaf, self._with_whole(args, kwargs))
        batches.check(batch)
        if not tf.executing_eagerly():
            return self._towers.emit(*batch)
        function = self._function(batch)
        if kind is not None and not self._whole:
            self._known[kind] = function
        return self._run(function, [batches.tensor_of(v) for v in tf.nest.flatten(batch) if not batches.is_constant(v)])

    def _run(self, function, tensors):
        self._towers.store.refresh()
        with errors_explained():
            return function(*tensors)

    def _with_whole(self, args, kwargs):
        if self._signature is None:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        for name in self._whole:
            if name in bound.arguments:
                bound.arguments[name] = tf.nest.map_structure(batches.whole, bound.arguments[name])
        return bound.args, bound.kwargs

    def _function(self, batch):
        """What runs the step for batches of this kind: one ConcreteFunction for each trace."""
        program = self._towers.program(*batch)
        if id(program) not in self._functions:
            specs = [v for v in tf.nest.flatten(program.structure) if not batches.is_constant(v)]

            def run(*tensors):
                return self._towers.emit(*batches.unflatten(program.structure, tensors))

            signature = [batches.tensor_of(s) for s in specs]
            function = tf.function(run, input_signature=signature, autograph=False)
            self._functions[id(program)] = function.get_concrete_function()
        return self._functions[id(program)]

    @property
    def devices(self):
        """Device names in tower order."""
        return list(self._towers.devices)

    @property
    def traces(self):
        """How often the step has been traced: once for each kind of batch, whatever N."""
        return self._towers.traces

    def copies(self, variable):
        """The copies of a variable of the step, a tf.Variable for each tower, the first being the variable itself.

        They have the values the next step starts from: what was assigned since the last one has been copied.
        """
        return self._towers.store.fresh(variable)

    def refresh(self):
        """Bring all towers' copies to tower 0's values.

        Assignments made in Python, and checkpoints that are restored, are noticed without this; call it after another
        tf.function has changed variables of the step.
        """
        self._towers.store.refresh_all(self._towers.variables)


def _kind(value):
    """What tells batches of dense tensors apart, but for their rows; None where there is anything else in a batch."""
    if isinstance(value, tf.Tensor) and value.shape.rank:
        return value.dtype, tuple(value.shape)[1:]
    if isinstance(value, dict):
        items = {name: _kind(part) for name, part in value.items()}
        return None if None in items.values() else ("dict", *items.items())
    if type(value) in (tuple, list):
        parts = [_kind(part) for part in value]
        return None if None in parts else (type(value), *parts)
    return None


@dataclass(frozen=True)
class Program:
    """A step traced for one kind of batch and bound to the towers.

    Attributes:
        structure: the (args, kwargs) of the step with specs as leaves.
        concrete: the trace, a ConcreteFunction.
        function: name of the function of all towers.
        captured: for each tower, the captured inputs of the trace.
        variables: tf.Variables the step uses, as the user knows them.
        reads_whole: for each component of the batch, whether the trace uses that of the whole batch.
        results: the structure of the results, a `batches.Result` for every tensor.
    """

    structure: tuple
    concrete: object
    function: str
    captured: list
    variables: list
    reads_whole: list
    results: object


class TowerStep:
    """A step on N towers, for use inside a graph.

    Args:
        step: the single-device step.
        devices: device names in tower order.
        placement: "replicated", "shared", "shared:DEVICE", "independent" or "auto".
        reduce: "host", "gather", "ring", "nccl" or "auto".
        agree: the results are equal on all towers, so that those of tower 0 are enough.
        batch_norm: "global" or "tower".
        weighting: where the weight of a tower's rows enters its backward pass.
        loss_over_shard: see `tower.Tower`.
        bucket_bytes: see `tower.Tower`.
        jit: whether XLA compiles what it can of each tower's operations.
        inside: makes one more context in which the step is traced.
        autograph: whether Python control flow on tensors in the step becomes graph control flow.

    Attributes:
        devices: device names in tower order.
        placement, reduce: what was chosen, pairs (name, reason).
        store: the variables of the towers.
        name: the name of the step.
        traces: how often the step has been traced.
    """

    def __init__(
        self,
        step,
        devices,
        *,
        placement="auto",
        reduce="auto",
        agree=False,
        batch_norm="global",
        weighting=Weighting.GRADIENT,
        loss_over_shard=False,
        bucket_bytes=None,
        jit=False,
        inside: Callable[[], AbstractContextManager] = nullcontext,
        autograph=True,
    ):
        self.devices = tuple(devices)
        self.reduce = choose_reduce(self.devices, reduce)
        self._may_change = placement == "auto"
        self._variables_device = variables_device(placement)
        self._place(*choose_placement(self.devices, placement))
        self.name = getattr(step, "__name__", type(step).__name__)
        self.traces = 0
        self._step = upstream.with_autograph(upstream.python_function(step)) if autograph else step
        self._agree = agree
        self._batch_norm = batch_norm
        self._weighting = weighting
        self._loss_over_shard = loss_over_shard
        self._bucket_bytes = bucket_bytes
        self._jit = jit
        self._more_context = inside
        self._programs = []

    @property
    def variables(self):
        """tf.Variables that any trace of the step uses."""
        return list({id(v): v for p in self._programs for v in p.variables}.values())

    @property
    def graphs(self):
        """The graph of one tower, for each trace; towers meet where it has `wiring`'s markers or collectives."""
        return [p.concrete.graph for p in self._programs]

    def program(self, args, kwargs=None):
        """The trace that serves batches like this one; made if there is none.

        A kind of batch differs from another by its structure, dtypes, ranks and Python values. Where only sizes
        differ, the trace is made once more with these left open, and then serves all sizes.
        """
        wanted = tf.nest.map_structure(batches.spec_of, (args, kwargs or {}))
        for k, program in enumerate(self._programs):
            shared = batches.common(program.structure, wanted)
            if shared is None:
                continue
            if not batches.same_specs(shared, program.structure):
                self._programs[k] = self._trace(shared)
            return self._programs[k]
        self._programs.append(self._trace(wanted))
        return self._programs[-1]

    @property
    def _alone(self):
        """Whether every tower does its step as if there were no other."""
        return self.placement[0] == "independent"

    def _trace(self, structure):
        towers = group(self.devices[:1], "none") if self._alone else group(self.devices, self.reduce[0])
        specs = batches.components(structure)
        traced: dict[str, Any] = {}

        def body(shard, whole, rows, index):
            tower = traced["tower"] = self._tower(towers, index, rows)
            batch = batches.pack(structure, shard)
            _pair(tower, batch, batches.pack(structure, whole))
            self.traces += 1
            with self._inside(tower):
                results = self._step(*batch[0], **batch[1])
            traced["results"], flat = _results(results)
            return flat

        concrete = self._concrete(body, specs, towers.count)
        if traced["tower"].trace_again:  # tf.function traces again too when the first trace created variables
            concrete = self._concrete(body, specs, towers.count)
        try:
            bound, function = self._wired(concrete, towers, traced["tower"])
        except TurnsError as error:
            if not self._may_change:
                raise
            self._place("replicated", f"'shared' cannot serve this step: {error}")
            return self._trace(structure)
        reads_whole = [bool(t.consumers()) for t in concrete.inputs[len(specs) : 2 * len(specs)]]
        return Program(structure, concrete, function, bound.captured, bound.variables, reads_whole, traced["results"])

    def _wired(self, concrete, towers, traced):
        """(Bound, name of the function of all towers)."""
        self.store.keep_apart(traced.apart.values())
        bound = bind(concrete, towers, self.devices, self.store)
        if bound.has_collectives:
            towers.meet()
        function = wire(
            concrete.function_def,
            bound.bindings,
            labels=traced.labels,
            shared=bound.shared,
            meeting_device=_HOST if self.reduce[0] == "host" else None,
            agree=self._agree,
        )
        weakref.finalize(self, upstream.forget_function, function).atexit = False
        return bound, function

    def _place(self, placement, reason):
        """Where the variables of this step live."""
        self.placement = placement, reason
        self.store = variables_on(self.devices, placement)

    def _tower(self, towers, index, rows):
        shares = self.placement[0] == "shared"
        return Tower(
            towers,
            index,
            rows,
            self._weighting,
            loss_over_shard=self._loss_over_shard,
            shares_variables=shares,
            bucket_bytes=self._bucket_bytes,
        )

    @staticmethod
    def _concrete(body, specs, count):
        rows, index = tf.TensorSpec([count], tf.int32), tf.TensorSpec([], tf.int32)
        return tf.function(body, autograph=False).get_concrete_function(specs, specs, rows, index)

    @contextmanager
    def _inside(self, tower):
        with ExitStack() as stack:
            creator = functools.partial(created_outside, device=self._variables_device)
            stack.enter_context(tf.variable_creator_scope(creator))
            stack.enter_context(keras_in_towers(self._batch_norm))
            stack.enter_context(self._more_context())
            stack.enter_context(traced_for(tower))
            if self._jit:  # clusters of operations, so that towers can meet between them
                stack.enter_context(tf.xla.experimental.jit_scope())
            yield

    def emit(self, args, kwargs=None):
        """Add one step over all towers to the graph being built.

        Args:
            args: tuple of batch structures, see `batches`.
            kwargs: dict of them.

        Returns:
            The results of the step for the global batch; see `replicate`.
        """
        batch = (args, kwargs or {})
        return self.emit_split(batch, *self.split(batch))

    def split(self, batch):
        """(rows, shards): see `batches.split`; on the host."""
        with tf.device(_HOST), tf.name_scope("multitower_input"):
            return batches.split(batch, len(self.devices))

    def emit_split(self, batch, rows, shards):
        """`emit` for a batch, (args, kwargs), that has been split."""
        program = self.program(*batch)
        with tf.device(_HOST):
            parts = zip(batches.components(batch), program.reads_whole, strict=True)
            whole = [part if is_read else _no_rows(part) for part, is_read in parts]
            return _merged(program.results, self._call(program, shards, whole, rows), rows)

    def _call(self, program, shards, whole, rows):
        """Call all towers; for each one whose results count, an iterator over its results."""
        arguments = []
        for i, (shard, captured) in enumerate(zip(shards, program.captured, strict=True)):
            seen = rows[i : i + 1] if self._alone else rows
            arguments += [*shard, *whole, seen, tf.constant(i), *captured]
        outputs = program.concrete.outputs * (1 if self._agree else len(self.devices))
        types = [t.dtype for t in outputs]
        # Inlined into the graph of the caller. As calls of their own TensorFlow would optimise towers one by one and
        # differently (x / √y as x · 1/√y on one of them only): copies would differ in the last bit.
        called = tf.raw_ops.StatefulPartitionedCall(args=arguments, Tout=types, f=program.function)
        results = called if outputs else []
        for result, traced in zip(results, outputs, strict=True):
            result.set_shape(traced.shape)
        each = len(program.concrete.outputs)
        return [iter(results[k * each : (k + 1) * each]) for k in range(1 if self._agree else len(self.devices))]


def _pair(tower, shard, whole):
    for own, everyone in zip(tf.nest.flatten(shard), tf.nest.flatten(whole), strict=True):
        if tf.is_tensor(own):
            tower.know_whole(own, everyone)


def _results(results):
    """(structure with a `batches.Result` for every tensor, the components of all tensors)."""
    results = tf.nest.map_structure(batches.result, results)
    structure = tf.nest.map_structure(lambda v: batches.Result(v) if tf.is_tensor(v) else v, results)
    tensors = [v for v in tf.nest.flatten(results) if tf.is_tensor(v)]
    return structure, tf.nest.flatten(tensors, expand_composites=True)


def _merged(results, flat, rows):
    def merged(result):
        return result.merge([result.take(f) for f in flat], rows) if isinstance(result, batches.Result) else result

    return tf.nest.map_structure(merged, results)


def _no_rows(component):
    """What stands in for a part of the whole batch that the trace does not read: nothing is sent to the devices."""
    if not component.shape.rank:
        return component
    return tf.zeros([0, *(d or 0 for d in component.shape[1:])], component.dtype)


@contextmanager
def errors_explained():
    """Errors that the graph of a step raises about its batch, as a `BatchError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        for message in (batches.NO_ROWS, batches.UNEQUAL_ROWS):
            if message in str(error.message):
                raise BatchError(message.removeprefix("multitower: ")) from error
        raise
