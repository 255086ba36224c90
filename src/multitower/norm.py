"""Batch normalisation over towers: the mean and variance of the global batch, forward and backward.

Each tower reduces its shard to a `Moments` (count, mean, M2 = Σ (x − mean)²), the towers gather these in one collective
and each merges them by count, with the same operations in the same order: the result is equal to the bit on all towers.

Unlike E[x²] − E[x]², which loses all digits once mean/std reaches 1/√ε (3000 in float32), the variance is right to
float32 whatever the mean is. Three things see to that, none of which costs a further pass over the shard:

    shift    x is centred on the mean of a sample of itself, not on its mean rounded to float32
    offset   the mean travels as a sum of two numbers, shift + offset, so that differences of tower means are exact
    sums     are taken one dimension after the other: short sums, whose rounding errors stay small

Source: Chan, Golub, LeVeque, "Algorithms for computing the sample variance: analysis and recommendations", The American
Statistician 37 (1983): shifted data for a shard, the combination of sets by count for the towers. Batch normalisation:
Ioffe, Szegedy (2015), https://arxiv.org/abs/1502.03167.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from . import upstream
from .collectives import gather_fixed
from .exchange import shared_gradient
from .tower import current

_SAMPLE = 8  # an eighth of the rows gives the shift; σ² ≥ (mean − shift)² / 8 then, which bounds what centring can lose


# what keras.layers.BatchNormalization keeps and decays; the last three with renorm=True only
_STATISTICS = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


class Moments(NamedTuple):
    """What a set of numbers has for a mean and a variance; all of one shape, (C,), or (N, C) for those of N towers.

    Attributes:
        count: how many numbers there are, as a floating-point number.
        shift: something near the mean.
        offset: mean − shift.
        m2: Σ (x − mean)².
    """

    count: Any
    shift: Any
    offset: Any
    m2: Any

    @property
    def mean(self):
        """The mean; 0 of an empty set."""
        return self.shift + self.offset

    @property
    def variance(self):
        """The mean squared distance from the mean; 0 of an empty set."""
        return tf.math.divide_no_nan(self.m2, self.count)


def measure(x, axis, mask=None):
    """The `Moments` of a shard for each channel.

        shift = mean of a sample       d = x − shift
        offset = (1/n) Σ d             m2 = Σ d² − offset · Σ d

    Args:
        x: float32 or float64 tensor with C channels in dimension `axis`; there may be no rows.
        axis: dimension of the channels, from 0.
        mask: None, or a boolean tensor of the shape of x: only elements where it is True count.
    """
    count, shift = _sample_mean(x, axis) if mask is None else _mean(x, axis, mask)
    centred = _centred(x, shift, axis, mask)
    total = _sum(centred, axis)
    offset = tf.math.divide_no_nan(total, count)
    m2 = _sum_of_squares(centred, axis) - total * offset
    return Moments(count, shift, offset, tf.maximum(m2, 0))


def merge(parts):
    """The `Moments` of N sets taken together, from those of each.

        shift = Σ_i (n_i/n) shift_i                d_i = (shift_i − shift) + offset_i
        offset = Σ_i (n_i/n) d_i                   m2 = Σ_i (m2_i + n_i (d_i − offset)²)

    For two sets this is the pairwise formula of Chan, Golub, LeVeque (1983): delta = mean_b − mean_a,
    M2 = M2_a + M2_b + delta² n_a n_b / n. Sets without elements change nothing.

    Args:
        parts: `Moments` of shape (N, C).
    """
    count = tf.reduce_sum(parts.count, 0)
    weights = tf.math.divide_no_nan(parts.count, count)
    shift = tf.reduce_sum(weights * parts.shift, 0)
    means = parts.shift - shift + parts.offset
    offset = tf.reduce_sum(weights * means, 0)
    m2 = tf.reduce_sum(parts.m2 + parts.count * tf.square(means - offset), 0)
    return Moments(count, shift, offset, m2)


def over_towers(moments):
    """The `Moments` of the global batch from this tower's. Towers meet here: one collective."""
    return merge(Moments(*tf.unstack(gather_fixed(tf.stack(moments)), 4, axis=1)))


