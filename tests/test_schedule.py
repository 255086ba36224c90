"""Learning rates: against their closed forms, by examples whatever the batch, saved, loaded, scaled, and on towers."""

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multitower.errors import ScheduleError
from multitower.schedule import (
    Scaled,
    WarmUp,
    scale_learning_rate,
    scaling_factor,
    staircase,
    steps_per_epoch,
    warm_up,
)
from multitower.upstream import learning_rate_of
from oracle import check

RATES = st.floats(1e-5, 10.0)
COUNTS = st.integers(1, 100_000)
SINGLE = 2.0**-22  # a product of four numbers of float32


def at(rate, step):
    """The learning rate of a step, which an optimizer counts in int64."""
    return float(rate(keras.ops.cast(step, "int64")))


def seen(step, examples, batch):
    """Examples before a step, counted one batch after another's closed form: see the module's drawing."""
    steps = steps_per_epoch(examples, batch)
    return examples * (step // steps) + min(examples, batch * (step % steps))


# Staircase


@settings(deadline=None, max_examples=60)
@given(RATES, st.floats(0.1, 1.0), st.integers(1, 400), COUNTS, COUNTS, st.integers(0, 2**24))
def test_staircase_is_its_closed_form(initial, decay, every, examples, batch, step):
    got = at(staircase(initial, decay, every, examples, batch), step)
    expected = initial * decay ** (seen(step, examples, batch) // (every * examples))
    assert got == pytest.approx(expected, rel=SINGLE * max(1, step // every), abs=1e-30)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 5000), COUNTS, st.integers(1, 20))
def test_staircase_changes_where_an_epoch_ends_with_any_batch(every, examples, batch, change):
    rate = staircase(1.0, 0.5, every, examples, batch)
    step = change * every * steps_per_epoch(examples, batch)
    assert seen(step, examples, batch) == change * every * examples
    assert (at(rate, step - 1), at(rate, step)) == (0.5 ** (change - 1), 0.5**change)


@settings(deadline=None, max_examples=30)
@given(st.floats(0.01, 3.0), st.integers(1, 5000), st.integers(1, 300))
def test_part_of_an_epoch_is_rounded_to_steps(every, examples, batch):
    steps = steps_per_epoch(examples, batch)
    rate = staircase(1.0, 0.5, every, examples, batch)
    first = max(1, round(every * steps))
    assert (at(rate, first - 1), at(rate, first)) == (1.0, 0.5)


def test_staircase_of_the_tutorial_is_the_same_on_1_2_and_8_towers():
    for towers in (1, 2, 8):
        steps = steps_per_epoch(50_000, 128 * towers)
        rate = staircase(0.1, 0.1, 350, 50_000, 128 * towers)
        rates = [at(rate, epoch * steps) for epoch in (0, 349, 350, 700)]
        assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001], rel=SINGLE)


def test_a_schedule_that_counts_steps_alone_is_told_from_it():
    """Control: with the same steps for another batch the decay comes at another epoch."""
    of_steps = staircase(0.1, 0.1, 350, 50_000, 128)
    assert at(of_steps, 350 * steps_per_epoch(50_000, 256)) == pytest.approx(0.1)


# Warm-up


@settings(deadline=None, max_examples=60)
@given(RATES, st.integers(1, 10), st.integers(1, 5000), COUNTS, st.floats(0, 1), st.integers(0, 100_000))
def test_warm_up_is_its_closed_form(rate, over, examples, batch, start, step):
    steps = over * steps_per_epoch(examples, batch)
    expected = rate * (start + (1 - start) * min(1, (step + 1) / steps))
    assert at(warm_up(rate, over, examples, batch, start), step) == pytest.approx(expected, rel=4 * SINGLE)


def test_warm_up_of_a_staircase_ends_and_decays_at_the_same_epochs_with_any_batch():
    for batch in (10, 30, 100, 1000):
        steps = steps_per_epoch(1000, batch)
        rate = warm_up(staircase(0.4, 0.5, 4, 1000, batch), 2, 1000, batch, start=0.25)
        ends = [at(rate, epoch * steps - 1) for epoch in (1, 2, 4, 5)]
        assert ends == pytest.approx([0.4 * 0.625, 0.4, 0.4, 0.2], rel=4 * SINGLE)


# Mistakes


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: staircase(0.1, 0.1, 1, 0, 8), "examples=0; expected a whole number of at least 1"),
        (lambda: staircase(0.1, 0.1, 1, 10, 2.5), "batch=2.5; expected a whole number"),
        (lambda: staircase(0.1, 0.1, 1, True, 8), "examples=True; expected a whole number"),
        (lambda: staircase(-0.1, 0.1, 1, 10, 2), "initial=-0.1; expected a number above 0"),
        (lambda: staircase(0.1, 0.0, 1, 10, 2), "decay=0.0; expected a number above 0"),
        (lambda: staircase(0.1, 0.1, math.inf, 10, 2), "every_epochs=inf; expected a number above 0"),
        (lambda: warm_up(0.1, 0, 10, 2), "over_epochs=0; expected a number above 0"),
        (lambda: warm_up(0.1, 1, 10, 2, start=1.5), "start=1.5; expected a share of the full rate, 0 to 1"),
        (lambda: scaling_factor("log", 2, 1), "scaling rule 'log'; expected none, linear, sqrt"),
        (lambda: scale_learning_rate(keras.optimizers.SGD(lambda: 0.1), 2.0), "the learning rate of SGD is function"),
    ],
)
def test_mistakes_are_named(make, told):
    with pytest.raises(ScheduleError, match="^" + told.replace("(", r"\(")):
        make()


