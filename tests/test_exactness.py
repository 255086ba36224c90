"""N towers equal one device wherever Keras users go: gradients, optimizers, losses, metrics, random numbers.

What test_trainer_equality.py shows for every kind of model, this file shows for every kind of thing in one.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import multitower as mt
from multitower import hooks
from oracle import assert_copies_equal, check, devices, model_of, twins
from small_models import built, classification, compiled, cross_entropy, features, momentum, numbers, regression


def two_epochs(data, batch_size=5, **options):
    """Batches of 5 rows and a rest of 4: uneven shards on 2, 3 and 4 towers."""
    return lambda either: either.fit(**data, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **options)


# Optimizers. Slots are compared too; adaptive ones divide by roots of small numbers, where rounding grows.

OPTIMIZERS = {
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "ema at the end": lambda: momentum(use_ema=True, ema_momentum=0.9),
    "clipped and accumulated": lambda: momentum(clipvalue=0.1, gradient_accumulation_steps=2),
    "schedule": lambda: momentum_with(keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.01, 0.2])),
}


def momentum_with(rate):
    return keras.optimizers.SGD(rate, momentum=0.9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_their_slots(name):
    def build():
        return compiled([layers.Dense(8, "tanh"), layers.Dense(1)], OPTIMIZERS[name](), metrics=["mae"])

    # 1e-5: a rounding of 1e-7 in a gradient near zero is one of 1e-6 after the division by its own size
    check(build, two_epochs(regression(14)), 3, bound=1e-5)


def test_a_schedule_ticks_once_a_step():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    _, trainer = check(lambda: compiled([layers.Dense(1)], momentum_with(rate)), two_epochs(regression(14)), 4)
    assert int(trainer.model.optimizer.iterations) == 6


class Overflows(layers.Layer):
    """Multiplies rows whose first feature is above 100 beyond float16."""

    def call(self, x):
        return x * tf.where(x[:, :1] > 100, tf.cast(1e30, x.dtype), tf.cast(1, x.dtype))


def test_an_overflow_on_one_tower_skips_the_step_on_all_and_halves_the_scale_once():
    data = regression(12)
    data["x"][7, 0] = 200.0  # second batch, second tower

    def build():
        optimizer = keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=1024.0, dynamic_growth_steps=100)
        return compiled([Overflows(), layers.Dense(1)], optimizer)

    def train(either):
        return [either.train_on_batch(data["x"][i : i + 4], data["y"][i : i + 4]) for i in (0, 8)]

    _, trainer = check(build, train, 2)
    before = [v.numpy() for v in trainer.model.trainable_variables]
    trainer.train_on_batch(data["x"][4:8], data["y"][4:8])
    assert float(trainer.model.optimizer.dynamic_scale) == 512
    for variable, value in zip(trainer.model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert_copies_equal(trainer)


@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_scale_that_changes_from_the_first_step_on(n):
    """Keras scales by a constant until the optimizer is built, so the first trace is not that of later steps."""

    def build():
        return compiled([layers.Dense(1)], keras.optimizers.LossScaleOptimizer(momentum(), dynamic_growth_steps=1))

    check(build, two_epochs(regression(14)), n)


@pytest.mark.parametrize(("policy", "bound"), [("mixed_bfloat16", 2e-2), ("mixed_float16", 3e-3), ("float64", 1e-6)])
def test_precisions(policy, bound):
    """Half-precision products of other shards are rounded elsewhere: a few units of their last place (2⁻⁸, 2⁻¹¹).

    With float64 layers Keras still computes the loss and the optimizer's numbers in float32.
    """

    def build():
        dtype = keras.DTypePolicy(policy)
        return compiled([layers.Dense(8, "tanh", dtype=dtype), layers.Dense(1, dtype=dtype)])

    check(build, two_epochs(regression(14)), 3, bound=bound)


# Gradients that are not one dense tensor for each variable.


def words(rows, same=False):
    """Rows of ids, with repetitions; `same`: id 7 stands in the last row only, so on one tower only."""
    ids = np.random.default_rng(rows).integers(1, 6, (rows, 4))
    if same:
        ids[-1] = 7
    return ids


@pytest.mark.parametrize(
    "optimizer", [momentum, lambda: momentum(global_clipnorm=0.1), lambda: keras.optimizers.Adam(0.01)]
)
def test_embeddings_have_sparse_gradients(optimizer):
    def build():
        return compiled([layers.Embedding(9, 3), layers.Flatten(), layers.Dense(1)], optimizer())

    check(build, two_epochs({"x": words(14, same=True), "y": numbers(14)}), 3, bound=1e-5)


class Tied(keras.Model):
    """One matrix for words coming in and going out: its gradient is sparse and dense."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(9, 4)

    def call(self, ids):
        hidden = tf.reduce_mean(self.embedding(ids), 1)
        return hidden @ tf.transpose(tf.convert_to_tensor(self.embedding.embeddings))


