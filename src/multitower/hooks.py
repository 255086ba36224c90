"""What calls of Keras mean inside a tower. Nothing here touches Keras outside the trace of a replicated step.

The step runs unchanged on its shard; some calls see the global batch instead, because only there is the answer that of
one device:

    model.compute_loss           the loss of the outputs of all towers (any loss: weights, masks, contrastive ones)
    model.compute_metrics        likewise
    metric.update_state          what the metric is given, of all towers (any metric: AUC, F1, your own)
    optimizer.apply              the gradient of the global batch, before clipping, accumulation and loss scaling
    BatchNormalization           mean and variance of the global batch, forward and backward
    SeedGenerator.next           another stream of random numbers on every tower, from the same state

The classes are patched only while a step is traced, under a lock, and the patched methods act only in the thread that
traces; Keras is as it was when the trace is done.
"""

import functools
import inspect
import threading
from contextlib import ExitStack, contextmanager, nullcontext

import keras
import tensorflow as tf

from . import norm, upstream
from .collectives import sum_over_towers
from .errors import ModelError
from .exchange import all_gather, all_reduce, gather_outputs
from .gradient_norms import record_gradients
from .placement import created_outside
from .reduce import sum_dense, sum_gradients
from .tower import Weighting, current, this_tower
from .wiring import METRICS, UPDATE

_lock = threading.RLock()
_SEED_STRIDE = 1_000_003  # a prime: no two towers and layers get seeds a small step apart


@contextmanager
def keras_in_towers(batch_norm="global"):
    """While this is open, Keras means the global batch in the thread whose `collectives.current()` is a tower.

    Args:
        batch_norm: "global", or "tower" for BatchNormalization with the statistics of each tower's shard.
    """
    if batch_norm not in _BATCH_NORM_HOOKS:
        raise ModelError(f"batch_norm={batch_norm!r} is unknown; expected 'global' or 'tower'")
    with _lock, ExitStack() as stack:
        for root, name, hook, silences in _HOOKS:
            classes = (*root.__mro__, *_subclasses(root))
            stack.enter_context(replaced(classes, name, hook, silences, on_one_tower=hook in (_scale_loss, _apply)))
        for name, hook in _BATCH_NORM_HOOKS[batch_norm]:
            stack.enter_context(replaced((keras.layers.BatchNormalization,), name, hook, ()))
        yield


@contextmanager
def replaced(classes, name, hook, silences, on_one_tower=False):
    """Put `hook` around method `name` wherever one of `classes` defines it.

    Args:
        classes: Keras classes.
        name: the method.
        hook: called as hook(tower, original, self, *args, **kwargs) in place of self.name(*args, **kwargs).
        silences: names of hooked methods that keep their meaning while the hook runs.
        on_one_tower: whether the hook is needed where N = 1 too.
    """
    owners = {c: vars(c)[name] for c in classes if name in vars(c)}
    for owner, original in owners.items():
        setattr(owner, name, _hooked(original, hook, silences, 0 if on_one_tower else 1))
    try:
        yield
    finally:
        for owner, original in owners.items():
            setattr(owner, name, original)


def _subclasses(root):
    found = set()
    queue = [root]
    while queue:
        new = [c for c in queue.pop().__subclasses__() if c not in found]
        found.update(new)
        queue += new
    return found


def _hooked(original, hook, silences, towers_without):
    name = original.__name__

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        tower = current()
        if tower is None or tower.count <= towers_without or name in tower.silenced:
            return original(self, *args, **kwargs)
        with tower.silencing(silences):
            return hook(tower, functools.partial(original, self), self, *args, **kwargs)

    return method


def _compute_loss(tower, original, model, *args, **kwargs):
    if tower.loss_over_shard:
        loss = original(*args, **kwargs)
    else:
        with tower.silencing(("compute_metrics", "update_state")):
            loss = original(**_for_whole_batch(original, args, kwargs))
    if loss is None:
        return None
    if tower.loss_over_shard or not _is_keras(original) or model.losses:  # add_loss, activity regularisers: the shard's
        loss = _mean_value(loss)
    tower.remember(loss, loss)
    return loss


def _compute_metrics(tower, original, model, *args, **kwargs):
    if tower.loss_over_shard:
        return original(*args, **kwargs)
    with tower.silencing(("compute_loss", "update_state")), tower.labelling(METRICS):
        return original(**_for_whole_batch(original, args, kwargs))


def _for_whole_batch(original, args, kwargs):
    """The arguments of compute_loss or compute_metrics for the global batch; x only where it is looked at."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    for name, value in arguments.items():
        if name == "y_pred":
            arguments[name] = tf.nest.map_structure(_whole_output, value)
        elif name != "x" or not _is_keras(original):
            arguments[name] = _whole(value)
    return arguments


def _is_keras(original):
    return original.func.__module__.startswith("keras.")


@tf.custom_gradient
def _mean_value(loss):
    """The mean over rows of a value that differs from tower to tower, with the gradient of this tower's."""
    return sum_over_towers(this_tower().weigh(loss)), lambda dy: dy


def _update_state(tower, original, metric, *args, **kwargs):
    given = tf.nest.flatten((args, kwargs))
    if tower.loss_over_shard and any(_has_rows(v) for v in given):
        return _add_up_state(original, metric, args, kwargs)
    args, kwargs = tf.nest.map_structure(_whole_argument, (args, kwargs))
    with tower.labelling(METRICS):
        return original(*args, **kwargs)