# Scaling


@settings(deadline=None, max_examples=30)
@given(COUNTS, COUNTS)
def test_scaling_rules(batch, base):
    assert scaling_factor("none", batch, base) == 1
    assert scaling_factor("linear", batch, base) == batch / base
    assert scaling_factor("sqrt", batch, base) ** 2 == pytest.approx(batch / base)


class Half(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of a user's own."""

    def __call__(self, step):
        return 0.5 / (keras.ops.cast(step, "float32") + 1)

    def get_config(self):
        return {}


schedules = keras.optimizers.schedules
ALL = {
    "exponential": schedules.ExponentialDecay(0.1, 3, 0.5),
    "inverse time": schedules.InverseTimeDecay(0.1, 3, 0.5),
    "polynomial": schedules.PolynomialDecay(0.1, 7, 0.02),
    "piecewise": schedules.PiecewiseConstantDecay([2, 5], [0.3, 0.2, 0.1]),
    "cosine": schedules.CosineDecay(0.1, 7, alpha=0.2, warmup_target=0.4, warmup_steps=3),
    "cosine without warm-up": schedules.CosineDecay(0.1, 7, alpha=0.2),
    "cosine restarts": schedules.CosineDecayRestarts(0.1, 3, alpha=0.2),
    "warm-up": WarmUp(schedules.ExponentialDecay(0.1, 3, 0.5), 4),
    "a user's": Half(),
}


@pytest.mark.parametrize("schedule", ALL.values(), ids=ALL)
def test_every_schedule_is_scaled_as_a_whole(schedule):
    optimizer = keras.optimizers.SGD(schedule)
    scale_learning_rate(optimizer, 2.5)
    scaled = learning_rate_of(optimizer)
    got, plain = ([at(rate, step) for step in range(10)] for rate in (scaled, schedule))
    assert got == pytest.approx([2.5 * rate for rate in plain], rel=4 * SINGLE)
    assert isinstance(scaled, Scaled) != type(schedule).__module__.startswith("keras.")


def test_every_schedule_of_keras_is_among_them():
    classes = {c for c in vars(schedules).values() if isinstance(c, type)} - {schedules.LearningRateSchedule}
    assert classes == {type(schedule) for schedule in ALL.values()} - {WarmUp, Half}


def test_a_number_is_scaled_with_a_loss_scale_too():
    inner = keras.optimizers.SGD(0.1)
    scale_learning_rate(keras.optimizers.LossScaleOptimizer(inner), 4.0)
    assert float(inner.learning_rate) == pytest.approx(0.4)


# In models


def model_with(rate):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


@pytest.mark.parametrize("rate", [staircase(0.1, 0.5, 1, 8, 4), WarmUp(0.1, 4, 0.5), Scaled(WarmUp(0.1, 4), 3.0)])
def test_saved_and_loaded_models_go_on_with_it(rate, tmp_path):
    x = np.random.default_rng(0).normal(size=(8, 3))
    model = model_with(rate)
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert [at(learning_rate_of(loaded.optimizer), s) for s in range(9)] == [at(rate, s) for s in range(9)]
    for m in (model, loaded):
        m.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], loaded.get_weights()[0])


def test_a_staircase_is_a_schedule_of_keras():
    assert type(staircase(0.1, 0.5, 1, 8, 4)).__module__.startswith("keras.")


def train_with_schedule(model):
    x = np.random.default_rng(0).normal(size=(10, 3))
    return model.fit(x, x[:, :1], batch_size=4, epochs=3, shuffle=False, verbose=0)


@pytest.mark.parametrize("name", ["warm-up", "piecewise", "cosine", "a user's"])
def test_towers_follow_a_schedule_as_one_device_does(name):
    check(lambda: model_with(ALL[name]), train_with_schedule, 3)


def test_one_tower_follows_a_schedule_as_plain_keras_does():
    check(lambda: model_with(ALL["warm-up"]), train_with_schedule, 1)
