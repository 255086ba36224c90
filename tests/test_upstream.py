"""Canaries: what multitower takes from TensorFlow and Keras without its being public API, see upstream.py."""

import inspect

import keras
import pytest
import tensorflow as tf
from keras.layers import BatchNormalization

from multitower import norm, upstream

MOMENTS = upstream.batch_norm_moments_name()


def test_batch_norm_moments_take_inputs_and_mask():
    assert list(inspect.signature(getattr(BatchNormalization, MOMENTS)).parameters) == ["self", "inputs", "mask"]
    assert MOMENTS in vars(BatchNormalization)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_batch_norm_uses_its_moments_in_training_and_gives_them_float32_at_least(monkeypatch, dtype):
    calls = []

    def moments(layer, inputs, mask):
        calls.append((inputs.dtype, mask))
        return tf.ones([2], inputs.dtype), tf.fill([2], tf.constant(4.0, inputs.dtype))

    monkeypatch.setattr(BatchNormalization, MOMENTS, moments)
    layer = BatchNormalization(momentum=0.5, epsilon=0.0, dtype=dtype)
    outputs = layer(tf.constant([[3.0, 5.0]], dtype), training=True)
    assert calls == [(tf.float64 if dtype == "float64" else tf.float32, None)]
    assert outputs.numpy().tolist() == [[1.0, 2.0]]
    assert layer.moving_mean.numpy().tolist() == [0.5, 0.5]
    assert layer.moving_variance.numpy().tolist() == [2.5, 2.5]


@pytest.mark.parametrize(("trainable", "training"), [(True, False), (False, True)])
def test_batch_norm_asks_for_no_moments_when_it_does_not_train(monkeypatch, trainable, training):
    monkeypatch.setattr(BatchNormalization, MOMENTS, None)
    layer = BatchNormalization(trainable=trainable)
    assert layer(tf.ones([1, 2]), training=training).shape == (1, 2)


def test_batch_norm_keeps_the_statistics_we_know_and_no_others():
    options = {"renorm": True} if "renorm" in inspect.signature(BatchNormalization).parameters else {}
    layer = BatchNormalization(**options)
    layer.build((None, 2))
    known = {id(getattr(layer, name)) for name in norm._STATISTICS if hasattr(layer, name)}
    assert {id(v) for v in layer.non_trainable_variables} == known


def test_batch_norm_divides_masked_sums_by_the_count_and_epsilon():
    layer = BatchNormalization(momentum=0.0, dtype="float64")
    mask = tf.constant([[True], [True], [False]])
    layer(tf.constant([[[1.0]], [[3.0]], [[9.0]]], tf.float64), training=True, mask=mask)
    assert layer.moving_mean.numpy() == pytest.approx(4 / (2 + keras.config.epsilon()), rel=1e-12)
