"""Models and steps that break the rule for exactness, each in one way, for the tests of `multitower.verify`.

The rule: the loss is a mean over the rows, or comes from model.compute_loss; gradients go through a Keras optimizer, or
multitower.all_reduce(gradient, "mean").
"""

import keras
import tensorflow as tf
from keras import layers

import multitower as mt
from small_models import FEATURES, built, compiled, features


class LossOf(keras.Model):
    """A train_step of its own whose loss is `loss_of`(model, squared error of each row, weights of the rows, rows)."""

    def __init__(self, loss_of, by_hand=False):
        super().__init__()
        self.hidden = layers.Dense(3, "tanh")
        self.out = layers.Dense(1)
        self.loss_of = loss_of
        self.by_hand = by_hand

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((self(x, training=True) - y) ** 2, -1)
            loss = self.loss_of(self, errors, weights, tf.cast(tf.shape(x)[0], errors.dtype))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.by_hand:
            for gradient, variable in zip(gradients, self.trainable_variables, strict=True):
                variable.assign_sub(0.1 * gradient)
        else:
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "largest": tf.reduce_mean(errors)}


def with_loss(loss_of, **options):
    """A function that builds a compiled `LossOf`."""

    def build():
        model = LossOf(loss_of, **options)
        model.compile(keras.optimizers.SGD(0.1))
        model(features(1))
        return model

    return build


def mean(model, errors, weights, rows):
    """As it should be: a sum over rows, divided by their number."""
    return tf.reduce_sum(errors) / rows


def fixed_number(model, errors, weights, rows):
    """As for tf.distribute, which sums: divided by the rows of the global batch, a constant."""
    return tf.reduce_sum(errors) / 12


def sum_of_weights(model, errors, weights, rows):
    """A weighted mean: its divisor is that of the tower's rows."""
    return tf.reduce_sum(errors * weights) / tf.reduce_sum(weights)


def prior(model, errors, weights, rows):
    """A term that has no rows, divided by the rows of the tower."""
    return tf.reduce_mean(errors) + tf.reduce_sum(model.hidden.kernel**2) / rows


def all_rows(model, errors, weights, rows):
    """The errors of all towers, divided by the rows of one."""
    return tf.reduce_sum(mt.all_gather(errors)) / rows


def sum_in_part(model, errors, weights, rows):
    """A mean, and a sum over rows on top of it."""
    return tf.reduce_mean(errors) + 0.1 * tf.reduce_sum(tf.abs(errors))


class LargestError(LossOf):
    """Returns a number that is neither a mean over rows nor made from rows."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        largest = tf.reduce_max(tf.abs(self(x) - y))
        return {**super().train_step(data), "largest": largest}


def largest_error():
    model = LargestError(mean)
    model.compile(keras.optimizers.SGD(0.1))
    model(features(1))
    return model


class Layer(layers.Layer):
    """Before everything else; `what` says what it does to x."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def build(self, shape):
        self.kept = self.add_weight(shape=(FEATURES,), trainable=False, name="kept")
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return self.what(self, x)


def with_layer(what):
    """A function that builds a compiled model whose first layer does `what`."""

    def build():
        return built(compiled([Layer(what), layers.Dense(3, "tanh"), layers.Dense(1)]), features(1))

    return build


def centred(layer, x):
    """The mean is that of the tower's rows."""
    return x - tf.reduce_mean(x, 0)


def running_mean(layer, x):
    """State that each tower updates from its own rows."""
    layer.kept.assign(0.9 * layer.kept + 0.1 * tf.reduce_mean(x, 0))
    return x


def last_row(layer, x):
    """State that depends on which row comes last."""
    shifted = x + layer.kept
    layer.kept.assign(tf.reduce_sum(x[-1:], 0))
    return shifted


def noise(layer, x):
    return x + keras.random.normal((FEATURES,), seed=layer.seeds)


def noise_without_seed(layer, x):
    return x + tf.random.normal((FEATURES,))


def needs_a_row(layer, x):
    return x + x[-1]
