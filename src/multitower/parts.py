"""micro_batches: a tower runs the model on its shard in k parts, and the step is still that of the whole batch.

    forward    k times the model on a part, keeping its outputs only
    loss       once, on all outputs together: any loss
    backward   k times: the model on a part once more, then its gradient for the part's share of ∂L/∂outputs

Only one part's activations are in memory at a time, for one more forward pass. Nothing has to be known about the loss,
as its gradient with respect to all outputs is there before the first part goes backward. Source: Gao, Zhang, Han,
Callan, "Scaling deep contrastive learning batch size under memory limited setup", RepL4NLP 2021, section 3.
"""

import functools
from contextlib import ExitStack, contextmanager

import keras
import tensorflow as tf

from . import batches, upstream
from .errors import ModelError
from .hooks import replaced


@contextmanager
def model_in_parts(model, count):
    """While a step is traced in here, calls of `model` with training=True run in `count` parts of the rows.

    Raises:
        ModelError: when the model is called: its forward pass changes state (batch normalisation) or adds losses of
            activities; in parts it would not be what it is in one pass.
    """
    with ExitStack() as stack:
        if count > 1:
            draws = _Draws()
            seeds = (keras.random.SeedGenerator,)
            stack.enter_context(replaced(seeds, "next", draws.next, (), on_one_tower=True))
            call = functools.partial(_call, model, count, draws)
            stack.enter_context(replaced(keras.Layer.__mro__, "__call__", call, ("__call__",), on_one_tower=True))
        yield


class _Draws:
    """Random seeds drawn in the first forward pass of a part, to be had again in its second."""

    def __init__(self):
        self.operations = set()
        self._recorded = None
        self._replayed = None

    def next(self, tower, original, generator, *args, **kwargs):
        if self._replayed is not None:
            return next(self._replayed)
        before = _assignments()
        seed = original(*args, **kwargs)
        self.operations |= _assignments() - before
        if self._recorded is not None:
            self._recorded.append(seed)
        return seed

    @contextmanager
    def recording(self):
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def replaying(self, seeds):
        self._replayed = iter(seeds)
        try:
            yield
        finally:
            self._replayed = None


def _call(model, count, draws, tower, original, layer, x, *args, **kwargs):
    if layer is not model or not kwargs.get("training"):
        return original(x, *args, **kwargs)

    def run(part):
        with tower.silencing(("__call__",)):  # in the backward pass too, where this hook is left already
            return original(part, *args, **kwargs)

    outputs, finished, finished_backward = [], [], []
    for part in _split(x, count):
        with tf.control_dependencies(finished):  # one part after another, or all activations are there at once
            part = tf.nest.map_structure(tf.identity, part, expand_composites=True)
        before = _assignments()
        outputs.append(_recomputed(run, draws, part, finished_backward))
        _refuse_state(model, _assignments() - before - draws.operations)
        finished = tf.nest.flatten(outputs[-1], expand_composites=True)
    return tf.nest.map_structure(lambda *same: _joined(same), *outputs)


def _split(x, count):
    """The rows of a structure of tensors in `count` nearly equal parts, the first ones larger."""
    leaves = tf.nest.flatten(x)
    total = tf.cast(batches.row_count(leaves[0]), tf.int32)
    rows = total // count + tf.cast(tf.range(count) < total % count, tf.int32)
    split = [batches.split_tensor(leaf, rows, count) for leaf in leaves]
    return [tf.nest.pack_sequence_as(x, [parts[k] for parts in split]) for k in range(count)]


def _joined(parts):
    joined = tf.concat(parts, 0)
    masks = [upstream.keras_mask(p) for p in parts]
    if masks[0] is not None:
        upstream.set_keras_mask(joined, tf.concat(masks, 0))
    return joined


def _recomputed(run, draws, part, finished):
    """run(part), of which the backward pass keeps only `part` and runs it again.

    `finished` is a list all parts share: what the part has computed whose backward pass comes before this one's.
    """
    shape_of = {}

    @tf.custom_gradient
    def forward(*flat):
        with draws.recording() as seeds:
            output = run(tf.nest.pack_sequence_as(part, flat, expand_composites=True))
        shape_of["output"] = output
        values = tf.nest.flatten(output)
        masks = [m for m in map(upstream.keras_mask, values) if m is not None]

        def gradient(*dy, variables=None):
            # After ∂L/∂outputs, or the second pass is merged with the first one, and after the part before.
            with tf.control_dependencies([*dy[: len(values)], *finished]):
                again = [tf.identity(f) for f in flat]
            gradients = _backward(run, draws, seeds, part, again, dy[: len(values)], list(variables or ()))
            finished[:] = [g for g in tf.nest.flatten(gradients) if isinstance(g, tf.Tensor)]
            return gradients

        return [*values, *masks], gradient

    tensors = list(forward(*tf.nest.flatten(part, expand_composites=True)))
    values = tf.nest.flatten(shape_of["output"])
    masks = iter(tensors[len(values) :])
    for old, new in zip(values, tensors, strict=False):
        if upstream.keras_mask(old) is not None:
            upstream.set_keras_mask(new, next(masks))
    return tf.nest.pack_sequence_as(shape_of["output"], tensors[: len(values)])


def _backward(run, draws, seeds, part, flat, dy, variables):
    """(gradients of the components of `part`, gradients of variables), from a second forward pass."""
    with tf.GradientTape() as tape, draws.replaying(seeds):
        tape.watch([f for f in flat if f.dtype.is_floating])
        outputs = tf.nest.flatten(run(tf.nest.pack_sequence_as(part, flat, expand_composites=True)))
    pairs = [(o, d) for o, d in zip(outputs, dy, strict=True) if o.dtype.is_floating]
    targets, seeds_of_gradient = zip(*pairs, strict=True)
    gradients = tape.gradient(targets, [*flat, *variables], output_gradients=list(seeds_of_gradient))
    return gradients[: len(flat)], gradients[len(flat) :]


def _assignments():
    """Names of operations in the graph being built that change variables."""
    operations = tf.compat.v1.get_default_graph().get_operations()
    return {op.name for op in operations if op.type.startswith(("Assign", "ResourceScatter"))}


def _refuse_state(model, assignments):
    if assignments:
        raise ModelError(
            f"micro_batches: the forward pass of model {model.name!r} changes state ({sorted(assignments)[0]}), as "
            f"batch normalisation does; in parts it is not what it is in one pass: use micro_batches=1, or freeze "
            f"the layer"
        )
    regularised = sum(v.regularizer is not None for v in model.trainable_variables)
    if len(model.losses) > regularised:
        raise ModelError(
            f"micro_batches: layers of model {model.name!r} add losses of activities, which in parts are not what they "
            f"are in one pass; use micro_batches=1, or compute them in compute_loss from outputs of the model"
        )
