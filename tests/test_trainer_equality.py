"""Trainer on N towers against plain Keras on one device: weights, optimizer slots, metrics, History, copies."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import multitower
from multitower import hooks
from multitower.tower import Tower
from oracle import BOUND, assert_copies_equal, check, check_again
from small_models import (
    Subclassed,
    classification,
    compiled,
    cross_entropy,
    features,
    functional,
    linear,
    momentum,
    named,
    numbers,
    own_loss,
    own_step,
    regression,
    sequential,
    subclassed,
    unbuilt_sequential,
    unbuilt_subclassed,
)

# Batch normalisation divides by the spread of the batch; in a batch of two or three rows that is small, and rounding
# grows by as much as the numbers do.
LOOSER = 1e-5

MODELS = {
    "sequential": (sequential, classification, LOOSER),
    "functional": (functional, named, BOUND),
    "subclassed": (subclassed, regression, BOUND),
    "own_step": (own_step, regression, BOUND),
    "own_loss": (own_loss, regression, BOUND),
    "unbuilt_sequential": (unbuilt_sequential, classification, BOUND),
    "unbuilt_subclassed": (unbuilt_subclassed, regression, BOUND),
}
BUILT = [name for name in MODELS if not name.startswith("unbuilt")]

COUNTS = (1, 2, 3, 4, 8)
# The N that the default run takes for each model: every N is met, odd and even ones by every kind of step.
OFTEN = {
    "sequential": (2, 3),
    "functional": (1, 4),
    "subclassed": (2, 8),
    "own_step": (3,),
    "own_loss": (4,),
    "unbuilt_sequential": (3,),
    "unbuilt_subclassed": (),
}


def batch_sizes(count):
    return [rows for rows in (count - 1, count, count + 1, 5 * count + 1) if rows]


def grid(names):
    """Cells (name, N, B); those that the default run leaves out are marked slow."""
    return [
        pytest.param(name, count, batch_size, marks=[] if count in OFTEN[name] else pytest.mark.slow)
        for name in names
        for count in COUNTS
        for batch_size in batch_sizes(count)
    ]


def two_epochs(data, batch_size):
    """Three full batches and a short last one, which is the hard one, twice."""

    def train(either):
        rows = 3 * batch_size + max(1, batch_size // 2)
        return either.fit(**data(rows), batch_size=batch_size, epochs=2, shuffle=False, verbose=0)

    return train


@pytest.mark.parametrize(("name", "count", "batch_size"), grid(BUILT))
def test_fit_equals_one_device(name, count, batch_size):
    build, data, bound = MODELS[name]
    _, trainer = check_again(build, two_epochs(data, batch_size), count, bound)
    assert trainer.traces == {"train_step": 1, "test_step": 0, "predict_step": 0}


@pytest.mark.parametrize(("name", "count", "batch_size"), grid([name for name in MODELS if name not in BUILT]))
def test_the_first_step_builds_the_model(name, count, batch_size):
    build, data, bound = MODELS[name]
    _, trainer = check(build, two_epochs(data, batch_size), count, bound)
    assert trainer.traces["train_step"] == 1


@pytest.fixture
def float64():
    _set_precision("float64")
    yield
    _set_precision("float32")


def _set_precision(dtype):
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["sequential", *(pytest.param(n, marks=pytest.mark.slow) for n in BUILT[1:])])
def test_differences_are_rounding(name):
    """What is left in float32 shrinks with the precision: a difference of any other kind would stay."""
    build, data, _ = MODELS[name]

    def doubles(rows):
        return tf.nest.map_structure(lambda a: a.astype("float64") if a.dtype.kind == "f" else a, data(rows))

    check(build, two_epochs(doubles, 5), 3, bound=1e-13)


@pytest.mark.parametrize("count", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_every_batch_may_have_another_size(count):
    batches = [tuple(classification(rows).values()) for rows in (count, 1, 7, 2 * count, count + 1, 16)]
    specs = (tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int64))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=specs).repeat()
    fit = {"steps_per_epoch": len(batches), "epochs": 2, "shuffle": False, "verbose": 0}
    _, trainer = check_again(sequential, lambda m: m.fit(data, **fit), count, LOOSER)
    assert trainer.traces["train_step"] == 1


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch_size", [1, 3, 11])
def test_evaluate_and_predict_equal_one_device(count, batch_size):
    data = named(2 * batch_size + 1)

    def look(either):
        trained = either.train_on_batch(**data)
        values = either.evaluate(**data, batch_size=batch_size, verbose=0)
        return trained, values, either.predict(data["x"], batch_size=batch_size, verbose=0)

    _, trainer = check_again(functional, look, count)
    assert trainer.traces == {"train_step": 1, "test_step": 1, "predict_step": 1}


# Rows, weights and masks that lie unevenly over the towers.


def test_sample_weights():
    """Half of the rows count nothing, those of some towers all of them."""
    weights = np.repeat([0.0, 2.0, 0.0, 0.5], 5).astype("float32")
    options = {"x": features(20), "y": numbers(20), "sample_weight": weights, "batch_size": 8}
    check(
        lambda: linear(weighted_metrics=["mae"], metrics=["mse"]),
        lambda m: m.fit(**options, epochs=2, shuffle=False, verbose=0),
        4,
    )


def test_class_weights():
    options = {**classification(23), "class_weight": {0: 0.1, 1: 1.0, 2: 7.0}}
    check(sequential, lambda m: m.fit(**options, batch_size=10, epochs=2, shuffle=False, verbose=0), 3, LOOSER)


def sentences(rows, length=5):
    """Words of 1 … length, then zeros: rows of very different lengths."""
    random = np.random.default_rng(rows)
    words = random.integers(1, 9, (rows, length))
    return np.where(np.arange(length) < random.integers(1, length + 1, (rows, 1)), words, 0)


def word_by_word():
    return layers.Dense(4, "tanh")


def lstm():
    return layers.LSTM(4, return_sequences=True)


def gru():
    return layers.GRU(4, return_sequences=True)


@pytest.mark.parametrize(
    "layer", [word_by_word, *(pytest.param(layer, marks=pytest.mark.slow) for layer in (lstm, gru))]
)
def test_masks_reach_layers_losses_and_metrics(layer):
    """A loss for every word: padding counts in neither the loss nor the accuracy."""

    def build():
        members = [layers.Embedding(9, 4, mask_zero=True), layer(), layers.Dense(9)]
        return compiled(members, loss=cross_entropy(), metrics=["accuracy"])

    x = sentences(17)
    check(build, lambda m: m.fit(x, x[:, ::-1], batch_size=7, epochs=2, shuffle=False, verbose=0), 3)


@pytest.mark.slow
def test_masks_of_sequences_that_end_in_one_output():
    check(
        lambda: compiled([layers.Embedding(9, 4, mask_zero=True), layers.GRU(4), layers.Dense(1)]),
        lambda m: m.fit(sentences(13), numbers(13), batch_size=6, shuffle=False, verbose=0),
        4,
    )


# What the optimizer does with gradients: it has to see those of the global batch.

OPTIMIZERS = {
    "clipnorm": lambda: momentum(clipnorm=0.1),
    "global_clipnorm": lambda: momentum(global_clipnorm=0.1),
    "accumulation": lambda: momentum(gradient_accumulation_steps=3),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=2.0**10),
}
MORE_OPTIMIZERS = {
    "clipvalue": lambda: momentum(clipvalue=0.05),
    "weight_decay": lambda: momentum(weight_decay=0.1),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "moving_average": lambda: momentum(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "lamb": lambda: keras.optimizers.Lamb(0.1),
}


@pytest.mark.parametrize(
    "optimizer",
    [
        *(pytest.param(make, id=name) for name, make in OPTIMIZERS.items()),
        *(pytest.param(make, id=name, marks=pytest.mark.slow) for name, make in MORE_OPTIMIZERS.items()),
    ],
)
def test_optimizers(optimizer):
    data = regression(19)
    check(lambda: linear(optimizer()), lambda m: m.fit(**data, batch_size=5, epochs=2, shuffle=False, verbose=0), 3)


# Losses that are no means over rows, and metrics that are no means of their values on parts of the batch.


def contrastive(y, prediction):
    """Every row against every other one, those of other towers too."""
    distances = tf.reduce_sum(tf.square(prediction[:, None] - prediction[None]), -1)
    return tf.reduce_logsumexp(-distances * tf.cast(y == tf.transpose(y), tf.float32), axis=1)


LOSSES = {
    "sum": keras.losses.MeanSquaredError(reduction="sum"),
    "mean_with_sample_weight": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "contrastive": contrastive,
    "scalar": lambda y, prediction: tf.math.reduce_std(prediction - y),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    data = {"x": features(19), "y": numbers(19).round()}
    check(
        lambda: compiled([layers.Dense(1)], keras.optimizers.SGD(0.01, momentum=0.9), LOSSES[name]),
        lambda m: m.fit(**data, batch_size=5, epochs=2, shuffle=False, verbose=0),
        4,
    )


def judged():
    metrics = [
        "accuracy",
        keras.metrics.AUC(name="auc"),
        keras.metrics.MeanAbsoluteError(name="mae"),
        keras.metrics.F1Score(threshold=0.5, name="f1"),
    ]
    return compiled([layers.Dense(1, "sigmoid")], loss="binary_crossentropy", metrics=metrics)


def test_metrics():
    x, y = features(23), (numbers(23) > 0).astype("float32")

    def train(either):
        history = either.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0, validation_data=(x[::-1], y))
        return history, either.evaluate(x, y, batch_size=4, verbose=0)

    check(judged, train, 4)


class AddsLoss(layers.Layer):
    """A layer with a loss of its own, a mean over the rows it sees."""

    def call(self, x):
        self.add_loss(0.3 * tf.reduce_mean(tf.square(x)))
        return x


def test_losses_of_layers():
    check(
        lambda: compiled([layers.Dense(4, kernel_regularizer="l1"), AddsLoss(), layers.Dense(1)]),
        two_epochs(regression, 5),
        3,
    )


def test_activity_regularisers():
    check(lambda: compiled([layers.Dense(4), layers.Dense(1, activity_regularizer="l1")]), two_epochs(regression, 5), 3)


class LossAsOutput(keras.Model):
    """The output is no rows but a number, a mean over the rows of the batch."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return tf.reduce_mean(tf.square(self.dense(x) - x[:, :1]))


