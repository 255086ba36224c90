"""A job of your own: `multitower train examples/job.py --devices cpu:2 --set width=32`."""

import keras
import numpy as np

EPOCHS = 3
BATCH_SIZE = 64


def build_model(width=16, lr=0.01):
    """A compiled keras.Model."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(width, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(lr), "mse", metrics=["mae"])
    return model


def load_data(rows=1000, seed=0):
    """(train, validation), each arrays (x, y) or a tf.data.Dataset of batches."""
    x = np.random.default_rng(seed).standard_normal((rows, 8)).astype("float32")
    y = np.sin(x).sum(1, keepdims=True)
    return (x[: rows * 4 // 5], y[: rows * 4 // 5]), (x[rows * 4 // 5 :], y[rows * 4 // 5 :])
