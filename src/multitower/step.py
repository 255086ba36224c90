"""TowerStep: a single-device step on N towers, for use inside a graph.

TowerStep.program     traces the step once for that kind of batch, whatever N, binds it to each tower's variables
                      and wires the towers together
TowerStep.emit        splits the rows, calls the towers, puts the results together
"""

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from . import batches, upstream
from .collectives import choose_reduce, group
from .errors import BatchError
from .hooks import keras_in_towers
from .placement import bind, choose_placement, created_outside, variables_device, variables_on
from .tower import Tower, Weighting, traced_for
from .wiring import TurnsError, wire

_HOST = "/device:CPU:0"


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
