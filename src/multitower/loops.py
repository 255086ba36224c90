"""The functions that Keras' loop calls: steps on towers, from an iterator."""

import functools

import tensorflow as tf

from . import batches
from .ahead import Ahead
from .errors import BatchError
from .step import errors_explained
from .towers import Replicated


class Loop:
    """train_function or test_function: runs steps_per_execution steps from an iterator and returns the logs."""

    def __init__(self, towers, steps):
        self.towers = towers
        self._passing_over, self._logs_meanwhile = 0, {}
        self._steps = steps
        self._run = tf.function(self._in_graph, autograph=False, reduce_retracing=True)
        self._batch = Replicated(towers)
        if steps == 1 and any("GPU" in device for device in towers.devices):
            self._run = Ahead(towers)

    def __call__(self, iterator):
        if self._passing_over:
            return self._passed(iterator)
        self.towers.store.refresh()
        if isinstance(iterator, tf.data.Iterator):
            with errors_explained():
                return self._run(iterator)
        logs = None
        for _, data in zip(range(self._steps), iterator, strict=False):
            logs = self._batch(data)
        return logs

    def pass_over(self, batches, logs):
        """Take so many batches from the iterator first, make no step with them, and return `logs` meanwhile."""
        self._passing_over, self._logs_meanwhile = batches, logs

    def _passed(self, iterator):
        for _ in range(self._steps):
            if next(iterator, None) is None:
                raise BatchError(f"the data end {self._passing_over} batches before the one where training is to go on")
            self._passing_over -= 1
        return self._logs_meanwhile

    def _in_graph(self, iterator):
        return self._step(iterator.get_next()) if self._steps == 1 else self._several(iterator)

    def _several(self, iterator):
        """Steps until there have been enough or the data end; out of range where there is no batch at all.

        A step runs only when its batch is there, as in Keras: of a step whose batch fails to come, what needs no data
        runs all the same, and the optimizer would count it.
        """
        first = iterator.get_next_as_optional()
        found = {}

        def step():
            found["logs"] = self._step(first.get_value())
            return tf.nest.flatten(found["logs"])

        def out_of_range():
            iterator.get_next()
            return [tf.zeros([d or 0 for d in v.shape], v.dtype) for v in tf.nest.flatten(found["logs"])]

        def more(i, has_data, *_):
            return has_data & (i < self._steps)

        def another(i, _, *logs):
            data = iterator.get_next_as_optional()
            has_data = data.has_value()
            run = functools.partial(lambda: tf.nest.flatten(self._step(data.get_value())))
            return i + 1, has_data, *tf.cond(has_data, run, lambda: list(logs))

        start = (tf.constant(1), tf.constant(True), *tf.cond(first.has_value(), step, out_of_range))
        _, _, *logs = tf.while_loop(more, another, start, parallel_iterations=1)
        return tf.nest.pack_sequence_as(found["logs"], logs)

    def _step(self, data):
        batch = tf.nest.map_structure(batches.leaf, (data,))
        batches.check(batch)
        return self.towers.emit(batch)


class Predict:
    """predict_function: the outputs for a list of batches, rows in order."""

    def __init__(self, towers):
        self.towers = towers
        self._batch = Replicated(towers)

    def __call__(self, data):
        outputs = [self._batch(batch) for batch in data]
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
