"""Gradients of N towers to the gradient of the global batch, equal to the bit on all towers.

Dense gradients travel flat, many at once (a bucket), the first bucket being small so that it is full soon; a bucket
leaves when the last of its gradients is there, while backward goes on. On CPU devices, where nothing travels, every
gradient is summed by itself. Sparse ones (tf.IndexedSlices) keep their rows: the slices of all towers one behind the
other, as one device would have had them. The order of the gradients and which of
them are None are those of the trace, the same on every tower.
"""

import math

import tensorflow as tf

from .collectives import sum_over_towers
from .exchange import all_gather
from .tower import Weighting, current

FIRST_BUCKET_BYTES = 2**20
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
    with tf.name_scope("multitower_reduce"):
        return _sum_gradients(gradients, tower.weigh if tower.weighting is Weighting.GRADIENT else tf.identity)


def _sum_gradients(gradients, weigh):
    summed = [_sum_slices(g, weigh) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    dense = [i for i, g in enumerate(summed) if isinstance(g, tf.Tensor)]
    for i, total in zip(dense, sum_dense([summed[i] for i in dense], weigh), strict=True):
        summed[i] = total
    return summed


def sum_dense(tensors, weigh=tf.identity):
    """Σ_i over towers of each of a list of dense tensors, many in one collective; `weigh` maps a tower's part first."""
    tower = current()
    if tower is not None and not tower.group.packs:
        return [sum_over_towers(weigh(t)) for t in tensors]
    summed = list(tensors)
    limit = (tower and tower.bucket_bytes) or BUCKET_BYTES
    for bucket in buckets(tensors, limit, min(limit, FIRST_BUCKET_BYTES)):
        members = [tensors[i] for i in bucket]
        total = sum_over_towers(weigh(tf.concat([tf.reshape(t, [-1]) for t in members], 0)))
        parts = tf.split(total, [_elements(t) for t in members])
        for i, part in zip(bucket, parts, strict=True):
            summed[i] = tf.reshape(part, tf.shape(tensors[i]))
    return summed


def buckets(tensors, limit_bytes, first_bytes=None):
    """Positions of `tensors` in groups of one dtype, last tensor first.

    Backward produces the gradients of the last layers first, so the first bucket is complete first.

    Args:
        tensors: list of tensors.
        limit_bytes: size of a bucket; a larger tensor has one of its own.
        first_bytes: size of the first bucket of a dtype; None: `limit_bytes`.
    """
    groups, open_group, limits = [], {}, {}
    for i in reversed(range(len(tensors))):
        dtype, size = tensors[i].dtype, _size_bytes(tensors[i])
        members, used = open_group.get(dtype, (None, 0))
        if members is None or used + size > limits[dtype]:
            limits[dtype] = limit_bytes if dtype in limits else first_bytes or limit_bytes
            members, used = [], 0
            groups.append(members)
        members.append(i)
        open_group[dtype] = (members, used + size)
    return groups


def _size_bytes(tensor):
    return math.prod(d or 1 for d in tensor.shape) * tensor.dtype.size


def _elements(tensor):
    return tensor.shape.num_elements() if tensor.shape.is_fully_defined() else tf.size(tensor)


def _sum_slices(gradient, weigh):
    """Slices of all towers; each tower gives only the rows that its shard touched.

    As often as it touched them: merged per tower they would be fewer, but clipping by norm takes the norm of the slices
    as they come (tf.linalg.global_norm), and another number of them is another norm than on one device.
    """
    return tf.IndexedSlices(all_gather(weigh(gradient.values)), all_gather(gradient.indices), gradient.dense_shape)


def average_gradients(tower_grads, rows=None):
    """Average the gradients of towers that were written by hand.

        g = Σ_i w_i · g_i,    w_i = rows[i] / Σ rows, or 1/N

    For the classic tower graph: a Python loop over devices that computes gradients on each, one `apply_gradients` after
    it. Inside a step given to `multitower.replicate` this is not needed.

    Args:
        tower_grads: for each of N towers a list of (gradient, variable) pairs, in the same order of variables. A
            gradient is a dense tensor, tf.IndexedSlices, or None, which counts as zero.
        rows: rows of each tower's shard, N numbers; None where all are equal.

    Returns:
        One list of (gradient, variable) pairs, with the variables of the first tower. Where every tower has slices, the
        average is slices too: the rows any tower touched, each once, and no others. None where every tower has None.

    Raises:
        ValueError: no towers, lists of different lengths, another number of rows, rows that are negative or all zero.

    Example:
        >>> import tensorflow as tf, multitower as mt
        >>> v = tf.Variable([1.0, 1.0])
        >>> pairs = mt.average_gradients([[(tf.constant([1.0, 2.0]), v)], [(tf.constant([4.0, 2.0]), v)]], rows=[2, 1])
        >>> pairs[0][0].numpy().tolist()
        [2.0, 2.0]
    """
    weights = _tower_weights(tower_grads, rows)
    return [(_average([g for g, _ in pairs], weights), pairs[0][1]) for pairs in zip(*tower_grads, strict=True)]


def _tower_weights(tower_grads, rows):
    lengths = [len(pairs) for pairs in tower_grads]
    if not lengths or len(set(lengths)) > 1:
        raise ValueError(
            f"average_gradients got lists of {lengths} pairs; expected one list for each tower, all of the same length"
        )
    rows = [1] * len(lengths) if rows is None else list(rows)
    if len(rows) != len(lengths) or min(rows) < 0 or sum(rows) <= 0:
        raise ValueError(f"average_gradients got rows={rows} for {len(lengths)} towers; expected a number for each")
    return [r / sum(rows) for r in rows]


def _average(gradients, weights):
    present = [(g, w) for g, w in zip(gradients, weights, strict=True) if g is not None]
    if not present:
        return None
    if all(isinstance(g, tf.IndexedSlices) for g, _ in present):
        return _merged_slices([_scaled(g, w) for g, w in present])
    return tf.add_n([_scaled(tf.convert_to_tensor(g), w) for g, w in present])


def _scaled(gradient, weight):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(gradient.values, weight), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(weight, gradient.dtype)


def _merged_slices(slices):
    """One tf.IndexedSlices in which every row stands once."""
    indices, position = tf.unique(tf.concat([s.indices for s in slices], 0))
    values = tf.concat([s.values for s in slices], 0)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(values, position, tf.size(indices)), indices, slices[0].dense_shape
    )
