"""The classic recipe as an oracle: hand-written towers of TensorFlow 1 and a Trainer end with the same weights.

Even shards only: a mean of means is the mean of the batch only there. What the classic recipe gets wrong with uneven
ones is multitower's other tests.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import classic_towers
import multitower
from oracle import BOUND, assert_close, assert_copies_equal, devices

STEPS = 10
ROWS = 4  # of each tower
V1 = classic_towers.v1.train
OPTIMIZERS = {
    "sgd": (lambda: V1.GradientDescentOptimizer(0.1), lambda: keras.optimizers.SGD(0.1)),
    "momentum": (lambda: V1.MomentumOptimizer(0.05, 0.9), lambda: keras.optimizers.SGD(0.05, momentum=0.9)),
    "adam": (lambda: V1.AdamOptimizer(0.01), lambda: keras.optimizers.Adam(0.01, epsilon=1e-8)),
}


def dense_model():
    regularizer = keras.regularizers.L2(0.01)
    hidden = keras.layers.Dense(6, "relu", kernel_regularizer=regularizer, bias_initializer="random_normal")
    return keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(3)])


def sparse_model():
    embedding = keras.layers.Embedding(7, 4)
    return keras.Sequential(
        [keras.Input((3,), dtype="int32"), embedding, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
    )


def dense_batches(rng, rows):
    return [
        (rng.standard_normal((rows, 5), np.float32), rng.standard_normal((rows, 3), np.float32)) for _ in range(STEPS)
    ]


def sparse_batches(rng, rows):
    return [(rng.integers(0, 7, (rows, 3), np.int32), rng.standard_normal((rows, 3), np.float32)) for _ in range(STEPS)]


CASES = {
    "dense": (classic_towers.dense_network, dense_model, dense_batches),
    "sparse": (classic_towers.sparse_network, sparse_model, sparse_batches),
}


def train_both(kind, optimizer, towers, average=tf.reduce_mean, **options):
    """Weights of the classic towers, and the Trainer after the same steps from the same weights."""
    network, build, make_batches = CASES[kind]
    old, new = OPTIMIZERS[optimizer]
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(new(), "mse")
    start = model.get_weights()
    batches = make_batches(np.random.default_rng(0), towers * ROWS)
    trainer = multitower.Trainer(model, devices(towers), **options)
    data = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=tuple(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in batches[0])
    ).apply(tf.data.experimental.assert_cardinality(STEPS))
    trainer.fit(data, epochs=1, shuffle=False, verbose=0)
    return classic_towers.train(network, start, old, batches, towers, average), trainer


@pytest.mark.parametrize("towers", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "optimizer"), [("dense", "sgd"), ("dense", "momentum"), ("dense", "adam"), ("sparse", "sgd")]
)
def test_shared_placement_is_the_classic_recipe(kind, optimizer, towers):
    weights, trainer = train_both(kind, optimizer, towers, placement="shared")
    assert_close(trainer.model.get_weights(), weights, BOUND)
    assert int(trainer.model.optimizer.iterations) == STEPS


@pytest.mark.parametrize("kind", CASES)
def test_replicated_placement_ends_there_too(kind):
    weights, trainer = train_both(kind, "sgd", 2, placement="replicated")
    assert_close(trainer.model.get_weights(), weights, BOUND)
    assert_copies_equal(trainer)


@pytest.mark.parametrize("kind", CASES)
def test_a_sum_in_place_of_the_mean_is_found(kind):
    """Control: the comparison tells the commonest mistake in hand-written towers."""
    weights, trainer = train_both(kind, "sgd", 2, tf.reduce_sum, placement="shared")
    with pytest.raises(AssertionError, match="apart, allowed are"):
        assert_close(trainer.model.get_weights(), weights, BOUND)
