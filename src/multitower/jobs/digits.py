"""Handwritten digits: scikit-learn's 1797 real 8×8 images (`load_digits`, nothing is downloaded), a small conv net.

    8×8×1 → [conv 3×3, batch norm, relu, max pool]× 2 → dense, dropout → 10 classes

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

EPOCHS = 20
BATCH_SIZE = 64

Arrays = tuple[np.ndarray, np.ndarray]


def build_model(lr: float = 1e-3, width: int = 32, dropout: float = 0.3, seed: int | None = None) -> keras.Model:
    """Return the compiled network.

    Args:
        lr: learning rate of Adam, per update of the global batch.
        width: channels of the first convolution; the second has twice as many.
        dropout: fraction of the dense features dropped in training, 0 to 1.
        seed: makes the initial weights; None takes Keras' global seed (`multitower train --seed`).
    """
    if seed is not None:
        keras.utils.set_random_seed(seed)
    layers = keras.layers
    stack = [keras.Input((8, 8, 1)), *_conv_block(width), *_conv_block(2 * width), layers.Flatten()]
    head = [layers.Dense(2 * width, activation="relu"), layers.Dropout(dropout), layers.Dense(10, activation="softmax")]
    model = keras.Sequential(stack + head, name="digits")
    model.compile(keras.optimizers.Adam(lr), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _conv_block(channels: int) -> list[keras.Layer]:
    """Convolution, batch norm, relu, 2×2 max pool: (B, h, w, c) → (B, h/2, w/2, channels)."""
    conv = keras.layers.Conv2D(channels, 3, padding="same", use_bias=False)
    return [conv, keras.layers.BatchNormalization(momentum=0.9), keras.layers.ReLU(), keras.layers.MaxPooling2D()]


def load_data(seed: int = 0) -> tuple[Arrays, Arrays]:
    """Return ((x, y), (x, y)): 1437 images to train on and 360 held out, with the same share of each digit.

    Args:
        seed: chooses which images are held out.

    Images are float32 of shape (B, 8, 8, 1) in 0 … 1, labels int32 of shape (B,) in 0 … 9.
    """
    pixels, labels = load_digits(return_X_y=True)  # (1797, 64) of 0 … 16, and (1797,)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype("float32")
    held_out = train_test_split(images, labels.astype("int32"), test_size=0.2, stratify=labels, random_state=seed)
    x_train, x_held, y_train, y_held = map(np.asarray, held_out)
    return (x_train, y_train), (x_held, y_held)
