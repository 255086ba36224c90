"""micro_batches and loss_over="shard": other ways through the same step, the same result."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import multitower as mt
from multitower.errors import ModelError

CLOSE = {"rtol": 2e-6, "atol": 1e-6}  # a mean of means adds float32 numbers in another order


def cpus(n):
    return [f"CPU:{i}" for i in range(n)]


def dense():
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, "tanh", kernel_regularizer="l2")(inputs)
    return keras.Model(inputs, layers.Dense(3, "softmax")(hidden)), numbers((10, 6)), labels(10)


def masked():
    """Rows of 1 to 9 valid steps: the loss of one device weighs steps, not rows."""
    inputs = keras.Input((9,), dtype="int32")
    hidden = layers.Embedding(12, 4, mask_zero=True)(inputs)
    hidden = layers.GRU(5, return_sequences=True)(hidden)
    x = np.random.default_rng(2).integers(1, 12, (10, 9))
    x[np.arange(9) >= np.arange(1, 11)[:, None]] = 0
    return keras.Model(inputs, layers.Dense(3, "softmax")(hidden)), x, labels((10, 9))


def two_ways():
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    joined = layers.Concatenate()([layers.Dense(5, "relu")(a), layers.Dense(5)(b)])
    outputs = {"p": layers.Dense(3, "softmax", name="p")(joined), "q": layers.Dense(3, "softmax", name="q")(joined)}
    return (
        keras.Model({"a": a, "b": b}, outputs),
        {"a": numbers((10, 6)), "b": numbers((10, 4))},
        {"p": labels(10), "q": labels(10)},
    )


def numbers(shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def labels(shape):
    return np.random.default_rng(1).integers(0, 3, shape)


def trained(make, n, weights=None, **options):
    """Weights, slots and History after three batches twice; N = 0 is plain Keras."""
    keras.utils.set_random_seed(3)
    model, x, y = make()
    loss = keras.losses.SparseCategoricalCrossentropy()
    losses = dict.fromkeys(y, loss) if isinstance(y, dict) else loss
    metrics = None if isinstance(y, dict) else ["accuracy"]
    model.compile(keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=0.5), losses, metrics=metrics)
    fit = mt.Trainer(model, cpus(n), **options).fit if n else model.fit
    history = fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, sample_weight=weights).history
    return [*model.get_weights(), *[v.numpy() for v in model.optimizer.variables]], history


def assert_equal(got, expected):
    for a, b in zip(got[0], expected[0], strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)
    for name in expected[1]:
        np.testing.assert_allclose(got[1][name], expected[1][name], **CLOSE)


@pytest.mark.parametrize("make", [dense, masked, two_ways])
@pytest.mark.parametrize(("n", "k"), [(1, 3), (2, 2), (3, 4)])
def test_micro_batches_are_one_pass(make, n, k):
    assert_equal(trained(make, n, micro_batches=k), trained(make, 0))


def test_micro_batches_with_weights_of_rows():
    weights = np.array([0, 0, 1, 2, 3, 0, 0.5, 1, 1, 4], "float32")
    assert_equal(trained(dense, 2, weights, micro_batches=2), trained(dense, 0, weights))


def noisy():
    inputs = keras.Input((6,))
    hidden = layers.Dropout(0.5, seed=5)(layers.Dense(32, "tanh")(inputs))
    return keras.Model(inputs, layers.Dense(3, "softmax")(hidden)), numbers((10, 6)), labels(10)


def test_random_layers_draw_the_same_in_both_passes():
    """The gradient is that of the loss: a step along it lowers the loss as much as it says, masks being the same."""
    model, x, y = noisy()
    model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    state = next(v for v in model.variables if "seed" in v.path)
    before = [v.numpy() for v in model.trainable_variables]
    trainer = mt.Trainer(model, cpus(1), micro_batches=2)
    first = trainer.train_on_batch(x, y)
    moved = [v.numpy() - b for v, b in zip(model.trainable_variables, before, strict=True)]
    assert state.numpy()[1] == 2  # two parts drew once each; the second passes drew nothing
    state.assign([5, 0])
    model.reset_metrics()  # Keras 3.14 goes on with the mean of the losses
    second = trainer.train_on_batch(x, y)
    predicted = -sum((m**2).sum() for m in moved) / 1e-3
    assert second - first == pytest.approx(predicted, rel=0.02)


def normed():
    inputs = keras.Input((6,))
    hidden = layers.BatchNormalization()(inputs)
    return keras.Model(inputs, layers.Dense(3, "softmax")(hidden)), numbers((10, 6)), labels(10)


def active():
    inputs = keras.Input((6,))
    hidden = layers.Dense(4, activity_regularizer="l2")(inputs)
    return keras.Model(inputs, layers.Dense(3, "softmax")(hidden)), numbers((10, 6)), labels(10)


@pytest.mark.parametrize(("make", "message"), [(normed, "changes state"), (active, "losses of activities")])
def test_what_parts_would_change_is_refused(make, message):
    with pytest.raises(ModelError, match=f"micro_batches: .*{message}.*use micro_batches=1"):
        trained(make, 2, micro_batches=2)


@pytest.mark.parametrize("make", [dense, two_ways])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_loss_over_shards_is_that_of_the_batch_where_it_is_a_mean_over_rows(make, n):
    assert_equal(trained(make, n, loss_over="shard"), trained(make, 0))


def test_metrics_over_shards_are_exact_where_their_states_are_sums():
    def evaluated(n, **options):
        keras.utils.set_random_seed(3)
        model, x, y = dense()
        metrics = [
            keras.metrics.SparseCategoricalAccuracy(),
            keras.metrics.SparseTopKCategoricalAccuracy(2),
            keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou"),
        ]
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=metrics)
        source = mt.Trainer(model, cpus(n), **options) if n else model
        return source.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)

    expected = evaluated(0)
    got = evaluated(3, loss_over="shard")
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-6)


def test_a_loss_over_shards_of_masked_steps_is_another_one():
    """The limit that the documents name, and the control: steps are not rows."""
    got, expected = trained(masked, 2, loss_over="shard"), trained(masked, 0)
    assert max(np.abs(a - b).max() for a, b in zip(got[0], expected[0], strict=True)) > 1e-4


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_a_loss_over_shards_has_to_be_a_mean_over_rows(reduction):
    model, _, _ = dense()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(reduction=reduction))
    with pytest.raises(ModelError, match=f"needs losses that are means over rows; .*reduction='{reduction}'"):
        mt.Trainer(model, cpus(2), loss_over="shard")


@pytest.mark.parametrize("options", [{"micro_batches": 0}, {"micro_batches": True}, {"loss_over": "tower"}])
def test_options_that_do_not_exist(options):
    model, _, _ = dense()
    model.compile("sgd", "mse")
    name = next(iter(options))
    with pytest.raises(ModelError, match=f"{name}=.*expected"):
        mt.Trainer(model, cpus(2), **options)


def test_every_part_runs_twice():
    _, x, y = dense()
    seen = []

    class Watched(layers.Layer):
        def call(self, value):
            return tf.numpy_function(lambda v: (seen.append(len(v)), v)[1], [value], tf.float32)

        def compute_output_shape(self, shape):
            return shape

    inputs = keras.Input((6,))
    shaped = layers.Lambda(lambda v: tf.ensure_shape(v, [None, 6]))(Watched()(inputs))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(shaped))
    model.compile("sgd", "sparse_categorical_crossentropy")
    mt.Trainer(model, cpus(1), micro_batches=3).train_on_batch(x, y)
    assert seen[:3] == [4, 3, 3]
    assert sorted(seen[3:]) == [3, 3, 4]  # each part once more, not parts of parts
