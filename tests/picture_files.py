"""Small files in the formats of CIFAR-10, made of scikit-learn's handwritten digits."""

import pickle

import numpy as np
from sklearn.datasets import load_digits

PARTS = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def digit_pictures(rows, start=0):
    """uint8 (rows, 32, 32, 3) and labels: digits of 8×8, each pixel 4×4 large, red, half green and inverted blue."""
    pixels, labels = load_digits(return_X_y=True)
    grey = np.kron(pixels[start : start + rows].reshape(-1, 8, 8), np.ones((1, 4, 4))) * 15
    return np.stack([grey, grey / 2, 255 - grey], -1).astype(np.uint8), labels[start : start + rows].astype(np.int32)


def records(images):
    """(rows, 3072): red, green and blue planes, as both versions have them."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def write_binary(folder, rows):
    """The six files of the binary version, with as many pictures each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(PARTS):
        images, labels = digit_pictures(rows, number * rows)
        content = np.concatenate([labels[:, None].astype(np.uint8), records(images)], 1)
        (folder / f"{part}.bin").write_bytes(content.tobytes())
    return folder


def write_python(folder, rows):
    """The six files of the Python version, pickled as Python 2 did: protocol 2, byte strings as keys."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(PARTS):
        images, labels = digit_pictures(rows, number * rows)
        content = {b"batch_label": part.encode(), b"labels": labels.tolist(), b"data": records(images)}
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))
    return folder
