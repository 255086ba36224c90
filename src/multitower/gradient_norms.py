"""Norms of the gradients of a step, of every tower and of all together, and the noise scale that follows from them.

A tower of b rows has the mean gradient of b rows, all towers together that of B. If rows are independent, the mean
gradient of n rows has, around the true one G, the variance tr(Σ) / n, so that in expectation

    |G_n|² = |G|² + tr(Σ) / n        B_simple = tr(Σ) / |G|²

and two different n, b and B, give both unknowns. B_simple is about the batch size beyond which larger batches save few
steps: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), section 2.2 and appendix A.1. Both parts
are averaged over steps before they are divided, as one step alone tells little.
"""

import threading
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import tensorflow as tf

from .collectives import sum_over_towers
from .tower import Weighting, this_tower

_tracing = threading.local()


@dataclass(frozen=True)
class GradientSummary:
    """What the steps since the last one say; None where there were no steps to say it.

    Attributes:
        norm: root mean square of the norm of the gradient of the global batch.
        tower_norms: the same of the mean gradient of each tower's rows.
        noise_scale: B_simple in rows; None too where the estimate of |G|² is not positive, or N = 1.
    """

    norm: float | None
    tower_norms: list[float | None]
    noise_scale: float | None


class GradientNorms:
    """Sums over steps, kept in a variable that the step itself adds to.

    Args:
        count: N, the number of towers.
    """

    def __init__(self, count):
        self.count = count
        # steps, Σ|G_B|², estimates, Σ tr(Σ), Σ|G|², then for each tower Σ|G_b|², then its steps with rows
        self.sums = tf.Variable(tf.zeros([5 + 2 * count]), trainable=False, name="gradient_norms")

    def take(self):
        """The `GradientSummary` of the steps since the last call."""
        steps, big, estimates, noise, signal, *towers = self.sums.numpy().tolist()
        self.sums.assign(tf.zeros_like(self.sums))
        squared, with_rows = towers[: self.count], towers[self.count :]
        return GradientSummary(
            _root_mean(big, steps),
            [_root_mean(total, n) for total, n in zip(squared, with_rows, strict=True)],
            noise / signal if estimates and signal > 0 else None,
        )

    def add(self, tower, own, whole):
        """In a step: add |G_b|² of this tower and |G_B|² of all, both scalars; a step that overflowed is left out."""
        rows = tf.cast(tower.rows, tf.float32)
        present = tf.cast(rows > 0, tf.float32)
        squared = sum_over_towers(tf.one_hot(tower.index, self.count) * own) if self.count > 1 else own[None]
        towers = tf.reduce_sum(present)
        small = tf.math.divide_no_nan(tf.reduce_sum(squared * present), towers)
        per_row_small = tf.math.divide_no_nan(tf.reduce_sum(tf.math.divide_no_nan(present, rows)), towers)
        per_row_whole = 1.0 / tf.reduce_sum(rows)
        estimated = tf.cast(towers > 1, tf.float32)
        noise = tf.math.divide_no_nan(small - whole, per_row_small - per_row_whole) * estimated
        signal = (whole - noise * per_row_whole) * estimated
        seen = tf.concat([[1.0, whole, estimated, noise, signal], squared * present, present], 0)
        finite = tf.reduce_all(tf.math.is_finite(seen))
        self.sums.assign_add(tf.where(finite, seen, tf.zeros_like(seen)))


def _root_mean(total, count):
    return (total / count) ** 0.5 if count else None


@contextmanager
def recording(norms, optimizer):
    """Steps traced while this is open add the gradients given to `optimizer` to `norms`; None: no step does."""
    before, _tracing.recorder = getattr(_tracing, "recorder", None), (norms, optimizer)
    try:
        yield
    finally:
        _tracing.recorder = before


def record_gradients(optimizer, gradients, summed):
    """Where a step gives `optimizer` its gradients: those of this tower, and their sum over towers."""
    norms, recorded = getattr(_tracing, "recorder", None) or (None, None)
    if norms is None or optimizer is not recorded:
        return
    tower = this_tower()
    own = whole = squared_norm(summed, optimizer)
    if tower.count > 1:
        own = squared_norm(gradients, optimizer)
    if tower.count > 1 and tower.weighting is Weighting.LOSS:  # weighted by rows already: back to the mean of own rows
        own = own * tower.inverse_share(own.dtype) ** 2
    norms.add(tower, own, whole)


def squared_norm(gradients, optimizer=None):
    """Σ |g|² of a list of gradients, a float32 scalar: dense, sparse (rows that stand twice are added first) or None.

    Args:
        gradients: as `optimizer.apply` takes them.
        optimizer: a LossScaleOptimizer's scale is taken out.
    """
    scale = 1.0
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = 1.0 / tf.cast(optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale, tf.float32)
    squares = [tf.reduce_sum(tf.square(tf.cast(_dense(g), tf.float32) * scale)) for g in gradients if g is not None]
    return tf.add_n(squares) if squares else tf.zeros([])


def _dense(gradient):
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, position = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, position, tf.size(indices))
