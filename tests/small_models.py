"""Small compiled models for the tests of Trainer, every one with its data: as few weights as show a wrong factor.

All use SGD with momentum: Adam would hide a gradient that is wrong by a constant factor.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, regularizers

FEATURES, CLASSES = 6, 3


def momentum(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def built(model, *inputs):
    """`model` with all variables, those of the optimizer too, before its first step."""
    model(*inputs)
    model.optimizer.build(model.trainable_variables)
    return model


def features(rows, seed=0):
    return np.random.default_rng([seed, rows]).normal(size=(rows, FEATURES)).astype("float32")


def numbers(rows, seed=1):
    return np.random.default_rng([seed, rows]).normal(size=(rows, 1)).astype("float32")


def classes(rows, seed=2):
    return np.random.default_rng([seed, rows]).integers(0, CLASSES, rows)


def regression(rows):
    return {"x": features(rows), "y": numbers(rows)}


def classification(rows):
    return {"x": features(rows), "y": classes(rows)}


def compiled(members, optimizer=None, loss="mse", **options):
    model = keras.Sequential(members)
    model.compile(optimizer or momentum(), loss, **options)
    return model


def linear(optimizer=None, **options):
    """The smallest model there is: x·w + b."""
    return built(compiled([layers.Dense(1)], optimizer, **options), features(1))


def sequential():
    """Sequential, with batch normalisation: the rows of a batch depend on each other."""
    members = [layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dense(CLASSES)]
    return built(compiled(members, loss=cross_entropy(), metrics=["accuracy"]), features(1))


def unbuilt_sequential():
    """Nobody has told it the shape of its input: the first step creates the variables."""
    return compiled([layers.Dense(5, "tanh"), layers.Dense(CLASSES)], loss=cross_entropy(), metrics=["accuracy"])


def functional():
    """Two named inputs, two named outputs, weighted losses."""
    left, right = keras.Input((FEATURES,), name="left"), keras.Input((2,), name="right")
    hidden = layers.Dense(5, "tanh")(layers.Concatenate()([left, right]))
    outputs = {"kind": layers.Dense(CLASSES, name="kind")(hidden), "size": layers.Dense(1, name="size")(hidden)}
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        momentum(),
        {"kind": cross_entropy(), "size": "mse"},
        loss_weights={"kind": 0.3, "size": 0.7},
        metrics={"kind": ["accuracy"], "size": [keras.metrics.MeanAbsoluteError()]},
    )
    model.optimizer.build(model.trainable_variables)
    return model


def named(rows):
    return {
        "x": {"left": features(rows), "right": features(rows, 5)[:, :2]},
        "y": {"kind": classes(rows), "size": numbers(rows)},
    }


class Subclassed(keras.Model):
    """Subclassed, with a weight regulariser and an activity regulariser, which Keras divides by the rows."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(5, "tanh", kernel_regularizer=regularizers.L2(0.1))
        self.out = layers.Dense(1, activity_regularizer=regularizers.L2(0.1))

    def call(self, x):
        return self.out(self.hidden(x))


def unbuilt_subclassed():
    model = Subclassed()
    model.compile(momentum(), "mse", metrics=["mae"])
    return model


def subclassed():
    return built(unbuilt_subclassed(), features(1))


class OwnStep(Subclassed):
    """A train_step as Keras' guide writes it: compute_loss, then the optimizer."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x, y, prediction)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


def own_step():
    model = OwnStep()
    model.compile(momentum(), "mse", metrics=["mae"])
    return built(model, features(1))


class OwnLoss(keras.Model):
    """A train_step that knows nothing of compile's loss: a loss that is a mean over rows, and metrics of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.squares = keras.losses.MeanSquaredError()
        self.tracker = keras.metrics.Mean(name="squares")
        self.distance = keras.metrics.MeanAbsoluteError(name="distance")

    @property
    def metrics(self):
        return [self.tracker, self.distance]

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.squares(y, prediction)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        self.distance.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


def own_loss():
    model = OwnLoss()
    model.compile(momentum())
    return built(model, features(1))
