"""Count, mean and sum of squares of sets of numbers, of one set and of several taken together, right in float32.

Unlike E[x²] − E[x]², which has no right digit left once mean/std reaches 1/√ε (3000 in float32), the variance is right
whatever the mean is. Three things see to that, none of which costs a further pass over the numbers:

    shift    x is centred on the mean of a sample of itself, not on its mean rounded to float32
    offset   a mean is kept as a sum of two numbers, shift + offset, so that differences of means are exact
    sums     are taken one dimension after the other: short sums, whose rounding errors stay small

Source: Chan, Golub, LeVeque, "Algorithms for computing the sample variance: analysis and recommendations", The American
Statistician 37 (1983): shifted data for one set, the combination by count for several.
"""

from typing import Any, NamedTuple

import tensorflow as tf

# An eighth of the rows gives the shift: (mean − shift)² ≤ 8 σ² then, which bounds what centring on it can lose.
_SAMPLE = 8


class Moments(NamedTuple):
    """What a set of numbers has for a mean and a variance; all of one shape, (C,), or (N, C) for N sets.

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
    """The `Moments` of each channel of x.

        shift = mean of a sample       d = x − shift
        offset = (1/n) Σ d             m2 = Σ d² − offset · Σ d

    Args:
        x: float32 or float64 tensor with C channels in dimension `axis`; there may be no rows.
        axis: dimension of the channels, from 0.
        mask: None, or a boolean tensor of the shape of x: only elements where it is True count.
    """
    count, shift = _sample_mean(x, axis) if mask is None else _mean(x, axis, mask)
    centred = x - _along(shift, x, axis)
    if mask is not None:
        centred = tf.where(mask, centred, 0)
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


def gradient(x, axis, mask, moments, dmean, dvariance):
    """The gradient of x from those of the mean and variance of a set that x is in.

        dx = (1/n) (dmean + 2 (x − mean) dvariance)

    Args:
        x, axis, mask: as for `measure`.
        moments: the `Moments` of the set, of shape (C,).
        dmean, dvariance: tensors of shape (C,).
    """
    slope = tf.math.divide_no_nan(2 * dvariance, moments.count)
    level = tf.math.divide_no_nan(dmean, moments.count) - slope * moments.offset
    with tf.control_dependencies([slope]):  # or a graph computes it in the forward pass and keeps it, as large as x
        centred = x - _along(moments.shift, x, axis)
    dx = _along(level, x, axis) + _along(slope, x, axis) * centred
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

    On a CPU, TensorFlow adds up rows one by one: over 128 × 32 × 32 elements at once the variance is 1e-5 off, one
    dimension after the other 1e-7, in the same time.
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


def _along(channels, x, axis):
    """A vector of channels in a shape that broadcasts to x."""
    if axis == x.shape.rank - 1:
        return channels
    return tf.reshape(channels, [-1 if d == axis else 1 for d in range(x.shape.rank)])
