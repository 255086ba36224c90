"""The networks of the benchmarks, each with a batch of data; every competitor trains these very Keras layers.

digits      the network of the built-in job, batch 64: small steps, batch normalisation
cifar10     the CIFAR-10 tutorial's, batch 128 of 24 × 24 × 3: convolutions and local response normalisation
resnet50    ResNet-50 on small pictures: 25 million weights, 53 batch normalisations
lstm        two LSTM layers of 128 over 32 steps, batch 64: loops in the graph
embedding   100 000 × 64, batch 256 of 16 ids: sparse gradients
deep        ten times convolution, batch normalisation, relu and a dense layer: the time of a first step
"""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from multitower.jobs import digits

layers = keras.layers


@dataclass(frozen=True)
class Network:
    """A network and its data.

    Attributes:
        build: makes the keras.Model, not compiled.
        optimizer: makes the Keras optimizer.
        classic_optimizer: makes the same one of tf.compat.v1.train.
        batch_size: B, rows of the global batch.
        arrays: makes (x, y) of B rows from (random generator, B).
        from_logits: whether the model ends in logits.
        random: whether a step draws random numbers, so that losses can only be compared roughly.
        batch_norm: whether it makes a difference over how many rows statistics are taken.
    """

    build: Callable[[], keras.Model]
    optimizer: Callable[[], keras.Optimizer]
    classic_optimizer: Callable[[], object]
    batch_size: int
    arrays: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    from_logits: bool = True
    random: bool = False
    batch_norm: bool = False

    @property
    def loss(self):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=self.from_logits)

    def model(self, steps_per_execution=1):
        """The compiled model, with the same weights in every process; no metrics but the loss."""
        keras.utils.set_random_seed(1)
        model = self.build()
        model.compile(self.optimizer(), self.loss, jit_compile=False, steps_per_execution=steps_per_execution)
        model.optimizer.build(model.trainable_variables)
        return model

    def dataset(self):
        """The same global batch again and again, put together from its rows each time, for everybody."""
        x, y = self.arrays(np.random.default_rng(0), self.batch_size)
        data = tf.data.Dataset.from_tensor_slices((x, y.astype("int32"))).repeat()
        return data.batch(self.batch_size, drop_remainder=True).prefetch(2)


class LocalResponseNormalization(layers.Layer):
    """x / (1 + 0.001/9 · sum of squares of 9 neighbouring channels)^0.75, as in the tutorial."""

    def call(self, x):
        return tf.nn.local_response_normalization(x, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)


def _cifar10():
    pool = {"pool_size": 3, "strides": 2, "padding": "same"}
    conv = {"filters": 64, "kernel_size": 5, "padding": "same", "activation": "relu"}
    first = [layers.Conv2D(**conv), layers.MaxPooling2D(**pool), LocalResponseNormalization()]
    second = [layers.Conv2D(**conv), LocalResponseNormalization(), layers.MaxPooling2D(**pool), layers.Flatten()]
    dense = [layers.Dense(384, activation="relu"), layers.Dense(192, activation="relu"), layers.Dense(10)]
    return keras.Sequential([keras.Input((24, 24, 3)), *first, *second, *dense])


def _resnet50():
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None)


def _lstm():
    hidden = [layers.LSTM(128, return_sequences=True), layers.LSTM(128)]
    return keras.Sequential([keras.Input((32, 32)), *hidden, layers.Dense(10)])


def _embedding():
    table = layers.Embedding(100_000, 64)
    return keras.Sequential(
        [keras.Input((16,), dtype="int32"), table, layers.GlobalAveragePooling1D(), layers.Dense(10)]
    )


def _deep():
    stack = []
    for _ in range(10):
        stack += [layers.Conv2D(16, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([keras.Input((16, 16, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(10)])


def _labels(rng, rows):
    return rng.integers(0, 10, rows)


def _normal(*shape):
    return lambda rng, rows: (rng.standard_normal((rows, *shape), dtype="float32"), _labels(rng, rows))


def _digits(_, rows):
    (x, y), _ = digits.load_data()
    return x[:rows], y[:rows]


def _ids(rng, rows):
    return rng.integers(0, 100_000, (rows, 16)).astype("int32"), _labels(rng, rows)


def _sgd():  # a small rate: rounding must not grow to a difference of losses within three steps of ResNet-50
    return keras.optimizers.SGD(1e-4)


def _classic_sgd():
    return tf.compat.v1.train.GradientDescentOptimizer(1e-4)


def _adam():
    return keras.optimizers.Adam(1e-3)


def _classic_adam():
    return tf.compat.v1.train.AdamOptimizer(1e-3, epsilon=1e-7)


NETWORKS = {
    "digits": Network(
        digits.build_model, _adam, _classic_adam, 64, _digits, from_logits=False, random=True, batch_norm=True
    ),
    "cifar10": Network(_cifar10, _sgd, _classic_sgd, 128, _normal(24, 24, 3)),
    "resnet50": Network(_resnet50, _sgd, _classic_sgd, 16, _normal(32, 32, 3), batch_norm=True),
    "lstm": Network(_lstm, _sgd, _classic_sgd, 64, _normal(32, 32)),
    "embedding": Network(_embedding, _sgd, _classic_sgd, 256, _ids),
    "deep": Network(_deep, _sgd, _classic_sgd, 64, _normal(16, 16, 3), batch_norm=True),
}
