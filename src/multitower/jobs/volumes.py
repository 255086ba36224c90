"""Volumes: a number such as the age, told from a 3-D picture and the sex, by 3-D convolutions.

    d×h×w×1 → [conv 3×3×3, relu, max pool]× 3 → mean over the volume, sex → dense, dropout → 1

Adam with staircase decay, mean squared error; the metric is the mean absolute error in the unit of the target. The data
are NIfTI files and a CSV in `--set data=DIR` (`volume_files`); without it phantoms, whose target is known:

    head: a ball of radius R, brighter than the air around it; in it a dark cavity of radius r; target = 100 · r / R
"""

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.model_selection import train_test_split

from ..errors import JobError
from ..schedule import staircase
from ..volume_files import Volumes, read_folder, standardised

EPOCHS = 40
BATCH_SIZE = 16


def build_model(
    data: str | None = None,
    batch_size: int = BATCH_SIZE,
    lr: float = 2e-3,
    decay: float = 0.5,
    decay_epochs: float = 15,
    width: int = 8,
    dropout: float = 0.2,
    size: int = 16,
    phantoms: int = 400,
    in_memory: bool = True,
    seed: int | None = None,
) -> keras.Model:
    """Return the compiled network.

    Args:
        data, size, phantoms, in_memory: see `load_data`; they say how large a volume is and what targets there are.
        batch_size: B, rows of the global batch.
        lr: learning rate of Adam at first.
        decay: factor of the staircase.
        decay_epochs: epochs between its steps.
        width: channels of the first convolution; the next ones have twice and four times as many.
        dropout: fraction of the dense features dropped in training, 0 to 1.
        seed: makes the initial weights; None takes Keras' global seed (`multitower train --seed`).
    """
    volumes = _load(data, size, phantoms, in_memory)
    rows, _ = _split(volumes, seed or 0)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    model = _network(volumes.shape, width, dropout, volumes.target[rows])
    rate: Any = staircase(lr, decay, decay_epochs, len(rows), batch_size)
    model.compile(keras.optimizers.Adam(rate), loss="mse", metrics=["mae"])
    return model


def _network(shape: tuple[int, int, int], width: int, dropout: float, targets: np.ndarray) -> keras.Model:
    """The last layer gives the target in its own unit; before it mean 0 and variance 1 are what is learned."""
    layers = keras.layers
    volume, sex = keras.Input((*shape, 1), name="volume"), keras.Input((1,), name="sex")
    x = volume
    for channels in (width, 2 * width, 4 * width):
        x = layers.Conv3D(channels, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling3D(padding="same")(x)
    x = layers.Concatenate()([layers.GlobalAveragePooling3D()(x), sex])
    x = layers.Dropout(dropout)(layers.Dense(8 * width, activation="relu")(x))
    scale, offset = float(targets.std()) or 1.0, float(targets.mean())
    return keras.Model(
        {"volume": volume, "sex": sex}, layers.Rescaling(scale, offset)(layers.Dense(1)(x)), name="volumes"
    )


def load_data(
    data: str | None = None,
    batch_size: int = BATCH_SIZE,
    size: int = 16,
    phantoms: int = 400,
    in_memory: bool = True,
    seed: int = 0,
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return (train, validation): four fifths of the volumes in a new order every epoch, and one fifth.

    Args:
        data: folder of NIfTI files and a CSV (id, target, sex); None makes phantoms.
        batch_size: B, rows of a batch.
        size: voxels of a side of the phantoms.
        phantoms: how many.
        in_memory: keep the volumes in memory; False reads each whenever it is needed.
        seed: chooses which volumes are held out, and the orders.

    Batches are ({"volume": float32 (B, d, h, w, 1), "sex": float32 (B, 1)}, target float32 (B, 1)).
    """
    volumes = _load(data, size, phantoms, in_memory)
    if data is None:
        print(f"volumes: no data=DIR is given; these are {phantoms} synthetic phantoms, target = 100 · cavity / head")
    train, held_out = _split(volumes, seed)
    order = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train), seed, reshuffle_each_iteration=True)
    return _batches(volumes, order, batch_size), _batches(
        volumes, tf.data.Dataset.from_tensor_slices(held_out), batch_size
    )


def _batches(volumes: Volumes, order: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    with tf.device("CPU:0"):  # where the functions of a dataset run
        target, sex = tf.constant(volumes.target[:, None]), tf.constant(volumes.sex[:, None])

    def example(row):
        volume = tf.numpy_function(volumes.read, [row], tf.float32, stateful=False)
        volume = tf.ensure_shape(volume, volumes.shape)[..., None]
        return {"volume": volume, "sex": tf.gather(sex, row)}, tf.gather(target, row)

    examples = order.map(example, tf.data.AUTOTUNE, deterministic=True)
    return examples.batch(batch_size).prefetch(tf.data.AUTOTUNE)


@functools.lru_cache(maxsize=1)
def _load(data: str | None, size: int, phantoms: int, in_memory: bool) -> Volumes:
    return make_phantoms(phantoms, size) if data is None else read_folder(Path(data), in_memory)


def _split(volumes: Volumes, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the rows to train on and of those held out, with the same share of each sex where there are enough."""
    rows = np.arange(len(volumes.target))
    fewest = min(np.unique(volumes.sex, return_counts=True)[1])
    kind = volumes.sex if fewest >= 5 else None
    train, held_out = train_test_split(rows, test_size=0.2, random_state=seed, stratify=kind)
    return np.asarray(train), np.asarray(held_out)


def make_phantoms(count: int, size: int, seed: int = 0) -> Volumes:
    """Synthetic heads; where the cavity is, how bright everything is, and the noise have no influence on the target.

    Args:
        count: rows, at least 2.
        size: voxels of a side, at least 8.
        seed: of everything.

    Raises:
        JobError: too few, or too small.
    """
    if count < 2 or size < 8:
        raise JobError(f"phantoms={count}, size={size}; expected at least 2 phantoms of at least 8 voxels a side")
    rng = np.random.default_rng(seed)
    sex = (np.arange(count) % 2).astype(np.float32)
    heads = size * (0.36 + 0.06 * sex + rng.uniform(-0.02, 0.02, count))
    shares = rng.uniform(0.2, 0.8, count)
    pictures = [
        standardised(_phantom(size, head, share * head, rng)) for head, share in zip(heads, shares, strict=True)
    ]
    return Volumes((size, size, size), (100 * shares).astype(np.float32), sex, pictures.__getitem__)


def _phantom(size: int, head: float, cavity: float, rng: np.random.Generator) -> np.ndarray:
    """A ball with a ball-shaped cavity; the edge of each is a voxel wide, so that parts of a voxel count."""
    grid = np.indices((size, size, size)) - (size - 1) / 2
    shift = rng.uniform(-1, 1, (3, 1, 1, 1)) * (head - cavity) * 0.4
    inside, dark = (np.clip(r - np.sqrt((p**2).sum(0)) + 0.5, 0, 1) for r, p in ((head, grid), (cavity, grid - shift)))
    return rng.uniform(0.5, 2.0) * (inside - 0.8 * dark + rng.normal(0, 0.05, inside.shape))