def test_tied_embeddings():
    def build():
        model = Tied()
        model.compile(momentum(), cross_entropy())
        return model

    check(build, two_epochs({"x": words(14), "y": words(14)[:, 0]}), 3)


class Branches(layers.Layer):
    """Takes another way, with another variable, where its rows are large: on one tower only."""

    def build(self, shape):
        self.small, self.large = (self.add_weight(shape=(shape[-1],), initializer="ones", name=n) for n in "sl")

    def call(self, x):
        def large():
            return x * self.large

        return tf.where(x > 0.5, x * self.large, x * self.small)


def test_unused_variables_and_frozen_layers():
    def build():
        inputs = keras.Input((6,))
        unused, frozen = layers.Dense(3), layers.Dense(4, trainable=False)
        hidden = Branches()(frozen(inputs))
        model = keras.Model(inputs, [layers.Dense(1)(hidden), unused(hidden)])
        model.compile(momentum(), ["mse", None])
        return model

    def train(either):
        with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
            return two_epochs(regression(14))(either)

    check(build, train, 4)


class Cond(keras.Model):
    """A branch of the graph that only a tower with a large row takes."""

    def __init__(self):
        super().__init__()
        self.usual, self.rare = layers.Dense(1), layers.Dense(1)

    def build(self, shape):
        self.usual.build(shape)
        self.rare.build(shape)

    def call(self, x):
        large = x[:, :1] > 2.0
        extra = tf.cond(tf.reduce_any(large), lambda: self.rare(x), lambda: tf.zeros_like(x[:, :1]))
        return self.usual(x) + tf.where(large, extra, 0.0)


def test_a_branch_that_one_tower_takes():
    data = regression(12)
    data["x"] = np.clip(data["x"], -1.9, 1.9)
    data["x"][1, 0] = data["x"][10, 0] = 3.0

    def build():
        model = Cond()
        model.compile(momentum(), "mse")
        return model

    check(build, two_epochs(data, 4), 2)


# Losses.


def divides_by_the_batch(y, prediction):
    return tf.reduce_sum(tf.square(y - prediction)) / tf.cast(tf.shape(y)[0], tf.float32)


@pytest.mark.parametrize("weights", ["zero on one tower", "different"])
def test_sample_weights_of_rows(weights):
    sample_weight = np.arange(14.0, dtype="float32") / 7
    if weights == "zero on one tower":
        sample_weight[2:5] = 0
    options = {"sample_weight": sample_weight}
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight", "sum"):

        def build(reduction=reduction):
            loss = keras.losses.MeanSquaredError(reduction=reduction)
            return compiled([layers.Dense(1)], momentum_with(0.01), loss, weighted_metrics=["mae"])

        check(build, two_epochs(regression(14), **options), 2)


def test_sample_weights_of_time_steps():
    data = {"x": features(12)[:, :, None], "y": features(12, 4)[:, :, None]}
    weights = np.random.default_rng(0).uniform(size=(12, 6)).astype("float32")
    weights[3:6] = 0
    check(
        lambda: compiled([layers.GRU(3, return_sequences=True), layers.Dense(1)]),
        two_epochs(data, 6, sample_weight=weights),
        4,
    )


@pytest.mark.parametrize("batch_size", [2, 7])
def test_a_loss_that_divides_by_the_batch_itself(batch_size):
    check(lambda: compiled([layers.Dense(1)], loss=divides_by_the_batch), two_epochs(regression(14), batch_size), 3)


