"""Batches of chosen rows of a given batch, for `multitower.verify`: even, uneven, and fewer rows than towers."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..batches import leaf, row_count
from ..errors import BatchError


def as_tensors(batch: Any) -> Any:
    """The batch as Keras' `fit` would have it: arrays of floating-point numbers in keras.config.floatx().

    Args:
        batch: what a train_step gets: (x, y), (x, y, sample_weight), x, or any structure of arrays and tensors.
    """

    def tensor(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            value = value.astype(keras.config.floatx())
        return leaf(value)

    return tf.nest.map_structure(tensor, batch)


def count_rows(batch: Any) -> int:
    """B, the rows of a batch of tensors.

    Raises:
        BatchError: no tensor with rows, or different numbers of rows.
    """
    counts = {int(row_count(v)) for v in tf.nest.flatten(batch) if tf.is_tensor(v)}
    if len(counts) != 1 or counts == {0}:
        raise BatchError(
            f"the batch has tensors of {sorted(counts) or 'no'} rows; expected arrays or tensors, each with one row "
            f"for each row of the batch, and at least one"
        )
    return counts.pop()


def sizes(rows: int, towers: int, steps: int) -> list[int]:
    """Rows of the batch of each step: even, uneven, fewer than towers, and again.

    Args:
        rows: B, rows of the batch given. A batch is larger only where B is less than N + 1; rows then occur twice.
        towers: N.
        steps: how many.
    """
    even = max(1, rows // towers) * towers
    uneven = even + 1 if even + 1 <= rows or even == towers else even - 1
    kinds = [even, uneven, max(1, towers - 1)]
    return [kinds[step % len(kinds)] for step in range(steps)]


def choose(rows: int, sizes: Sequence[int]) -> list[np.ndarray]:
    """For each size the numbers of so many rows of `rows`, going on where the last one ended, round and round."""
    starts = np.cumsum([0, *sizes[:-1]])
    return [(start + np.arange(size)) % rows for start, size in zip(starts, sizes, strict=True)]


def take(batch: Any, rows: Any) -> Any:
    """The batch of these rows.

    Args:
        batch: structure of tensors, and None.
        rows: their numbers, an integer vector.
    """
    return tf.nest.map_structure(lambda v: _take(v, rows) if tf.is_tensor(v) else v, batch)


def _take(tensor: Any, rows: Any) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.from_dense(tf.gather(tf.sparse.to_dense(tensor), rows))
    return tf.gather(tensor, rows)


def dataset(batch: Any, rows: Sequence[np.ndarray]) -> tf.data.Dataset:
    """One batch for each vector of row numbers; its rows are left open, so that one trace serves all sizes."""
    return tf.data.Dataset.from_tensor_slices(tf.ragged.constant([list(map(int, r)) for r in rows])).map(
        lambda numbers: take(batch, numbers)
    )
