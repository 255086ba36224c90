"""What verify() is made of: batches of rows, lists of variables, distances, bounds, random layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

import multitower as mt
from multitower.verification import comparison, forward, model_copy, report, rounding, row_batches
from multitower.verification.inventory import inventory, layers_of
from small_models import compiled, features

# Batches


@given(rows=st.integers(1, 200), towers=st.integers(1, 9), steps=st.integers(3, 9))
def test_sizes_are_even_uneven_and_small(rows, towers, steps):
    even, uneven, small, *more = row_batches.sizes(rows, towers, steps)
    assert even % towers == 0
    assert small == max(1, towers - 1)
    assert towers == 1 or uneven % towers
    assert uneven > towers or towers == 1
    assert max(even, uneven) <= max(rows, towers + 1)
    assert more == [even, uneven, small, even, uneven, small][: steps - 3]


def test_rows_go_round():
    chosen = row_batches.choose(5, [4, 3, 7])
    assert [c.tolist() for c in chosen] == [[0, 1, 2, 3], [4, 0, 1], [2, 3, 4, 0, 1, 2, 3]]


def test_rows_of_every_kind_of_tensor():
    ragged = tf.ragged.constant([[1], [2, 3], []])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0], [3, 4]])
    batch = row_batches.as_tensors(({"a": np.arange(3.0), "b": ragged}, sparse, None))
    assert row_batches.count_rows(batch) == 3
    [(named, taken, nothing)] = row_batches.dataset(batch, [np.array([2, 0, 1, 1])])
    assert named["a"].numpy().tolist() == [2, 0, 1, 1]
    assert named["a"].dtype == tf.float32
    assert named["b"].to_list() == [[], [1], [2, 3], [2, 3]]
    assert tf.sparse.to_dense(taken).numpy().tolist() == [[3, 4], [0, 1], [2, 0], [2, 0]]
    assert nothing is None


def test_one_trace_serves_all_sizes():
    spec = row_batches.dataset((tf.zeros([4, 2]),), [np.arange(2), np.arange(2)]).element_spec
    assert spec[0].shape.as_list() == [None, 2]


# Variables


class Holder(keras.Model):
    """Holds variables where Keras does not look, and layers in lists and dicts."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(1, name="first")
        self.more = [{"second": layers.BatchNormalization(name="second")}]
        self.counter = tf.Variable(0)
        self.free = tf.Variable(1.0)
        self.dropout = layers.Dropout(0.5)
        self.own_metric = keras.metrics.Mean(name="own_metric")

    def compile(self, extra, **options):
        super().compile(**options)
        self.extra = extra

    def call(self, x):
        return self.more[0]["second"](self.first(x))


def test_every_variable_is_listed_once():
    model = Holder()
    model.compile(keras.optimizers.Adam(), optimizer=keras.optimizers.SGD(momentum=0.9), loss="mse")
    model(features(1))
    model.optimizer.build(model.trainable_variables)
    entries = inventory(model)
    assert len({id(e.variable) for e in entries}) == len(entries)
    kinds = [e.kind for e in entries]
    assert [kinds.count(k) for k in ("weight", "state", "optimizer", "metric", "seed")] == [5, 3, 2 + 4 + 2, 4, 1]
    assert kinds == sorted(kinds, key=["weight", "state", "optimizer", "metric", "seed"].index)
    assert [e.layer for e in entries if e.kind == "weight"][1:] == ["first", "first", "second", "second"]
    assert [e.layer for e in entries if e.kind == "seed"] == [model.dropout.name]
    assert [e.kind for e in entries if e.epsilon == 0] == ["state", "optimizer", "optimizer", "seed"]
    assert {"first", "second", model.dropout.name} <= {layer.name for layer in layers_of(model)}


# Distances and bounds


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([np.inf, 1.0], [np.inf, 3.0], 2.0),
        ([np.nan], [1.0], np.inf),
        ([np.inf], [-np.inf], np.inf),
        ([], [], 0.0),
    ],
)
def test_distance(a, b, expected):
    assert rounding.distance(np.array(a), np.array(b)) == expected


def test_distance_of_whole_numbers_and_booleans():
    assert rounding.distance(np.array([2**53 - 1]), np.array([2**53 - 2])) == 1
    assert rounding.distance(np.array([True]), np.array([False])) == 1


def test_the_odd_one_out():
    same, other = np.zeros(3), np.array([0.0, 0.0, 1e-300])
    assert comparison.odd_one([same, same, same]) is None
    assert comparison.odd_one([same, same, other]) == 2
    assert comparison.odd_one([other, same, same]) == 0
    assert comparison.odd_one([np.array([0.0]), np.array([-0.0])]) == 1  # to the bit


def test_numbers_that_a_step_returns():
    from multitower.verification.twins import single_numbers

    results = {"loss": tf.constant(1.5), "rows": tf.zeros([3]), "parts": (2, None), "name": "x"}
    assert single_numbers(results) == {"loss": 1.5, "parts/0": 2.0}
    assert single_numbers(tf.constant(3)) == {"result": 3.0}


# Random layers


def test_random_layers_of_keras_are_silenced():
    inner = keras.Sequential([layers.GaussianNoise(1.0), layers.Dropout(0.0)])
    attention = layers.MultiHeadAttention(1, 2, dropout=0.5)
    x = keras.Input((3, 2))
    recurrent = layers.Bidirectional(layers.GRU(2, dropout=0.5, return_sequences=True))
    model = keras.Model(x, layers.SpatialDropout1D(0.5)(recurrent(attention(inner(x), x))))
    silenced = model_copy.silence(model)
    assert len(silenced) == 5  # noise, attention, two cells, spatial dropout; not the Dropout that drops nothing
    data = np.random.default_rng(0).normal(size=(2, 3, 2)).astype("float32")
    np.testing.assert_array_equal(model(data, training=True), model(data, training=False))


def test_augmentation_is_silenced():
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.RandomFlip(), layers.RandomTranslation(0.5, 0.5)])
    assert model_copy.silence(model) == [layer.name for layer in model.layers]
    image = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype("float32")
    np.testing.assert_array_equal(model(image, training=True), image)


def test_a_random_layer_of_the_users_is_left_alone():
    class Mine(layers.Dropout):
        def call(self, x, training=False):
            return super().call(x, training=True)

    assert model_copy.silence(keras.Sequential([keras.Input((2,)), Mine(0.5)])) == []


# Layers that mix rows


def test_the_first_layer_that_mixes_rows():
    mixing = layers.Lambda(lambda x: x - keras.ops.mean(x, 0))
    model = compiled([keras.Input((6,)), layers.Dense(3), mixing, layers.Dense(1)])
    shards = [np.arange(3), np.arange(3, 5)]
    number = forward.first_mixing_layer(model, (tf.constant(features(5)), None), shards, 1e-3)
    assert layers_of(model)[number] is mixing
    assert not hasattr(vars(mixing).get("call"), "__wrapped__")
    model = compiled([keras.Input((6,)), layers.Dense(3), layers.LayerNormalization()])
    assert forward.first_mixing_layer(model, (tf.constant(features(5)), None), shards, 1e-3) is None


# The report


@pytest.mark.parametrize(("equal", "code"), [(True, 0), (False, 1), (None, 2)])
def test_exit_codes(equal, code):
    made = report.Report(equal, 0.0, 1e-7, "w", None, None, [], [], {}, ["CPU:0"], 3, [4, 3, 1], 1.0)
    assert made.exit_code == code
    assert "1 tower = one device" in str(made)


def test_verify_is_a_function_of_the_package():
    import multitower.verification

    assert mt.verify is multitower.verification.verify
