"""Rows per second of fit: the first execution and validation are left out, every row counts once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from multitower import throughput
from multitower.throughput import Throughput, rows_by_step


class Clock:
    """Stands for the time module: seconds pass when a test says so."""

    seconds = 0.0

    def perf_counter(self):
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def run_epoch(speed, clock, steps, seconds, validation_seconds, steps_per_execution=1):
    """Call the callback as keras.Model.fit does."""
    speed.on_epoch_begin(0)
    for start in range(0, steps, steps_per_execution):
        clock.seconds += seconds[min(start, len(seconds) - 1)]
        speed.on_train_batch_end(min(start + steps_per_execution, steps) - 1, {"loss": np.float32(1)})
    speed.on_test_begin()
    clock.seconds += validation_seconds
    speed.on_epoch_end(0)
    clock.seconds += 1000


def test_first_step_and_validation_are_left_out(clock):
    speed = Throughput(rows_by_step(10, 4))
    run_epoch(speed, clock, 3, [100, 1, 1], 50)
    assert (speed.rows, speed.seconds) == (6, 2)
    run_epoch(speed, clock, 3, [1], 50)
    assert (speed.rows, speed.seconds) == (16, 5)
    assert speed.examples_per_second == 16 / 5
    assert speed.batch_size == 4


def test_first_execution_of_several_steps_is_left_out(clock):
    speed = Throughput(rows_by_step(10, 2))
    run_epoch(speed, clock, 5, [100, 1, 1, 1, 1], 50, steps_per_execution=2)
    assert (speed.rows, speed.seconds) == (6, 2)


def test_a_single_execution_has_no_speed(clock):
    speed = Throughput(rows_by_step(4, 4))
    run_epoch(speed, clock, 1, [100], 50)
    assert speed.examples_per_second is None


@pytest.mark.parametrize(
    ("rows", "batch_size", "expected"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (0, 4, [])]
)
def test_rows_by_step(rows, batch_size, expected):
    assert rows_by_step(rows, batch_size) == expected


@pytest.mark.parametrize("kind", ["dense", "dict", "ragged", "sparse", "single"])
def test_rows_of_a_dataset_are_counted_as_they_are_taken(kind):
    x = tf.reshape(tf.range(20.0), (10, 2))
    whole = {
        "dense": (x, x),
        "dict": ({"a": x}, x),
        "ragged": (tf.RaggedTensor.from_tensor(x), x),
        "sparse": (tf.sparse.from_dense(x + 1), x),
        "single": x,
    }[kind]
    dataset = tf.data.Dataset.from_tensor_slices(whole).batch(4)
    speed = Throughput()
    watched = speed.watched(dataset)
    assert watched.element_spec == dataset.element_spec
    for epoch in range(2):
        speed.on_epoch_begin(epoch)
        for step, (batch, plain) in enumerate(zip(watched, dataset, strict=True)):
            tf.nest.map_structure(_assert_equal, batch, plain)
            speed.on_train_batch_end(step)
        speed.on_epoch_end(epoch)
    assert speed.rows == 6 + 10
    assert speed.batch_size == 4


def _assert_equal(a, b):
    dense = tf.sparse.to_dense if isinstance(a, tf.SparseTensor) else lambda t: t
    dense = (lambda t: t.to_tensor()) if isinstance(a, tf.RaggedTensor) else dense
    np.testing.assert_array_equal(dense(a), dense(b))


def test_in_keras_fit_every_row_after_the_first_step_counts():
    x = np.ones((10, 2), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    speed = Throughput()
    dataset = speed.watched(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4).prefetch(2))
    model.fit(dataset, epochs=3, shuffle=False, validation_data=(x, x[:, :1]), callbacks=[speed], verbose=0)
    assert speed.rows == 6 + 10 + 10
    assert speed.examples_per_second > 0