def test_a_loss_without_reduction():
    """reduction=None: the loss is a vector of rows, and its gradient that of their sum."""
    loss = keras.losses.MeanSquaredError(reduction=None)
    check(lambda: compiled([layers.Dense(1)], momentum_with(0.01), loss), two_epochs(regression(14)), 3)


class RaggedOutput(keras.Model):
    """Rows of different lengths."""

    def call(self, x):
        return tf.RaggedTensor.from_tensor(x, lengths=tf.cast(x[:, 0], tf.int32))


def test_predict_of_rows_of_different_lengths():
    x = np.random.default_rng(0).integers(0, 6, (13, 6)).astype("float32")

    def predict(either):
        return either.predict(x, batch_size=5, verbose=0).to_list()

    plain, model = twins(RaggedOutput)
    assert predict(mt.Trainer(compile_anyhow(model), devices(3))) == predict(plain)


def compile_anyhow(model):
    model.compile("sgd", "mse")
    return model


def test_rows_of_one_step_beside_rows_of_nine():
    ids = np.random.default_rng(0).integers(1, 9, (12, 9))
    ids[::2, 1:] = 0  # one valid step, nine, one, nine, …
    stack = [layers.Embedding(9, 4, mask_zero=True), layers.LSTM(4, return_sequences=True), layers.Dense(1)]
    data = {"x": ids, "y": np.random.default_rng(1).normal(size=(12, 9, 1)).astype("float32")}
    check(lambda: compiled([layers.deserialize(layers.serialize(s)) for s in stack]), two_epochs(data, 5), 3)


class Gan(keras.Model):
    """Two networks, two optimizers, a train_step of its own, losses that are means over rows."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(3)])
        self.critic = keras.Sequential([keras.Input((3,)), layers.Dense(5, "tanh"), layers.Dense(1)])
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        self.critic_loss, self.generator_loss = keras.metrics.Mean(name="c"), keras.metrics.Mean(name="g")

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer

    @property
    def metrics(self):
        return [self.critic_loss, self.generator_loss]

    def call(self, noise):
        return self.critic(self.generator(noise))

    def train_step(self, data):
        noise, real = data
        with tf.GradientTape() as tape:
            said = self.critic(tf.concat([self.generator(noise), real], 0))
            truth = tf.concat([tf.zeros_like(noise[:, :1]), tf.ones_like(real[:, :1])], 0)
            loss = self.cross_entropy(truth, said)
        gradients = tape.gradient(loss, self.critic.trainable_weights)
        self.critic_optimizer.apply_gradients(zip(gradients, self.critic.trainable_weights, strict=True))
        self.critic_loss.update_state(loss)
        with tf.GradientTape() as tape:
            said = self.critic(self.generator(noise))
            loss = self.cross_entropy(tf.ones_like(said), said)
        gradients = tape.gradient(loss, self.generator.trainable_weights)
        self.generator_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.generator_loss.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


def test_two_optimizers():
    """Both optimizers' slots are looked at here: `optimizer` of the model is None."""
    slots = []

    def build():
        model = Gan()
        model.compile(momentum(clipnorm=0.5), keras.optimizers.Adam(0.01))
        return model

    def train(either):
        history = two_epochs({"x": features(14), "y": features(14, 3)[:, :3]})(either)
        model = model_of(either)
        slots.append([v.numpy() for o in (model.critic_optimizer, model.generator_optimizer) for v in o.variables])
        return history

    _, trainer = check(build, train, 3, bound=1e-5)
    for a, b in zip(*slots, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    optimizers = (trainer.model.critic_optimizer, trainer.model.generator_optimizer)
    assert all(np.array_equal(c, v) for o in optimizers for v in o.variables for c in trainer.copies(v))


# Metrics: exact on the rows of all towers, whatever they do with them.


class Extremes(keras.Metric):
    """The largest error ever and the number of updates: no sums over rows."""

    def __init__(self):
        super().__init__(name="extremes")
        self.largest = self.add_variable((), initializer="zeros", name="largest")
        self.updates = self.add_variable((), initializer="zeros", name="updates")

    def update_state(self, y, prediction, sample_weight=None):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(tf.abs(tf.cast(y, tf.float32) - prediction))))
        self.updates.assign_add(1.0)

    def result(self):
        return self.largest + self.updates


