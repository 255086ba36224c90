"""Rows trained per second of `fit`, with what does not come again left out: the first execution, and validation.

epoch 1   | trace, compile, first execution | step  step  step … | validation |
epoch 2   |                            step  step  step  step  … | validation |
                        counted:                ^^^^^^^^^^^^^^^^
"""

import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf


class Throughput(keras.callbacks.Callback):
    """Keras callback that times training, from the end of the first execution on.

    An execution is one call of the train function, `steps_per_execution` steps. Each measured stretch ends where
    Keras starts validation or ends the epoch. Give it to `fit` before other callbacks, whose work then is not timed.

    Args:
        rows_by_step: rows of each step of an epoch; None where a dataset given through `watched` tells them.
        first_batch: function of the number of an epoch: batches of it that are passed over, see `Trainer.first_batch`.

    Example:
        >>> speed = Throughput(rows_by_step(len(x), 64))
        >>> model.fit(x, y, batch_size=64, callbacks=[speed])
        >>> speed.examples_per_second
    """

    def __init__(self, rows_by_step: Sequence[int] | None = None, first_batch: Callable[[int], int] = lambda epoch: 0):
        super().__init__()
        self._first_batch = first_batch
        self._passed_over = 0
        self._watching = rows_by_step is None
        self._rows = list(rows_by_step or [])
        self._first_execution = True
        self._start_seconds: float | None = None
        self._first_step = self._steps = 0
        self._logs = {}
        self.batch_size: int | None = max(self._rows, default=None)
        self.rows = 0
        self.seconds = 0.0

    @property
    def examples_per_second(self) -> float | None:
        """Rows per second; None if there was nothing after the first execution."""
        return self.rows / self.seconds if self.seconds else None

    def watched(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same batches, each noting its rows here as it is taken."""

        def note(*batch):
            tf.numpy_function(self._note_rows, [_row_count(batch)], [])
            only, *others = batch
            return batch if others else only

        return dataset.map(note)

    def _note_rows(self, rows):
        self._rows.append(int(rows))

    def on_epoch_begin(self, epoch, logs=None):
        if self._watching:
            self._rows.clear()
        self._first_step = self._steps = self._passed_over = self._first_batch(epoch)
        self._start_seconds = None if self._first_execution else time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if batch < self._passed_over:
            return
        self._steps, self._logs = batch + 1, logs or {}
        if self._first_execution:
            _wait_for(self._logs)
            self._first_execution = False
            self._first_step, self._start_seconds = self._steps, time.perf_counter()

    def on_test_begin(self, logs=None):
        self._stop_clock()

    def on_epoch_end(self, epoch, logs=None):
        self._stop_clock()

    def _stop_clock(self):
        if self._start_seconds is None:
            return
        _wait_for(self._logs)
        counted = self._rows[self._first_step : self._steps]
        if counted:
            self.seconds += time.perf_counter() - self._start_seconds
            self.rows += sum(counted)
        if self._watching:
            self.batch_size = max(self._rows, default=None)
        self._start_seconds = None


def _wait_for(logs):
    """Synchronises: a step's metrics are there only after the step, which a GPU may still be computing."""
    for value in logs.values():
        np.asarray(value)


def rows_by_step(rows: int, batch_size: int) -> list[int]:
    """Rows of each step over `rows` rows of arrays; the last step has what is left.

    Example:
        >>> rows_by_step(10, 4)
        [4, 4, 2]
    """
    return [min(batch_size, rows - start) for start in range(0, rows, batch_size)]


def _row_count(batch):
    """Rows of a batch: the first dimension of its first tensor, dense, ragged or sparse."""
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    return first.dense_shape[0] if isinstance(first, tf.SparseTensor) else tf.shape(first)[0]
