"""The training data of `multitower train`: the order of an epoch depends on the seed and its number, on nothing else.

Keras shuffles arrays by a random state that depends on all that came before, so a run that starts again with its third
epoch would get the order of the first. Here

    arrays:             order of epoch e = a permutation drawn with (seed, e)
    tf.data.Dataset:    its own order; as many of its iterators are made first as there were epochs before

Keras makes one more iterator of a dataset here and there; a dataset inside flat_map is iterated when it is read.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Epochs(keras.callbacks.Callback):
    """Training data by epochs, and the callback that tells them which epoch it is. Give both to `fit`.

    Args:
        data: a tf.data.Dataset of batches, or a tuple of arrays (x, y) or (x, y, sample_weight).
        batch_size: rows of a batch of arrays.
        seed: of the order of arrays.
        first_epoch: number of the epoch that training starts with.

    Attributes:
        dataset: the batches of one epoch, a tf.data.Dataset of as many batches as `data` has.

    Example:
        >>> data = Epochs((x, y), batch_size=64, seed=0)
        >>> model.fit(data.dataset, epochs=5, callbacks=[data])
    """

    def __init__(self, data: Any, batch_size: int, seed: int = 0, first_epoch: int = 0):
        super().__init__()
        self._epoch = tf.Variable(first_epoch, trainable=False, dtype=tf.int64)
        if isinstance(data, tf.data.Dataset):
            for _ in range(first_epoch):
                iter(data)  # a shuffle draws the seed of its next order when an iterator is made
            self.dataset = _read_once(lambda _: data, int(data.cardinality()))
        else:
            arrays = keras.tree.map_structure(_sliceable, _in_tuples([part for part in data if part is not None]))
            rows = _rows(arrays)
            self.dataset = _read_once(lambda _: self._shuffled(arrays, rows, batch_size, seed), -(-rows // batch_size))

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch.assign(epoch)

    def _shuffled(self, arrays, rows, batch_size, seed):
        key = tf.stack([tf.constant(seed, tf.int64), self._epoch])
        order = tf.random.experimental.stateless_shuffle(tf.range(rows, dtype=tf.int64), key)
        batches = tf.data.Dataset.from_tensor_slices(order).batch(batch_size)
        take = lambda chosen: _taken(arrays, chosen)  # noqa: E731, tf.data reads its name
        return batches.map(take, num_parallel_calls=tf.data.AUTOTUNE)


def _read_once(make, batches):
    dataset = tf.data.Dataset.range(1).flat_map(make)
    if batches >= 0:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(batches))
    return dataset.prefetch(tf.data.AUTOTUNE)


def _in_tuples(structure):
    """tf.data takes lists for tensors."""
    if isinstance(structure, dict):
        return {name: _in_tuples(value) for name, value in structure.items()}
    return tuple(map(_in_tuples, structure)) if isinstance(structure, list | tuple) else structure


def _sliceable(array):
    """What rows can be gathered from: tensors as they are, everything else as an array; floats as Keras takes them."""
    if array is None or isinstance(array, tf.RaggedTensor):
        return array
    if hasattr(array, "tocoo"):  # scipy.sparse
        array = _sparse(array.tocoo())
    if isinstance(array, tf.SparseTensor):
        return _Rows(array)
    array = array if tf.is_tensor(array) else np.asarray(array)
    tensor = tf.convert_to_tensor(array)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor


def _sparse(matrix):
    indices = np.stack([matrix.row, matrix.col], 1).astype("int64")
    values = matrix.data.astype(keras.config.floatx()) if matrix.data.dtype.kind == "f" else matrix.data
    return tf.sparse.reorder(tf.SparseTensor(indices, values, matrix.shape))


class _Rows:
    """A sparse matrix whose rows can be gathered, which tf.sparse has no operation for."""

    def __init__(self, matrix):
        row, column = matrix.indices[:, 0], matrix.indices[:, 1]
        self.shape = matrix.shape
        self._columns = tf.RaggedTensor.from_value_rowids(column, row, matrix.shape[0])
        self._values = tf.RaggedTensor.from_value_rowids(matrix.values, row, matrix.shape[0])

    def take(self, chosen):
        columns, values = tf.gather(self._columns, chosen), tf.gather(self._values, chosen)
        indices = tf.stack([columns.value_rowids(), columns.values], 1)
        size = tf.stack([tf.size(chosen, tf.int64), tf.constant(self.shape[1], tf.int64)])
        return tf.SparseTensor(indices, values.values, size)


def _rows(arrays):
    return int(next(a.shape[0] for a in keras.tree.flatten(arrays) if a is not None))


def _taken(arrays, chosen):
    def rows(array):
        if array is None:
            return None
        return array.take(chosen) if isinstance(array, _Rows) else tf.gather(array, chosen)

    return keras.tree.map_structure(rows, arrays)
