"""Input of pictures: cropped, flipped, brightened, contrasted, standardised; a whole batch in a few operations.

    train   order of the epoch → rows of a batch → crop, flip → brightness → contrast → standardise
    else                         rows of a batch → central crop                       → standardise

What happens to a picture depends on the seed, on the epoch and on its number in the data alone, not on the batch it is
in: the global batch and N can change, and a run that is resumed goes on exactly. The k-th iteration over the dataset is
epoch k; `iter(dataset)` alone counts as one.
"""

import numpy as np
import tensorflow as tf

BRIGHTNESS = 63.0
CONTRAST = (0.2, 1.8)


def distorted_batches(
    images: np.ndarray, labels: np.ndarray, batch_size: int, side: int, seed: int = 0
) -> tf.data.Dataset:
    """Batches to train on: every picture once an epoch, in a new order, distorted anew.

    Args:
        images: uint8 of shape (rows, h, w, channels).
        labels: of shape (rows,).
        batch_size: B; the last batch has what is left.
        side: pixels of the side that is cut out.
        seed: of orders and distortions.

    Returns:
        Batches of float32 (B, side, side, channels), mean 0 and variance 1 each, and labels.
    """
    rows = len(labels)
    pictures, classes = _on_host(images, labels)
    epochs = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)

    def batches_of(epoch):
        draws = _draws(epoch, rows)
        order = tf.argsort(draws[:, 0], stable=True)
        return tf.data.Dataset.from_tensor_slices((order, tf.gather(draws, order))).batch(batch_size)

    def distort(order, draws):
        return distorted(tf.gather(pictures, order), side, *tf.unstack(draws[:, 1:], axis=1)), tf.gather(classes, order)

    batches = epochs.flat_map(batches_of).map(distort, tf.data.AUTOTUNE, deterministic=True)
    steps = -(-rows // batch_size)
    return batches.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(tf.data.AUTOTUNE)


def plain_batches(images: np.ndarray, labels: np.ndarray, batch_size: int, side: int) -> tf.data.Dataset:
    """Batches to evaluate: the centre of every picture, in order.

    Args:
        images: uint8 of shape (rows, h, w, channels).
        labels: of shape (rows,).
        batch_size: B; the last batch has what is left.
        side: pixels of the side that is cut out.
    """
    pictures, classes = _on_host(images, labels)

    def cut(order):
        return standardised(central_crop(tf.gather(pictures, order), side)), tf.gather(classes, order)

    batches = tf.data.Dataset.range(len(labels)).batch(batch_size)
    return batches.map(cut, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _on_host(*arrays: np.ndarray) -> list[tf.Tensor]:
    """As tensors in the memory of the host, where the functions of a dataset run."""
    with tf.device("CPU:0"):
        return [tf.constant(array) for array in arrays]


def _draws(epoch: tf.Tensor, rows: int) -> tf.Tensor:
    """Random numbers of an epoch, 0 … 1, for each picture: order, crop y, crop x, flip, brightness, contrast."""
    return tf.random.stateless_uniform([rows, 6], tf.stack([epoch, tf.zeros_like(epoch)]))


def distorted(images, side, y, x, flip, brightness, contrast):
    """Pictures cropped, flipped, brightened, contrasted and standardised, each by its own numbers.

    Args:
        images: uint8 of shape (B, h, w, channels).
        side: pixels of the side that is cut out.
        y, x: (B,) of 0 … 1, where the crop begins: 0 at the first row or column that it can.
        flip: (B,) of 0 … 1, left and right are exchanged below 0.5.
        brightness: (B,) of 0 … 1, adds −63 … 63.
        contrast: (B,) of 0 … 1, multiplies the distance from the channel's mean by 0.2 … 1.8.

    Returns:
        float32 (B, side, side, channels).
    """
    height, width = images.shape[1:3]
    pixels = tf.range(side)
    rows = _start(y, height - side)[:, None] + pixels
    columns = tf.where((flip < 0.5)[:, None], side - 1 - pixels, pixels) + _start(x, width - side)[:, None]
    images = tf.gather(tf.gather(images, rows, axis=1, batch_dims=1), columns, axis=2, batch_dims=1)
    images = tf.cast(images, tf.float32) + _each((2 * brightness - 1) * BRIGHTNESS)
    mean = tf.reduce_mean(images, (1, 2), keepdims=True)
    low, high = CONTRAST
    return standardised((images - mean) * _each(low + (high - low) * contrast) + mean)


def _start(share, largest):
    """The pixel where a crop begins, 0 … largest, all with the same chance."""
    return tf.minimum(tf.cast(share * (largest + 1), tf.int32), largest)


def _each(values):
    """One number for each picture, to be used on (B, h, w, channels)."""
    return values[:, None, None, None]


def central_crop(images, side):
    """The middle of the pictures: (B, h, w, channels) → (B, side, side, channels)."""
    top, left = ((length - side) // 2 for length in images.shape[1:3])
    return images[:, top : top + side, left : left + side]


def standardised(images):
    """(x − mean) / max(std, 1/√n) over the n numbers of each picture, float32: `tf.image.per_image_standardization`."""
    return tf.image.per_image_standardization(images)