def global_moments(inputs, axis, mask=None):
    """Mean and variance of the global batch for each channel, differentiable with respect to the shard.

        mean = (1/n) Σ x        variance = (1/n) Σ (x − mean)²        n elements on all towers together

    One collective forward, one backward. The gradient is that of the statistics of the whole batch:

        dx = (1/n) (Σ_i dmean_i + 2 (x − mean) Σ_i dvariance_i)

    It can be differentiated once: the gradient of this gradient does not exist.

    Args:
        inputs: float32 or float64 tensor, this tower's shard, with C channels in dimension `axis`.
        axis: dimension of the channels.
        mask: None, or a boolean tensor that broadcasts to `inputs`: only elements where it is True count.

    Returns:
        (mean, variance), each of shape (C,), equal to the bit on all towers. Zero where nothing counts.
    """
    _, mean, variance = _moments(inputs, axis, mask, over_towers, shared_gradient)
    return mean, variance


def _moments(inputs, axis, mask, combine, total_gradient):
    """(count, mean, variance) of combine(moments of the shard); total_gradient maps their gradient to the shard's."""
    axis %= inputs.shape.rank
    if mask is not None:
        mask = tf.broadcast_to(tf.cast(mask, tf.bool), tf.shape(inputs))

    @tf.custom_gradient
    def moments(x):
        whole = combine(measure(x, axis, mask))

        def gradient(_, dmean, dvariance):
            return _gradient(x, axis, mask, whole, *tf.unstack(total_gradient(tf.stack([dmean, dvariance])), 2))

        return (whole.count, whole.mean, whole.variance), gradient

    return moments(inputs)


def _gradient(x, axis, mask, moments, dmean, dvariance):
    """(1/n) (dmean + 2 (x − mean) dvariance), x − mean being (x − shift) − offset without a further pass."""
    slope = tf.math.divide_no_nan(2 * dvariance, moments.count)
    level = tf.math.divide_no_nan(dmean, moments.count) - slope * moments.offset
    dx = _along(level, x, axis) + _along(slope, x, axis) * (x - _along(moments.shift, x, axis))
    return dx if mask is None else tf.where(mask, dx, 0)


