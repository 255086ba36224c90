"""What the towers of a step tell each other: all_reduce and all_gather, differentiable.

The gradients are those of the objective that all towers minimise together, the mean over the rows of the global batch:

    L = Σ_i w_i · L_i,    w_i = rows[i] / B

Where tower i's own backward pass starts from ∂L_i (`Weighting.GRADIENT`, a hand-written step) its gradient is weighted
by w_i when gradients are summed; where it starts from w_i · ∂L_i (`Weighting.LOSS`, Keras' own train_step, where the
weight is applied by `optimizer.scale_loss`) gradients are summed as they are. The gradient of a collective has to speak
the same language: with p_i = w_i (GRADIENT) or 1 (LOSS), that of a sum over towers is (1/p_i) Σ_j p_j · dy_j.
"""

import tensorflow as tf

from .collectives import concat_rows, gather_fixed, sum_over_towers
from .tower import Weighting, current, this_tower


def all_reduce(x, op="sum"):
    """Combine a tensor of every tower; all towers get the same result.

        "sum":  y = Σ_i x_i          "mean":  y = Σ_i (rows[i] / B) · x_i

    The mean is that over the rows of the global batch: with uneven shards a tower counts by its rows, and a tower
    without rows does not count. Both are differentiable.

    Args:
        x: a number or boolean tensor of the same shape and dtype on every tower, or a nested structure of them.
        op: "sum" or "mean".

    Returns:
        The combined tensor, of x's shape and dtype (a mean of whole numbers is float32). Outside towers and with one
        tower: x.

    Raises:
        ValueError: `op` is neither "sum" nor "mean".
    """
    if op not in ("sum", "mean"):
        raise ValueError(f"all_reduce got op={op!r}; expected 'sum' or 'mean'")
    return tf.nest.map_structure(lambda t: _all_reduce(tf.convert_to_tensor(t), op), x)


def _all_reduce(x, op):
    tower = current()
    if op == "mean" and not (x.dtype.is_floating or x.dtype.is_complex):
        x = tf.cast(x, tf.float32)
    if tower is None or tower.count == 1:
        return tf.identity(x)
    if not x.dtype.is_floating:
        return sum_over_towers(x)
    return _differentiable_sum(tower.weigh(x) if op == "mean" else x)


@tf.custom_gradient
def _differentiable_sum(x):
    return sum_over_towers(x), shared_gradient


def shared_gradient(dy):
    """(1/p_i) Σ_j p_j · dy_j: the gradient, for this tower, of something all towers use."""
    tower = this_tower()
    if tower.weighting is Weighting.LOSS:
        return sum_over_towers(dy)
    return sum_over_towers(tower.weigh(dy)) * tower.inverse_share(dy.dtype)


def all_gather(x):
    """The rows of every tower, in tower order: what x is for the global batch. Differentiable.

    Args:
        x: tensor of shape (b, …), RaggedTensor or SparseTensor whose first dimension is rows; b may differ from tower
            to tower, the other dimensions may not. Or a nested structure of them.

    Returns:
        x of the global batch, of shape (Σ b, …). Outside towers and with one tower: x.
    """
    return tf.nest.map_structure(_all_gather, x)


def _all_gather(x):
    tower = current()
    if not tf.is_tensor(x):
        x = tf.convert_to_tensor(x)
    if tower is None or tower.count == 1:
        return x
    known = tower.recall(x)
    if known is not None:
        return known
    if isinstance(x, tf.RaggedTensor):
        return _gather_ragged(x)
    if isinstance(x, tf.SparseTensor):
        return _gather_sparse(tower, x)
    if x.shape.rank == 0:
        raise ValueError("all_gather got a scalar; expected a tensor whose first dimension is rows")
    counts = gather_fixed(tf.shape(x)[0])
    gathered = gather_rows(x, counts, lambda dy: _own_part(shared_gradient(dy), counts, tower))
    tower.remember(x, gathered)
    return gathered


def _gather_ragged(x):
    values = _all_gather(x.values)
    lengths = _all_gather(x.row_lengths())
    return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)


def _gather_sparse(tower, x):
    """Rows of tower i move down by the rows of the towers before it."""
    before = tf.cast(_start(tower.rows, tower.index), tf.int64)
    shift = tf.concat([[before], tf.zeros_like(x.dense_shape[1:])], 0)
    indices = _all_gather(x.indices + shift)
    values = _all_gather(x.values)
    widest = tf.reduce_max(gather_fixed(x.dense_shape), axis=0)
    shape = tf.concat([[tf.cast(tower.batch_rows, tf.int64)], widest[1:]], 0)
    return tf.SparseTensor(indices, values, shape)


def gather_outputs(x):
    """Model outputs of all towers, for code that every tower runs alike on the whole batch: its gradient is free.

    As every tower computes the same function of the result, ∂L/∂x needs no collective: it is this tower's own part of
    dy, the other towers' parts being their business.

    Args:
        x: tensor whose first dimension is exactly this tower's rows.
    """
    tower = current()
    if tower is None or tower.count == 1:
        return x
    if not isinstance(x, tf.Tensor):
        return _all_gather(x)
    known = tower.recall(x)
    if known is not None:
        return known
    message = "multitower: an output of the model does not have one row for each row of the batch"
    with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.shape(x)[0] == tower.own_rows, data=[message])]):
        counts, checked = tf.identity(tower.rows), tf.identity(x)
    gathered = gather_rows(checked, counts, lambda dy: _own_part(dy, counts, tower) * tower.inverse_share(dy.dtype))
    tower.remember(x, gathered)
    return gathered


def gather_rows(x, counts, gradient):
    """All towers' rows of x, in tower order; `gradient` maps dy of the result to dx.

    Args:
        x: dense tensor of shape (counts[i], …) on tower i.
        counts: int32 tensor of shape (N,).
    """

    @tf.custom_gradient
    def gather(x):
        with tf.name_scope("multitower_gather"):
            return concat_rows(x, counts), gradient

    return gather(x)


def _start(counts, index):
    """Rows before tower `index`."""
    return tf.reduce_sum(tf.where(tf.range(tf.size(counts)) < index, counts, 0))


def _own_part(dy, counts, tower):
    dy = tf.convert_to_tensor(dy)  # IndexedSlices where the whole batch was indexed
    start = _start(counts, tower.index)
    return dy[start : start + counts[tower.index]]
