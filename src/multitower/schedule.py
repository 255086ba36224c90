"""Learning rates by examples seen: staircase decay, warm-up, and the rule for another global batch.

    examples seen after step s of batches of B rows of an epoch of E examples, ⌈E/B⌉ steps each:

        seen(s) = E · ⌊s / ⌈E/B⌉⌋ + min(E, B · (s mod ⌈E/B⌉))        the last batch of an epoch has what is left

A learning rate that follows `seen` decays after the same examples on any number of devices and with any global batch.
Any Keras schedule trains on towers; these are schedules of Keras where Keras has them, so that a saved model loads
without multitower. `WarmUp` and `Scaled` are our own: import this module before a model saved with one is loaded, or
load it with `compile=False`.
"""

import math
from typing import Any

import keras
import tensorflow as tf

from .errors import ScheduleError
from .upstream import learning_rate_of

Schedule = keras.optimizers.schedules.LearningRateSchedule

SCALING = {"none": lambda ratio: 1.0, "linear": float, "sqrt": math.sqrt}


def steps_per_epoch(examples: int, batch: int) -> int:
    """⌈E/B⌉, the steps of an epoch whose last batch has the rows that are left.

    Args:
        examples: E, rows of the training data.
        batch: B, rows of the global batch.

    Example:
        >>> steps_per_epoch(examples=1000, batch=300)
        4

    Raises:
        ScheduleError: not whole numbers of at least 1.
    """
    for name, value in (("examples", examples), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{name}={value!r}; expected a whole number of at least 1")
    return -(-examples // batch)


def staircase(initial: float, decay: float, every_epochs: float, examples: int, batch: int) -> Schedule:
    """Learning rate that is multiplied by `decay` every so many epochs of examples, whatever the batch.

        lr(s) = initial · decay^⌊s / K⌋,   K = every_epochs · ⌈examples/batch⌉ steps

    For whole epochs the rate changes exactly where an epoch ends, with any batch on any number of devices. The steps of
    a part of an epoch are rounded to a whole number.

    Args:
        initial: learning rate of the first step.
        decay: factor, more than 0.
        every_epochs: epochs between two changes, more than 0.
        examples: E, rows of the training data.
        batch: B, rows of the global batch: of all towers together.

    Returns:
        `keras.optimizers.schedules.ExponentialDecay`, which loads without multitower; exact up to 2²⁴ steps, where
        its float32 ends.

    Raises:
        ScheduleError: a number out of its range.

    Example:
        >>> rate = staircase(0.1, 0.1, every_epochs=2, examples=1000, batch=300)  # 4 steps an epoch
        >>> [round(float(rate(step)), 4) for step in (0, 7, 8, 16)]
        [0.1, 0.1, 0.01, 0.001]

    Source: the rule of A. Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014, section 5,
    and of TensorFlow's CIFAR-10 tutorial (`NUM_EPOCHS_PER_DECAY`).
    """
    _check_positive(initial=initial, decay=decay, every_epochs=every_epochs)
    steps = max(1, round(every_epochs * steps_per_epoch(examples, batch)))
    return keras.optimizers.schedules.ExponentialDecay(float(initial), steps, float(decay), staircase=True)


def warm_up(rate: Any, over_epochs: float, examples: int, batch: int, start: float = 0.0) -> "WarmUp":
    """A learning rate or schedule that grows to its full size over the first epochs, by examples seen.

        lr(s) = rate(s) · (start + (1 − start) · min(1, (s + 1) / K)),   K = over_epochs · ⌈examples/batch⌉ steps

    Step s counts with the examples seen when it is done, so that with start = 0 the first one does something.

    Args:
        rate: a number, or any Keras schedule; it keeps its own count of steps, warm-up included.
        over_epochs: length of the warm-up, more than 0.
        examples: E, rows of the training data.
        batch: B, rows of the global batch.
        start: share of the full rate to begin with, 0 to 1. 1 / (B / B₀) begins with the rate of the smaller batch
            where `rate` is that of B scaled linearly from B₀.

    Raises:
        ScheduleError: a number out of its range.

    Example:
        >>> rate = warm_up(0.4, over_epochs=1, examples=1000, batch=250)
        >>> [round(float(rate(step)), 4) for step in range(5)]
        [0.1, 0.2, 0.3, 0.4, 0.4]

    Source: P. Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017, section 2.2.
    """
    _check_positive(over_epochs=over_epochs)
    if not 0 <= start <= 1:
        raise ScheduleError(f"start={start!r}; expected a share of the full rate, 0 to 1")
    return WarmUp(rate, max(1, round(over_epochs * steps_per_epoch(examples, batch))), start)


def scaling_factor(rule: str, batch: int, base_batch: int) -> float:
    """By how much a learning rate chosen for one global batch is multiplied for another.

        none: 1      linear: B / B₀      sqrt: √(B / B₀)

    Args:
        rule: "none", "linear" or "sqrt".
        batch: B, rows of the global batch.
        base_batch: B₀, rows of the batch the rate was chosen for.

    Example:
        >>> scaling_factor("sqrt", batch=512, base_batch=128)
        2.0

    Raises:
        ScheduleError: another rule.

    Source: Goyal et al. 2017, section 2.1, for SGD with large batches (linear); S. Malladi et al., On the SDEs and
    Scaling Rules for Adaptive Gradient Algorithms, 2022, for Adam (square root).
    """
    if rule not in SCALING:
        raise ScheduleError(f"scaling rule {rule!r}; expected {', '.join(SCALING)}")
    return SCALING[rule](batch / base_batch)


def scale_learning_rate(optimizer: keras.Optimizer, factor: float) -> None:
    """Multiply the learning rate of an optimizer, a number or a schedule, by a factor.

    Schedules of Keras stay schedules of Keras; one of another class is wrapped in `Scaled`.

    Args:
        optimizer: of a compiled model; with a loss scale or not.
        factor: more than 0.

    Raises:
        ScheduleError: its learning rate is neither a number nor a Keras schedule.

    Example:
        >>> optimizer = keras.optimizers.SGD(0.1)
        >>> scale_learning_rate(optimizer, 4.0)
        >>> round(float(optimizer.learning_rate), 4)
        0.4
    """
    inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
    rate = learning_rate_of(inner)
    if isinstance(rate, Schedule):
        inner.learning_rate = _scaled(rate, factor)
    elif isinstance(rate, keras.Variable):
        inner.learning_rate = float(rate.numpy()) * factor
    else:
        raise ScheduleError(
            f"the learning rate of {type(inner).__name__} is {type(rate).__name__}; only a number or a Keras "
            "LearningRateSchedule can be scaled"
        )


# What is a rate, not a fraction of one or a count, in the configurations of Keras' schedules
_RATES = ("initial_learning_rate", "end_learning_rate", "warmup_target", "values")


def _scaled(schedule: Schedule, factor: float) -> Schedule:
    if not type(schedule).__module__.startswith("keras."):
        return Scaled(schedule, factor)
    config: dict[str, Any] = schedule.get_config()
    for name in _RATES:
        rate = config.get(name)
        if rate is not None:
            config[name] = [v * factor for v in rate] if isinstance(rate, list | tuple) else rate * factor
    return type(schedule).from_config(config)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ScheduleError(f"{name}={value!r}; expected a number above 0")


class _Wrapper(Schedule):
    """A schedule around another learning rate.

    Args:
        rate: a number or a Keras schedule.
    """

    def __init__(self, rate: Any):
        self.rate = rate

    def _inner(self, step: Any) -> Any:
        rate = self.rate(step) if isinstance(self.rate, Schedule) else self.rate
        return tf.cast(rate, tf.float32)

    def get_config(self) -> dict[str, Any]:
        return {"rate": keras.saving.serialize_keras_object(self.rate)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config | {"rate": keras.saving.deserialize_keras_object(config["rate"])})


@keras.saving.register_keras_serializable("multitower")
class WarmUp(_Wrapper):
    """rate(s) · (start + (1 − start) · min(1, (s + 1) / steps)); made by `warm_up`, which explains it.

    Args:
        rate: a number or a Keras schedule.
        steps: length of the warm-up.
        start: share of the rate to begin with.
    """

    def __init__(self, rate: Any, steps: int, start: float = 0.0):
        super().__init__(rate)
        self.steps, self.start = steps, start

    def __call__(self, step: Any) -> Any:
        done = tf.minimum(1.0, tf.cast(step + 1, tf.float32) / self.steps)
        return self._inner(step) * (self.start + (1 - self.start) * done)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"steps": self.steps, "start": self.start}


@keras.saving.register_keras_serializable("multitower")
class Scaled(_Wrapper):
    """factor · rate(s); made by `scale_learning_rate`.

    Args:
        rate: a Keras schedule.
        factor: more than 0.
    """

    def __init__(self, rate: Any, factor: float):
        super().__init__(rate)
        self.factor = factor

    def __call__(self, step: Any) -> Any:
        return self._inner(step) * self.factor

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"factor": self.factor}
