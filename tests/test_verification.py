"""verify(): equal where it is, and every way of getting it wrong found and named."""

import functools
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import broken_models as broken
import multitower as mt
from multitower import hooks
from multitower.tower import this_tower
from multitower.verification import model_copy
from oracle import devices, state
from small_models import (
    CLASSES,
    FEATURES,
    classes,
    classification,
    compiled,
    cross_entropy,
    features,
    linear,
    momentum,
    numbers,
    own_loss,
    regression,
    sequential,
    unbuilt_subclassed,
)

slow = pytest.mark.slow
ROWS = 12
NUMBERS = tuple(regression(ROWS).values())
KINDS = tuple(classification(ROWS).values())
WEIGHTED = (*NUMBERS, np.random.default_rng(3).uniform(0.1, 3, ROWS))


def adam():
    """Clipping, an exponential moving average, a metric that is no mean over rows, dropout, noise."""
    stack = [keras.Input((FEATURES,)), layers.Dense(4, "tanh"), layers.Dropout(0.5, name="drop")]
    stack += [layers.GaussianNoise(0.1, name="noise")]
    optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1, use_ema=True)
    return compiled([*stack, layers.Dense(1)], optimizer, metrics=[keras.metrics.RootMeanSquaredError()])


class Gan(keras.Model):
    """Two optimizers that Keras does not list, two networks, no call."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([layers.Dense(FEATURES)])
        self.judge = keras.Sequential([layers.Dense(1)])
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, judge, maker):
        super().compile()
        self.judge_optimizer, self.maker_optimizer = judge, maker

    def train_step(self, data):
        real, noise = data
        judged = self._step(self.judge_optimizer, self.judge, lambda: self._judged(real, 1) + self._made(noise, 0))
        made = self._step(self.maker_optimizer, self.maker, lambda: self._made(noise, 1))
        return {"judge": judged, "maker": made}

    def _judged(self, x, label):
        logits = self.judge(x)
        return self.loss_of(label * tf.ones_like(logits), logits)

    def _made(self, noise, label):
        return self._judged(self.maker(noise), label)

    def _step(self, optimizer, network, loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of()
        weights = network.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss


def gan():
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01))
    return model


def reader():
    """Masks, a recurrent layer with dropout, slices as gradients, weights of rows."""
    members = [layers.Embedding(9, 3, mask_zero=True), layers.LSTM(3, dropout=0.2, recurrent_dropout=0.1)]
    model = compiled([*members, layers.Dense(1)], weighted_metrics=["mae"])
    model(np.ones((1, 5)))
    return model


WORDS = np.random.default_rng(0).integers(0, 9, (ROWS, 5))


def half_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        stack = [keras.Input((FEATURES,)), layers.Dense(8, "relu"), layers.Dense(CLASSES, dtype="float32")]
        return compiled(stack, keras.optimizers.Adam(0.01), cross_entropy(), metrics=["accuracy"])
    finally:
        keras.config.set_dtype_policy("float32")


def neighbours():
    """A loss of pairs of rows: it depends on their order, and compute_loss sees them all."""

    def loss(y, prediction):
        return tf.reduce_mean((prediction - tf.roll(prediction, 1, 0)) ** 2 + (y - prediction) ** 2)

    return compiled([keras.Input((FEATURES,)), layers.Dense(1)], loss=loss)


EQUAL = {
    "adam": (adam, NUMBERS, 3, "random layers ran as in inference: drop, noise"),
    "batch norm": (sequential, KINDS, 2, None),
    "unbuilt": (unbuilt_subclassed, NUMBERS, 3, "state after one step"),
    "own step, a mean": (broken.with_loss(broken.mean), NUMBERS, 2, None),
    "one tower": (linear, NUMBERS, 1, None),
    "fewer rows than towers": (linear, tuple(regression(2).values()), 4, None),
    "two optimizers": (gan, (features(ROWS), features(ROWS, 5)), 2, "state after one step"),
    "order of rows": (neighbours, NUMBERS, 2, "depends on the order of the rows on one device"),
    "own loss": pytest.param(own_loss, NUMBERS, 4, None, marks=slow),
    "masks": pytest.param(reader, (WORDS, numbers(ROWS), WEIGHTED[2]), 2, "in inference: lstm_cell", marks=slow),
    "half precision": pytest.param(half_precision, KINDS, 4, None, marks=slow),
}


@pytest.mark.parametrize(("build", "batch", "count", "note"), EQUAL.values(), ids=EQUAL)
def test_equal(build, batch, count, note):
    report = mt.verify(build, batch, devices(count))
    assert report.equal, report
    assert report.largest_difference <= report.bound
    assert report.first_divergence is None
    assert report.reason is None
    assert all(v["copies_equal"] and v["largest_difference"] <= v["bound"] for v in report.variables)
    assert note is None or any(note in line for line in report.notes), report.notes


# Negative controls: what is wrong is found, and named


def of_trainer(**options):
    return {"make_trainer": functools.partial(mt.Trainer, placement="replicated", **options)}


class StaleCopy(mt.Trainer):
    """After the second step one weight of tower 1 is one rounding step off."""

    def fit(self, *args, callbacks, **kwargs):
        nudge = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch == 1 and self._nudge())
        return super().fit(*args, callbacks=[nudge, *callbacks], **kwargs)

    def _nudge(self):
        copy = self.copies(self.model.trainable_variables[0])[1]
        copy.assign(np.nextafter(copy.numpy(), np.float32(9)))


def mlp():
    return compiled([keras.Input((FEATURES,)), layers.Dense(3, "tanh"), layers.Dense(1)])


def mlp_with_adam():
    """An optimizer that makes the same of a gradient N times too large, but for its slots."""
    stack = [keras.Input((FEATURES,)), layers.Dense(3, "tanh"), layers.Dense(1)]
    return compiled(stack, keras.optimizers.Adam(0.01))


CONTROLS = {
    "divided by the local batch size": (
        broken.with_loss(broken.prior),
        {},
        "the loss is divided by the local batch size in a part that is not a sum over the tower's rows",
    ),
    "batch norm per tower": (sequential, of_trainer(batch_norm="tower"), "batch normalisation per tower: with batch_"),
    "a fixed number": (broken.with_loss(broken.fixed_number), {}, "the loss is a sum over rows, not a mean"),
    "by hand": pytest.param(
        broken.with_loss(broken.mean, by_hand=True), {}, "the gradient is never reduced", marks=slow
    ),
    "rows of all towers": pytest.param(
        broken.with_loss(broken.all_rows),
        {},
        "a sum in place of a mean: the gradient is N = 2 times that of one device",
        marks=slow,
    ),
    "order": (broken.with_layer(broken.last_row), {}, "order-dependent state: "),
    "a layer that mixes rows": (broken.with_layer(broken.centred), {}, "mixes rows"),
    "state": (broken.with_layer(broken.running_mean), {}, "is updated from each tower's own rows"),
    "a number that is returned": (broken.largest_error, {}, "but largest is not: what goes into it is neither rows"),
    "a sum of weights": pytest.param(
        broken.with_loss(broken.sum_of_weights), {}, "divides by something of the tower's own rows", marks=slow
    ),
    "a sum in part": pytest.param(
        broken.with_loss(broken.sum_in_part), {}, "a part of the loss is a sum over rows", marks=slow
    ),
}


@pytest.mark.parametrize(("build", "options", "reason"), CONTROLS.values(), ids=CONTROLS)
def test_a_mistake_is_found_and_named(build, options, reason):
    batch = KINDS if build is sequential else WEIGHTED
    report = mt.verify(build, batch, devices(2), **options)
    assert report.equal is False
    assert report.exit_code == 1
    assert report.first_divergence
    assert reason in report.reason


def times(factor):
    """Sums of gradients that are too large by a factor."""
    return lambda gradients: [None if g is None else factor * g for g in SUM(gradients)]


def unweighted(gradients):
    """Every tower counts the same, in a step whose gradients are weighted when they are summed."""
    tower = this_tower()
    return SUM([g * tower.inverse_share(g.dtype) / tower.count for g in gradients])


def of_tower_0(gradients):
    return SUM([g * tf.cast(mt.tower_index() == 0, g.dtype) for g in gradients])


SUM = hooks.sum_gradients
REDUCTIONS = {
    "skipped": (mlp, list, "the gradient is never reduced"),
    "a sum": (mlp_with_adam, times(2), "a sum in place of a mean: the gradient is N = 2 times that of one device"),
    "skipped, batch norm": pytest.param(sequential, list, "the gradient is never reduced", marks=slow),
    "a sum, batch norm": pytest.param(sequential, times(2), "a sum in place of a mean", marks=slow),
    "unweighted": pytest.param(
        broken.with_loss(broken.mean), unweighted, "divided by the local batch size and gradients averaged", marks=slow
    ),
    "one tower": pytest.param(mlp, of_tower_0, "only the gradient of tower 0 is used", marks=slow),
    "a little too large": pytest.param(mlp, times(1.01), "the gradient is 1.01 times", marks=slow),
}


@pytest.mark.parametrize(("build", "reduction", "reason"), REDUCTIONS.values(), ids=REDUCTIONS)
def test_a_wrong_reduction_is_found_and_named(monkeypatch, build, reduction, reason):
    monkeypatch.setattr(hooks, "sum_gradients", reduction)
    report = mt.verify(build, KINDS if build is sequential else NUMBERS, devices(2))
    assert report.equal is False
    assert reason in report.reason
    assert report.first_divergence["step"] == (2 if reduction is unweighted else 1)  # the first batch is even


def test_a_stale_copy_is_placed():
    report = mt.verify(mlp, NUMBERS, devices(3), make_trainer=functools.partial(StaleCopy, placement="replicated"))
    weight = report.variables[0]["path"]
    where = {"step": 2, "rows": 11, "layer": report.variables[0]["layer"], "variable": weight, "tower": 1}
    assert report.first_divergence == where
    assert [v["path"] for v in report.variables if not v["copies_equal"]] == [weight]
    assert f"a stale copy: {weight} has another value on tower 1" in report.reason


def test_the_first_layer_that_diverges_is_named(monkeypatch):
    """Only the gradient of the last layer is wrong."""
    monkeypatch.setattr(hooks, "sum_gradients", lambda gradients: [*SUM(gradients)[:-2], *gradients[-2:]])
    report = mt.verify(mlp, NUMBERS, devices(2))
    last = [v for v in report.variables if v["kind"] == "weight"][-2:]
    assert report.first_divergence["variable"] == last[0]["path"]
    assert report.first_divergence["layer"] == last[0]["layer"]
    assert f"the gradient of {last[0]['path']}, {last[1]['path']} is never reduced" in report.reason


def no_learning_rate():
    return compiled([keras.Input((FEATURES,)), layers.Dense(1)], keras.optimizers.SGD(0.0))


def too_fast():
    return compiled([keras.Input((FEATURES,)), layers.Dense(1)], keras.optimizers.SGD(1e25))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (broken.with_layer(broken.noise), "random layers: layer"),
        (broken.with_layer(broken.noise_without_seed), "random numbers or something else that is not deterministic"),
        (no_learning_rate, "nothing is trained"),
        (too_fast, "is not finite on one device after step"),
    ],
)
def test_what_cannot_be_compared_is_not_waved_through(build, reason):
    report = mt.verify(build, NUMBERS, devices(2))
    assert report.equal is None
    assert report.exit_code == 2
    assert report.reason.startswith(reason) or reason in report.reason
    assert "could not be compared" in str(report)


# The bound


@pytest.fixture
def float64():
    for dtype in ("float64", "float32"):
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        if dtype == "float64":
            yield


@pytest.mark.usefixtures("float64")
def test_the_bound_is_that_of_the_precision():
    report = mt.verify(mlp, NUMBERS, devices(2))
    assert report.equal, report
    weights = [v for v in report.variables if v["kind"] == "weight"]
    assert all(0 < v["bound"] < 1e-13 for v in weights)


def test_a_difference_a_little_above_rounding_is_found(monkeypatch):
    monkeypatch.setattr(hooks, "sum_gradients", times(1 + 1e-4))
    assert mt.verify(mlp, NUMBERS, devices(2)).equal is False


# Copies


def test_the_model_is_left_as_it_is():
    model = adam()
    model.fit(*NUMBERS, verbose=0)
    before, attributes = {name: v.numpy() for name, v in state(model).items()}, {**vars(model)}
    report = mt.verify(model, NUMBERS, devices(2))
    assert report.equal
    assert report.notes == ["random layers ran as in inference: drop, noise"]
    assert vars(model) == attributes
    for name, variable in state(model).items():
        np.testing.assert_array_equal(variable.numpy(), before[name], name)


def test_a_copy_is_where_the_model_is():
    """Statistics that a Normalization layer has adapted to, weights, slots, what is frozen."""
    normalization = layers.Normalization()
    normalization.adapt(5 + features(20))
    frozen = layers.Dense(2, trainable=False)
    model = compiled([keras.Input((FEATURES,)), normalization, frozen, layers.Dense(1)], momentum())
    x, y = 5 + NUMBERS[0], NUMBERS[1]
    model.fit(x, y, epochs=2, verbose=0)
    copy = model_copy.copy_of(model)
    np.testing.assert_array_equal(copy.predict(x, verbose=0), model.predict(x, verbose=0))
    assert len(copy.trainable_variables) == 2
    for own, other in zip(model.optimizer.variables, copy.optimizer.variables, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())
    assert mt.verify(model, (x, y), devices(2)).equal


def closed_over():
    """Its configuration cannot be made from what get_config knows."""

    class Closed(keras.Model):
        def __init__(self, function):
            super().__init__()
            self.dense = layers.Dense(1)
            self.function = function

        def call(self, x):
            return self.function(self.dense(x))

    model = Closed(lambda x: 2 * x)
    model.compile("sgd", "mse")
    model(features(1))
    return model


def own_train_step():
    model = linear()
    model.train_step = model.train_step
    return model


@pytest.mark.parametrize(
    ("model", "batch", "options", "error", "told"),
    [
        (closed_over(), NUMBERS, {}, mt.errors.ModelError, "cannot be copied"),
        (own_train_step(), NUMBERS, {}, mt.errors.ModelError, "its train_step was replaced on the object"),
        (keras.Sequential([layers.Dense(1)]), NUMBERS, {}, mt.errors.ModelError, "is not compiled"),
        ("digits", NUMBERS, {}, mt.errors.ModelError, "expected a compiled keras.Model or a function that builds one"),
        (lambda: "digits", NUMBERS, {}, mt.errors.ModelError, "returned 'digits'; expected a compiled keras.Model"),
        (linear, NUMBERS, {"steps": 2}, mt.errors.ModelError, "expected at least 3"),
        (linear, (features(3), numbers(2)), {}, mt.errors.BatchError, r"tensors of \[2, 3\] rows"),
        (linear, (features(3)[:0],), {}, mt.errors.BatchError, r"tensors of \[0\] rows"),
        (linear, (features(4)[:, :2], numbers(4)), {}, mt.errors.ModelError, "one device cannot train this on batches"),
        (
            broken.with_layer(broken.needs_a_row),
            NUMBERS,
            {},
            mt.errors.TowerError,
            "one device can train this, towers fail in step 3, on a batch of 1 rows: InvalidArgumentError: ",
        ),
    ],
)
def test_errors(model, batch, options, error, told):
    with pytest.raises(error, match=told):
        mt.verify(model, batch, devices(2), **options)


# Steps written by hand


def by_hand(combine):
    """A function that makes a step, w ← w − 0.1 combine(gradient), and its variable."""

    def build_step():
        w = tf.Variable([[1.0]] * FEATURES)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w - y) ** 2)
            w.assign_sub(0.1 * combine(tape.gradient(loss, w)))
            return {"loss": loss, "rows": x @ w}

        return step, [w]

    return build_step


def with_keras():
    """A step with a model, batch normalisation, an optimizer and a metric."""
    keras.utils.set_random_seed(1)
    stack = [keras.Input((FEATURES,)), layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = keras.Sequential([*stack, layers.Dense(CLASSES)])
    optimizer, accuracy = keras.optimizers.Adam(0.01), keras.metrics.SparseCategoricalAccuracy()
    loss_of = cross_entropy()

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(y, logits)
        return loss

    return step, [model, optimizer, accuracy]


@pytest.mark.parametrize(
    ("build_step", "batch", "reason"),
    [
        (by_hand(lambda g: mt.all_reduce(g, "mean")), NUMBERS, None),
        (with_keras, (features(ROWS), classes(ROWS)), None),
        (by_hand(lambda g: mt.all_reduce(g, "sum")), NUMBERS, "a sum in place of a mean"),
        (by_hand(lambda g: g), NUMBERS, "the gradient is never reduced"),
    ],
    ids=["mean", "keras", "sum", "nothing"],
)
def test_a_step(build_step, batch, reason):
    report = mt.verify_step(build_step, batch, devices(3))
    assert report.equal is (reason is None), report
    assert reason is None or reason in report.reason


# The report


def test_the_report_as_text_and_json(monkeypatch):
    monkeypatch.setattr(hooks, "sum_gradients", times(np.nan))
    report = mt.verify(mlp, NUMBERS, devices(2))
    found = json.loads(report.as_json(), parse_constant=pytest.fail)
    assert found["equal"] is False
    assert found["largest_difference"] is None  # not a number on one side
    assert found["first_divergence"]["step"] == 1
    assert found["batches"] == [12, 11, 1, 12, 11]
    assert (found["devices"], found["steps"]) == (["CPU:0", "CPU:1"], 5)
    assert report.reason == "the gradient is not finite on tower 0, that of one device is"
    text = str(report)
    assert re.search("^2 towers = one device +NO$", text, re.MULTILINE)
    assert "step 1, a batch of 12 rows: " in text
    assert f"… {len(report.variables) - 12} more" in text or len(report.variables) <= 12
