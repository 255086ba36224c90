"""replicate(): a function of a batch, written for one device, as the same function over N towers.

Replicated.__call__   takes the arguments apart into tensors and Python values
TowerStep             traces the step, splits the rows, calls the towers: see `step`
"""

import inspect

import tensorflow as tf

from . import batches, upstream
from .device import devices as resolve_devices
from .errors import BatchError, MultitowerError
from .step import TowerStep, errors_explained
from .tower import current


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