def _add_up_state(original, metric, args, kwargs):
    """Update a metric with the shard's rows and add up the changes of all towers: exact for states that are sums."""
    _build_state(original, args, kwargs)
    variables = [v.value for v in metric.variables]
    this_tower().apart.update((id(v), v) for v in variables)
    before = [tf.identity(v) for v in variables]
    result = original(*args, **kwargs)
    changes = [v - b for v, b in zip(variables, before, strict=True)]
    for variable, old, change in zip(variables, before, sum_dense(changes), strict=True):
        variable.assign(old + change)
    return result


def _build_state(original, args, kwargs):
    """Have the metric make the variables it makes on its first update, so that their values before it can be read."""

    def update():
        with tf.variable_creator_scope(created_outside):
            original(*args, **kwargs)

    tf.function(update, autograph=False).get_concrete_function()


def _apply(tower, original, optimizer, grads, *args, **kwargs):
    """Sum, then update: once, beside the variables, where towers share them."""
    grads = list(grads)
    total = sum_gradients(grads)
    record_gradients(optimizer, grads, total)
    with tower.labelling(UPDATE), _beside_variables(tower, *args, **kwargs):
        return original(total, *args, **kwargs)


def _beside_variables(tower, trainable_variables=None):
    """The device on which an update is computed: that of the variables where towers share them, else the tower's."""
    if not tower.shares_variables or not trainable_variables:
        return nullcontext()
    return tf.device(trainable_variables[0].value.device)


def _scale_loss(tower, original, optimizer, loss):
    """Keras' own train_step: the weight of this tower's rows goes in before the backward pass.

    Weighted afterwards, the backward pass would see gradients N times those of one device, and float16 would overflow
    where one device does not. Before it is built, LossScaleOptimizer scales by a constant: that trace serves one step.
    """
    tower.trace_again |= isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not optimizer.built
    scaled = original(loss)
    return tower.weigh(scaled) if tower.weighting is Weighting.LOSS else scaled


def _next_seed(tower, original, generator, *args, **kwargs):
    seed = original(*args, **kwargs)
    offset = tf.cast(tower.index, seed.dtype) * tf.cast(_SEED_STRIDE, seed.dtype)
    return seed + tf.stack([offset, tf.zeros_like(offset)])


def _global_moments(tower, original, layer, inputs, mask):
    return norm.layer_moments(layer, inputs, mask)


def _tower_moments(tower, original, layer, inputs, mask):
    return tower.batch_moments(layer, inputs, mask)


def _call_with_tower_moments(tower, original, layer, *args, **kwargs):
    """batch_norm="tower": Keras' own call twice, as it uses the same moments for outputs and moving statistics.

    First with the shard's moments, for the outputs. Then the moving statistics are put back and the call is made again
    with the pooled moments, for them alone: the graph drops its outputs, which nobody reads.
    """
    shard = norm.ShardMoments()
    tower.batch_moments = shard.own
    outputs = original(*args, **kwargs)
    if shard.before is not None:
        for variable, value in shard.before:
            variable.assign(value)
        tower.batch_moments = shard.pooled
        original(*args, **kwargs)
    return outputs


# Only Keras' own methods are replaced, which subclasses reach by super(): what they do around it happens once.
_BATCH_NORM_HOOKS = {
    "global": ((upstream.batch_norm_moments_name(), _global_moments),),
    "tower": ((upstream.batch_norm_moments_name(), _tower_moments), ("call", _call_with_tower_moments)),
}


# class, method, hook, methods that mean what they always do while it runs: they work on the whole batch already
_HOOKS = (
    (keras.Model, "compute_loss", _compute_loss, ("compute_loss",)),
    (keras.Model, "compute_metrics", _compute_metrics, ("compute_metrics",)),
    (keras.Metric, "update_state", _update_state, ("compute_loss", "compute_metrics", "update_state")),
    (keras.Optimizer, "apply", _apply, ("apply",)),
    (keras.Optimizer, "scale_loss", _scale_loss, ("scale_loss",)),
    (keras.random.SeedGenerator, "next", _next_seed, ("next",)),
)


def _whole(structure):
    """Tensors of the global batch for those of the shard; anything else as it is."""
    return tf.nest.map_structure(lambda t: all_gather(t) if _has_rows(t) else t, structure)


def _whole_output(output):
    """An output of the model for the global batch, with its Keras mask; one without rows is a mean over rows."""
    if not _has_rows(output):
        return _mean_value(output) if tf.is_tensor(output) and output.dtype.is_floating else output
    whole = gather_outputs(output)
    mask = upstream.keras_mask(output)
    if mask is not None:
        upstream.set_keras_mask(whole, all_gather(mask))
    return whole


def _whole_argument(value):
    """What a metric would have been given on one device.

    Rows are gathered; a number of rows is the rows of all towers; any other number is a mean over rows.
    """
    tower = this_tower()
    if not tf.is_tensor(value):
        return value
    if tower.recall(value) is not None:
        return tower.recall(value)
    if _is_row_count(tower, value):
        return tf.cast(tower.batch_rows, value.dtype)
    if _has_rows(value):
        return _whole_output(value) if isinstance(value, tf.Tensor) else all_gather(value)
    if value.dtype.is_floating:
        return all_reduce(value, "mean")
    return all_reduce(value, "sum") if value.shape.rank == 0 else value


def _has_rows(value):
    """Whether the first dimension is the rows of the batch: the trace leaves only that one open."""
    if not tf.is_tensor(value):
        return False
    return value.shape.rank is None or (value.shape.rank > 0 and value.shape[0] is None)


def _is_row_count(tower, value):
    """Whether `value` is tf.shape(x)[0] of an input x of the step, as Keras' train_step weights the loss."""
    if not isinstance(value, tf.Tensor) or value.op.type != "StridedSlice":
        return False
    shape = value.op.inputs[0].op
    return shape.type == "Shape" and tower.is_input(shape.inputs[0])
