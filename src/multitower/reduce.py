"""Gradients of N towers to the gradient of the global batch, equal to the bit on all towers.

Dense gradients travel flat, many in one collective (a bucket); sparse ones (tf.IndexedSlices) keep their rows: the
slices of all towers one behind the other, as one device would have had them. The order of the gradients and which of
them are None are those of the trace, the same on every tower.
"""

import math

import tensorflow as tf

from .collectives import sum_over_towers
from .exchange import all_gather
from .tower import Weighting, current

BUCKET_BYTES = 25 * 2**20


def sum_gradients(gradients):
    """The gradient of the global batch from each tower's, on every tower.

        g = Σ_i g_i  (Weighting.LOSS)      g = Σ_i (rows[i] / B) · g_i  (Weighting.GRADIENT)

    Args:
        gradients: this tower's gradients: dense tensors, tf.IndexedSlices and None, in the order of the variables.

    Returns:
        A list like `gradients`; None stays None. With one tower: the gradients as they are.
    """
    tower = current()
    gradients = list(gradients)
    if tower is None or tower.count == 1:
        return gradients
    summed = [None if g is None else _sum_sparse(tower, g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    dense = [i for i, g in enumerate(summed) if isinstance(g, tf.Tensor)]
    for bucket in buckets([summed[i] for i in dense], BUCKET_BYTES):
        positions = [dense[k] for k in bucket]
        for position, total in zip(positions, _sum_bucket(tower, [summed[p] for p in positions]), strict=True):
            summed[position] = total
    return summed


def buckets(tensors, limit_bytes):
    """Positions of `tensors` in groups of one dtype and at most `limit_bytes` (or one tensor), last tensor first.

    Backward produces the gradients of the last layers first, so the first bucket is complete first.
    """
    groups, open_group = [], {}
    for i in reversed(range(len(tensors))):
        dtype, size = tensors[i].dtype, _size_bytes(tensors[i])
        members, used = open_group.get(dtype, (None, 0))
        if members is None or used + size > limit_bytes:
            members, used = [], 0
            groups.append(members)
        members.append(i)
        open_group[dtype] = (members, used + size)
    return groups


def _size_bytes(tensor):
    return math.prod(d or 1 for d in tensor.shape) * tensor.dtype.size


def _sum_bucket(tower, gradients):
    flat = tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)
    total = sum_over_towers(_weighted(tower, flat))
    if all(g.shape.is_fully_defined() for g in gradients):
        sizes = [g.shape.num_elements() for g in gradients]
    else:
        sizes = [tf.size(g) for g in gradients]
    return [tf.reshape(part, tf.shape(g)) for part, g in zip(tf.split(total, sizes), gradients, strict=True)]


def _sum_sparse(tower, gradient):
    """Slices of all towers; each tower gives only the rows that its shard touched."""
    values = all_gather(_weighted(tower, gradient.values))
    return tf.IndexedSlices(values, all_gather(gradient.indices), gradient.dense_shape)


def _weighted(tower, gradient):
    return tower.weigh(gradient) if tower.weighting is Weighting.GRADIENT else gradient