BINARY = [
    lambda: keras.metrics.AUC(name="auc"),
    lambda: keras.metrics.F1Score(threshold=0.5, name="f1"),
    lambda: keras.metrics.Precision(name="precision"),
    lambda: keras.metrics.Recall(name="recall"),
    lambda: keras.metrics.RecallAtPrecision(0.5, name="recall_at"),
    lambda: keras.metrics.BinaryIoU([0, 1], name="iou"),
    lambda: keras.metrics.R2Score(name="r2"),
    lambda: keras.metrics.RootMeanSquaredError(name="rmse"),
    lambda: keras.metrics.PearsonCorrelation(axis=0, name="correlation"),
    Extremes,
]


def judged():
    metrics = [make() for make in BINARY]
    weighted = [keras.metrics.AUC(name="weighted_auc"), keras.metrics.MeanAbsoluteError(name="weighted_mae")]
    return compiled(
        [layers.Dense(1, "sigmoid")], loss="binary_crossentropy", metrics=metrics, weighted_metrics=weighted
    )


@pytest.mark.parametrize("batch_size", [3, 7])  # a rest of two rows on three towers
def test_metrics(batch_size):
    x, y = features(17), (numbers(17) > 0).astype("float32")
    weights = np.linspace(0, 2, 17, dtype="float32")

    def train(either):
        history = either.fit(x, y, sample_weight=weights, batch_size=batch_size, shuffle=False, verbose=0)
        return history, either.evaluate(x, y, batch_size=batch_size, verbose=0, return_dict=True)

    check(judged, train, 3)


def test_ten_rows_on_three_towers_count_ten():
    model = compiled(
        [layers.Dense(3)], loss=cross_entropy(), metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    )
    trainer = mt.Trainer(model, devices(3))
    trainer.evaluate(**classification(10), batch_size=10, verbose=0)
    counts = [float(v) for v in model.metrics_variables if v.path.endswith("count")]
    assert counts == [10, 10, 10]


# Random numbers.


def noisy():
    return compiled([layers.Dense(16, "tanh"), layers.Dropout(0.5), layers.GaussianNoise(0.1), layers.Dense(1)])


def test_the_same_seed_and_towers_give_the_same_bits():
    results = []
    for model in twins(noisy):
        mt.Trainer(model, devices(3)).fit(**regression(14), batch_size=5, epochs=2, verbose=0)
        results.append([v.numpy() for v in [*model.variables, *model.optimizer.variables]])
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))


def test_random_numbers_go_on_where_they_stopped():
    """All variables, seed states among them, are put into another model: it goes on as one run would have."""
    whole, first, second = [built_noisy(seed) for seed in (1, 1, 2)]
    batches = [(features(5, seed), numbers(5, seed)) for seed in range(6)]

    def train(model, part):
        trainer, losses = mt.Trainer(model, devices(3)), []
        for batch in part:
            model.reset_metrics()  # Keras 3.14 goes on with the mean of the losses
            losses.append(trainer.train_on_batch(*batch))
        return losses

    expected = train(whole, batches)
    begun = train(first, batches[:3])
    for old, new in zip(everything(first), everything(second), strict=True):
        new.assign(old)
    assert [*begun, *train(second, batches[3:])] == expected


def built_noisy(seed):
    keras.utils.set_random_seed(seed)
    return built(noisy(), features(1))


def everything(model):
    return [*model.variables, *model.optimizer.variables]


def test_towers_draw_different_masks():
    seen = []

    class Look(layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(lambda v: (seen.append(v), v)[1], [x], tf.float32), x.shape)

    model = compiled([layers.Dropout(0.5, seed=3), Look(), layers.Dense(1)])
    mt.Trainer(model, devices(2)).train_on_batch(np.ones((64, 6), "float32"), numbers(64))
    first, second = seen[-2:]
    assert first.shape == second.shape
    assert not np.array_equal(first == 0, second == 0)


# The control for this file.


def test_control_metrics_of_one_tower_are_seen(monkeypatch):
    monkeypatch.setattr(
        hooks, "_HOOKS", tuple(h for h in hooks._HOOKS if h[1] not in ("update_state", "compute_metrics"))
    )
    x, y = features(17), (numbers(17) > 0).astype("float32")
    with pytest.raises(AssertionError):
        check(judged, lambda e: e.evaluate(x, y, batch_size=7, verbose=0, return_dict=True), 3)
