"""Batch normalisation over towers: the mean and variance of the global batch, forward and backward.

Each tower reduces its shard to (count, mean, M2), M2 = Σ (x − mean)²; the towers gather these (one collective) and
each merges them pairwise in the same order, so the result is equal to the bit on all towers. Unlike E[x²] − E[x]² this
loses no precision where the mean is large against the standard deviation. Source: Chan, Golub, LeVeque, "Algorithms
for computing the sample variance: analysis and recommendations", The American Statistician 37 (1983), eq. 2.1.
"""

import tensorflow as tf

from .collectives import Weighting, current, gather_fixed, sum_over_towers


def global_moments(inputs, axes, mask=None):
    """Mean and variance of the global batch over `axes`, differentiable with respect to the shard.

        mean = (1/n) Σ x        variance = (1/n) Σ (x − mean)²        n over all towers, by count

    One collective forward, one backward. The gradient is that of the statistics of the whole batch:

        dx = (1/n) (Σ_i dmean_i + 2 (x − mean) Σ_i dvariance_i)

    Args:
        inputs: float32 or float64 tensor, this tower's shard; it may have no rows.
        axes: the dimensions to reduce, a list of ints; the others keep their size.
        mask: None, or a boolean tensor that broadcasts to `inputs`: only elements where it is True count.

    Returns:
        (mean, variance), each of the shape of `inputs` without `axes`. Zero where nothing counts.
    """
    if mask is not None:
        mask = tf.broadcast_to(tf.cast(mask, tf.bool), tf.shape(inputs))

    @tf.custom_gradient
    def moments(x):
        count, mean, variance = _merged_moments(x, axes, mask)

        def gradient(dmean, dvariance):
            return _moments_gradient(x, axes, mask, count, mean, dmean, dvariance)

        return (mean, variance), gradient

    return moments(inputs)


def _merged_moments(x, axes, mask):
    parts = tf.stack(_local_moments(x, axes, mask))
    everyone = tf.unstack(gather_fixed(parts), current().count)
    while len(everyone) > 1:
        pairs = [everyone[k : k + 2] for k in range(0, len(everyone), 2)]
        everyone = [merge(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    count, mean, m2 = tf.unstack(everyone[0], 3)
    return count, mean, tf.math.divide_no_nan(m2, count)


def _local_moments(x, axes, mask):
    """(count, mean, M2) of the shard, each of the shape that is left when `axes` are reduced."""
    kept = x if mask is None else tf.where(mask, x, 0)
    total = tf.reduce_sum(kept, axes)
    if mask is None:
        reduced = tf.reduce_prod(tf.gather(tf.shape(x), axes))
        count = tf.zeros_like(total) + tf.cast(reduced, x.dtype)
    else:
        count = tf.reduce_sum(tf.cast(mask, x.dtype), axes)
    mean = tf.math.divide_no_nan(total, count)
    difference = _centred(x, axes, mask, mean)
    return count, mean, tf.reduce_sum(tf.square(difference), axes)


def merge(a, b):
    """(count, mean, M2) of two sets together, from those of each, stacked along the first dimension."""
    (count_a, mean_a, m2_a), (count_b, mean_b, m2_b) = tf.unstack(a, 3), tf.unstack(b, 3)
    count = count_a + count_b
    share_b = tf.math.divide_no_nan(count_b, count)
    delta = mean_b - mean_a
    return tf.stack([count, mean_a + delta * share_b, m2_a + m2_b + tf.square(delta) * count_a * share_b])


def _centred(x, axes, mask, mean):
    difference = x - _as_broad_as(mean, x, axes)
    return difference if mask is None else tf.where(mask, difference, 0)


def _as_broad_as(statistic, x, axes):
    reduced = {axis % x.shape.rank for axis in axes}
    sizes = tf.shape(x)
    return tf.reshape(statistic, [1 if d in reduced else sizes[d] for d in range(x.shape.rank)])


def _moments_gradient(x, axes, mask, count, mean, dmean, dvariance):
    tower = current()
    partial = tf.stack([dmean, dvariance])
    if tower.weighting is Weighting.GRADIENT:
        partial = tower.weigh(partial)
    dmean, dvariance = tf.unstack(sum_over_towers(partial), 2)
    dmean, dvariance = (tf.math.divide_no_nan(d, count) for d in (dmean, dvariance))
    dx = _as_broad_as(dmean, x, axes) + 2 * _as_broad_as(dvariance, x, axes) * _centred(x, axes, mask, mean)
    if mask is not None:
        dx = tf.where(mask, dx, 0)
    return dx * tower.inverse_share(x.dtype) if tower.weighting is Weighting.GRADIENT else dx


def layer_moments(layer, inputs, mask):
    """What keras.layers.BatchNormalization needs of a batch, for the global batch.

    Args:
        layer: the keras layer; its `axis` is the one that is kept.
        inputs: float32 or float64 tensor of the shard (Keras has cast lower precisions up).
        mask: None or a boolean tensor of the shape of `inputs` without its last dimension.
    """
    kept = layer.axis % inputs.shape.rank
    axes = [d for d in range(inputs.shape.rank) if d != kept]
    return global_moments(inputs, axes, None if mask is None else tf.expand_dims(mask, -1))
