"""CIFAR-10: the network and the recipe of TensorFlow's tutorial on towers, 60 000 pictures of 32×32×3 in 10 classes.

    24×24×3 → conv 5×5×64, pool, norm → conv 5×5×64, norm, pool → dense 384 → dense 192 → 10 classes

SGD of 0.1, divided by 10 every 350 epochs of examples seen; weight decay 0.004 on the two dense layers; evaluated with
the moving average 0.9999 of the weights; 128 rows for each tower. The data are read from `--set data=DIR`, a folder of
the binary or the Python version (`cifar10_files`), else from Keras' copy, which Keras downloads where it can.

Source: A. Krizhevsky, cuda-convnet, 2011, and Learning Multiple Layers of Features from Tiny Images, 2009; TensorFlow's
tutorial models/image/cifar10.
"""

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from ..cifar10_files import Pictures, from_keras, read_folder
from ..pictures import distorted_batches, plain_batches
from ..schedule import staircase

EPOCHS = 350
BATCH_SIZE_PER_TOWER = 128
SIDE = 24  # pixels of a side after cropping
_REACH = 4  # channels on either side that local response normalisation adds up


def build_model(
    data: str | None = None,
    batch_size: int = BATCH_SIZE_PER_TOWER,
    lr: float = 0.1,
    decay: float = 0.1,
    decay_epochs: float = 350,
    weight_decay: float = 0.004,
    average: float = 0.9999,
    examples: int | None = None,
    seed: int | None = None,
) -> keras.Model:
    """Return the compiled network.

    Args:
        data: see `load_data`; it says how many examples an epoch has.
        batch_size: B, rows of the global batch.
        lr: learning rate of SGD at first.
        decay: factor of the staircase.
        decay_epochs: epochs between its steps.
        weight_decay: the loss contains this much of Σw²/2 over the weights of each of the two dense layers.
        average: momentum of the moving average of the weights, which is what is evaluated; 0 switches it off.
        examples: rows of the training data; None counts those of `data`.
        seed: makes the initial weights; None takes Keras' global seed (`multitower train --seed`).
    """
    if seed is not None:
        keras.utils.set_random_seed(seed)
    rows = examples if examples is not None else len(_read(data)[0][1])
    model = _network(weight_decay)
    rate: Any = staircase(lr, decay, decay_epochs, rows, batch_size)
    optimizer = keras.optimizers.SGD(rate, use_ema=average > 0, ema_momentum=average or 0.99)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def _network(weight_decay: float) -> keras.Model:
    layers = keras.layers
    x = inputs = keras.Input((SIDE, SIDE, 3))
    x = _conv(bias=0.0)(x)
    x = local_response_normalisation(_pool()(x))
    x = local_response_normalisation(_conv(bias=0.1)(x))
    x = layers.Flatten()(_pool()(x))
    for units in (384, 192):
        x = _dense(units, 0.04, 0.1, activation="relu", kernel_regularizer=keras.regularizers.L2(weight_decay / 2))(x)
    return keras.Model(inputs, _dense(10, 1 / 192, 0.0)(x), name="cifar10")


def _normal(stddev: float) -> Any:
    return keras.initializers.TruncatedNormal(stddev=stddev)


def _conv(bias: float) -> keras.Layer:
    start: Any = keras.initializers.Constant(bias)
    return keras.layers.Conv2D(
        64, 5, padding="same", activation="relu", kernel_initializer=_normal(0.05), bias_initializer=start
    )


def _pool() -> keras.Layer:
    return keras.layers.MaxPooling2D(3, 2, padding="same")


def _dense(units: int, stddev: float, bias: float, **options) -> keras.Layer:
    start: Any = keras.initializers.Constant(bias)
    return keras.layers.Dense(units, kernel_initializer=_normal(stddev), bias_initializer=start, **options)


def local_response_normalisation(x):
    """x / (1 + α Σ x²)^0.75 over the channel and the 4 on either side, α = 0.001/9: the tutorial's `tf.nn.lrn`.

    Made of operations that Keras saves, so that a saved model loads without multitower.

    Args:
        x: (B, h, w, C).

    Source: A. Krizhevsky, I. Sutskever and G. Hinton, ImageNet Classification with Deep Convolutional Neural Networks,
    2012, section 3.3.
    """
    numbers = np.arange(x.shape[-1])
    near = np.abs(numbers[:, None] - numbers) <= _REACH
    total: Any = ops.matmul(ops.square(x), near.astype("float32"))  # on a CPU faster than tf.nn.lrn
    root: Any = ops.rsqrt(1.0 + (0.001 / 9) * total)  # ^-0.5
    return x * (root * ops.sqrt(root))


def load_data(
    data: str | None = None, batch_size: int = BATCH_SIZE_PER_TOWER, seed: int = 0
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return (train, validation): 50 000 distorted pictures, in a new order every epoch, and 10 000 central crops.

    Args:
        data: folder of the binary or the Python version of CIFAR-10; None for the copy that Keras keeps or downloads.
        batch_size: B, rows of a batch.
        seed: of the orders and distortions.

    Images are float32 of shape (B, 24, 24, 3) with mean 0 and variance 1, labels int32 of shape (B,) in 0 … 9.
    """
    train, test = _read(data)
    return distorted_batches(*train, batch_size, SIDE, seed), plain_batches(*test, batch_size, SIDE)


@functools.lru_cache(maxsize=1)
def _read(data: str | None) -> tuple[Pictures, Pictures]:
    return from_keras() if data is None else read_folder(Path(data))


def make_callbacks(average: float = 0.9999) -> list[keras.callbacks.Callback]:
    """Return what lets `fit` validate with the moving average of the weights.

    Args:
        average: see `build_model`.
    """
    return [keras.callbacks.SwapEMAWeights(), _YoungAverage(average)] if average > 0 else []


class _YoungAverage(keras.callbacks.Callback):
    """Says so where the average will be made of first weights mostly: a run too short for its momentum."""

    def __init__(self, momentum: float):
        super().__init__()
        self._momentum = momentum

    def on_train_begin(self, logs=None):
        params = self.params or {}
        steps = (params.get("steps") or 0) * params.get("epochs", 0)
        left = self._momentum**steps
        if steps and left > 0.05:
            print(
                f"cifar10: after {steps} steps the moving average still consists of the first weights by {left:.0%}; "
                f"for a run this short give --set average={max(0.0, 1 - 10 / steps):.3g}"
            )