def test_outputs_that_are_means_over_rows():
    def build():
        model = LossAsOutput()
        model.compile(momentum(), lambda y, output: output)
        return model

    check(build, two_epochs(regression, 5), 3)


class OwnComputeLoss(keras.Model):
    """compute_loss in the user's own words, with x and the regularisers in it."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, kernel_regularizer="l2")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y - y_pred) * (1 + tf.abs(x[:, :1]))) + tf.add_n(self.losses)


class OwnSteps(Subclassed):
    """test_step and predict_step of the user."""

    def test_step(self, data):
        x, y = data
        self.compute_loss(x, y, self(x, training=False))
        return self.compute_metrics(x, y, self(x, training=False))

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"prediction": self(x, training=False), "twice": 2 * x}


@pytest.mark.parametrize("kind", [OwnComputeLoss, OwnSteps])
def test_methods_that_users_replace(kind):
    def build():
        model = kind()
        model.compile(momentum(), "mse", metrics=["mae"])
        return model

    def train(either):
        history = either.fit(**regression(13), batch_size=5, shuffle=False, verbose=0)
        values = either.evaluate(**regression(13), batch_size=5, verbose=0, return_dict=True)
        return history, values, either.predict(features(13), batch_size=5, verbose=0)

    check(build, train, 3)


# The comparison itself: it has to see what goes wrong with gradients.

right_sum = hooks.sum_gradients


def not_summed(gradients):
    return list(gradients)


def averaged(gradients):
    return [g / multitower.tower_count() for g in right_sum(gradients)]


def without_the_last_tower(gradients):
    kept = tf.cast(multitower.tower_index() < multitower.tower_count() - 1, tf.float32)
    return right_sum([g * kept for g in gradients])


@pytest.mark.parametrize("build", [linear, own_step])
@pytest.mark.parametrize("wrong", [not_summed, averaged, without_the_last_tower])
def test_control_wrong_gradients_are_seen(monkeypatch, build, wrong):
    monkeypatch.setattr(hooks, "sum_gradients", wrong)
    with pytest.raises(AssertionError, match="apart"):
        check(build, lambda m: m.train_on_batch(**regression(5)), 2)


def test_control_equal_weights_for_unequal_shards_are_seen(monkeypatch):
    """Averaging over towers in place of rows is right for even shards and wrong for the others."""
    monkeypatch.setattr(Tower, "weigh", lambda tower, x: x / tower.count)
    check(linear, lambda m: m.train_on_batch(**regression(4)), 2)
    with pytest.raises(AssertionError, match="apart"):
        check(linear, lambda m: m.train_on_batch(**regression(5)), 2)


def test_control_a_copy_that_differs_is_seen():
    _, trainer = check(linear, lambda m: m.train_on_batch(**regression(5)), 3, placement="replicated")
    copy = trainer.copies(trainer.model.trainable_variables[0])[2]
    copy.assign(np.nextafter(copy.numpy(), np.float32(2)))
    with pytest.raises(AssertionError, match="differs between towers 0 and 2"):
        assert_copies_equal(trainer)