def _sample_mean(x, axis):
    """(elements of x, mean over the first eighth of its rows) for each channel."""
    sample = x[: -(-tf.shape(x)[0] // _SAMPLE)]
    total = _sum(sample, axis)
    return _count(x, axis) + tf.zeros_like(total), tf.math.divide_no_nan(total, _count(sample, axis))


def _mean(x, axis, mask):
    """(elements of x that count, their mean) for each channel: a sample might have none that count."""
    count = _sum(tf.cast(mask, x.dtype), axis)
    return count, tf.math.divide_no_nan(_sum(tf.where(mask, x, 0), axis), count)


def _count(x, axis):
    """Elements of x for each channel, a scalar of its dtype."""
    shape = tf.shape(x)
    return tf.cast(tf.reduce_prod(shape[:axis]) * tf.reduce_prod(shape[axis + 1 :]), x.dtype)


def _sum(x, axis):
    """Sum of each channel, one dimension after the other.

    TensorFlow adds up many rows one by one: over 128 × 32 × 32 elements at once the variance is 1e-5 off, one
    dimension after the other 1e-7, in the same time (benchmarks/batch_norm.py).
    """
    for dimension in reversed(range(x.shape.rank)):
        if dimension != axis:
            x = tf.reduce_sum(x, dimension)
    return x


def _sum_of_squares(x, axis):
    """Σ x² of each channel; over one dimension by the Euclidean norm, which does not write the squares to memory."""
    dimension = max(d for d in range(x.shape.rank) if d != axis)
    norms = tf.math.reduce_euclidean_norm(x, dimension, keepdims=True)
    return _sum(tf.square(norms), axis)


def _centred(x, shift, axis, mask):
    centred = x - _along(shift, x, axis)
    return centred if mask is None else tf.where(mask, centred, 0)


def _along(channels, x, axis):
    """A vector of channels in a shape that broadcasts to x."""
    if axis == x.shape.rank - 1:
        return channels
    return tf.reshape(channels, [-1 if d == axis else 1 for d in range(x.shape.rank)])


def layer_moments(layer, inputs, mask):
    """What keras.layers.BatchNormalization needs of a batch, for the global batch.

    Args:
        layer: the keras layer; its `axis` is that of the channels.
        inputs: float32 or float64 tensor of the shard (Keras has cast lower precisions up).
        mask: None or a boolean tensor of the shape of `inputs` without its last dimension.

    Returns:
        (mean, variance), each of shape (C,).
    """
    return _layer_moments(layer, inputs, mask, over_towers, shared_gradient)


def _layer_moments(layer, inputs, mask, combine, total_gradient):
    if mask is None:
        return _moments(inputs, layer.axis, None, combine, total_gradient)[1:]
    return _as_keras_divides(*_moments(inputs, layer.axis, tf.expand_dims(mask, -1), combine, total_gradient))


def _as_keras_divides(count, mean, variance):
    """Mean and variance of masked inputs as Keras has them: sums divided by n + keras.config.epsilon(), not by n.

    Σ (x − mean')² = n (variance + (mean − mean')²) where mean' is Keras' mean.
    """
    share = count / (count + keras.config.epsilon())
    return mean * share, share * (variance + tf.square(mean * (1 - share)))


class ShardMoments:
    """batch_norm="tower": what one call of a layer uses, the shard's moments for its outputs and the pooled ones.

    The moving statistics are given the mean and variance of the rows of all towers, merged by count. The variance is
    that of the pooled set, so the count-weighted mean of the towers' variances plus the variance of their means:
    inference divides by an estimate of the variance of the data (Ioffe, Szegedy 2015, algorithm 2), and the towers'
    own variances are too small for that where shards are: 0 for a shard of one row.

    Attributes:
        before: (variable, value) of each moving statistic before the call, None if the call needed no moments.
    """

    def __init__(self):
        self.before = None
        self._shard = None

    def own(self, layer, inputs, mask):
        """What `layer_moments` returns, of the shard alone: no collective."""
        statistics = [getattr(layer, name, None) for name in _STATISTICS]
        self.before = [(v, tf.identity(v.value)) for v in statistics if v is not None]
        return _layer_moments(layer, inputs, mask, self._keep, lambda gradient: gradient)

    def _keep(self, moments):
        self._shard = moments
        return moments

    def pooled(self, layer, inputs, mask):
        """What `layer_moments` returns, for the moving statistics: one collective, no gradient."""
        whole = over_towers(self._shard)
        if mask is None:
            return whole.mean, whole.variance
        return _as_keras_divides(whole.count, whole.mean, whole.variance)


@keras.saving.register_keras_serializable("multitower")
class BatchNormalization(upstream.BatchNormWithMoments):
    """keras.layers.BatchNormalization over all towers, whatever the step was told about batch normalisation.

        y = γ (x − mean) / √(variance + ε) + β        mean and variance of the global batch

    In a model given to `multitower.Trainer`, and in a step given to `multitower.replicate`, Keras' own layer does this
    already. This one does it with batch_norm="tower" too, for the layers where the shard is too small, and computes the
    variance of a batch in the same way on one tower. Outside a step it is Keras' layer.

    Args:
        *args, **kwargs: those of keras.layers.BatchNormalization; `synchronized` means nothing inside a step.

    Example:
        >>> import tensorflow as tf, multitower as mt
        >>> norm = mt.BatchNormalization(epsilon=0.0)
        >>> step = mt.replicate(lambda x: norm(x, training=True), devices="cpu:1")
        >>> step(tf.constant([[1.0], [3.0]])).numpy().tolist()
        [[-1.0], [1.0]]
    """

    def batch_moments(self, inputs, mask, of_keras):
        return of_keras(inputs, mask) if current() is None else layer_moments(self, inputs, mask)
