"""Batch normalisation over towers: the mean and variance of the global batch, forward and backward.

Each tower reduces its shard to its `Moments`, the towers gather these in one collective and each merges them by count,
with the same operations in the same order: the result is equal to the bit on all towers. Backward, one collective sums
the gradients of mean and variance; everything else runs on the tower's own device.

    shard ──measure──▶ count, mean, M2 ──gather──▶ those of N towers ──merge──▶ mean, variance of the global batch
    dx ◀── (1/n) (dmean + 2 (x − mean) dvariance) ◀──sum over towers── gradients of mean and variance

Source: Ioffe, Szegedy, "Batch normalization" (2015), https://arxiv.org/abs/1502.03167; for the moments see `moments`.
"""

import keras
import tensorflow as tf

from . import upstream
from .collectives import gather_fixed
from .exchange import shared_gradient
from .moments import Moments, gradient, measure, merge
from .tower import current

# what keras.layers.BatchNormalization keeps and decays; the last three with renorm=True only
_STATISTICS = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


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

        def backward(_, dmean, dvariance):
            total = total_gradient(tf.stack([dmean, dvariance]))
            return gradient(x, axis, mask, whole, *tf.unstack(total, 2))

        return (whole.count, whole.mean, whole.variance), backward

    return moments(inputs)


def layer_moments(layer, inputs, mask):
    """What keras.layers.BatchNormalization needs of a batch, for the global batch.

    Args:
        layer: the keras layer; its `axis` is that of the channels.
        inputs: float32 or float64 tensor of the shard (Keras has cast lower precisions up).
        mask: None or a boolean tensor of the shape of `inputs` without its last dimension.

    Returns:
        (mean, variance), each of shape (C,).
    """
    with tf.name_scope("multitower_batch_norm"):
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
