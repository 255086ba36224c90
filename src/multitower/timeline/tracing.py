"""multitower.trace and multitower.TraceSteps: steps recorded from outside, and inside a running fit."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ..errors import TraceError
from ..trainer import Trainer
from .recording import Recording, next_batch
from .report import Timeline, free_directory

_WARM_STEPS = 2


def trace(
    trainer_or_step: Trainer | keras.Model | Callable[..., Any], batch: Any, *, steps: int = 3, **fit: Any
) -> Timeline:
    """Run a few steps and find out what ran where, when, and where the time went.

        one step with its graphs  →  2 warm steps  →  `steps` traced steps

    They are steps like any others: a Trainer trains its model.

    Args:
        trainer_or_step: a `Trainer`, a compiled keras.Model, or a step: what `multitower.replicate` returns, a
            tf.function, or a function that calls some.
        batch: what the step is called with: a tuple of arguments, or one argument. A tf.data.Dataset gives a batch for
            each step, taken again from its beginning at its end, and the wait for it is part of the step. For a
            Trainer or model, x or (x, y) or (x, y, sample_weight).
        steps: how many steps are timed.
        **fit: more arguments of `fit`, for a Trainer or model, such as batch_size; the arrays are then cut into batches
            by it.

    Returns:
        A `Timeline`.

    Raises:
        TraceError: the step runs no tf.function, or TensorFlow is being profiled already.

    Example:
        >>> import keras, numpy as np, multitower as mt
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> timeline = mt.trace(mt.Trainer(model, devices="cpu:1"), (np.eye(2), np.ones([2, 1])))
        >>> timeline.devices, len(timeline.steps), timeline.misplaced
        (['CPU:0'], 3, [])
    """
    check_count("steps", steps, 1)
    if isinstance(trainer_or_step, (Trainer, keras.Model)):
        return _trace_fit(trainer_or_step, batch, steps, fit)
    if fit:
        raise TypeError(f"trace() of a step takes no arguments of fit; received {', '.join(fit)}")
    return _trace_calls(trainer_or_step, _calls(batch), steps)


def _trace_fit(trainer: Any, batch: Any, steps: int, fit: dict[str, Any]) -> Timeline:
    recorder = _Recorder(0, steps, warm=_WARM_STEPS)
    total = recorder.last + 1
    if "batch_size" in fit:
        data = dict(zip(("x", "y", "sample_weight"), _arguments(batch), strict=False)) | {"epochs": total}
    else:
        batches = batch if isinstance(batch, tf.data.Dataset) else tf.data.Dataset.from_tensors(_arguments(batch))
        data = {"x": batches.repeat(), "steps_per_epoch": total, "shuffle": False}
    trainer.fit(**{"verbose": 0, **data, **fit, "callbacks": [*fit.get("callbacks", ()), recorder]})
    return recorder.result()


def _arguments(batch: Any) -> tuple:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _calls(batch: Any) -> Iterator[tuple]:
    """The arguments of one call after the other."""
    source = iter(batch.repeat()) if isinstance(batch, tf.data.Dataset) else itertools.repeat(batch)
    while True:
        with next_batch():
            arguments = next(source)
        yield _arguments(arguments)


def _trace_calls(step: Callable[..., Any], calls: Iterator[tuple], steps: int) -> Timeline:
    recording = Recording()
    try:
        recording.collect()
        step(*next(calls))
        recording.collected()
        for _ in range(_WARM_STEPS):
            step(*next(calls))
        recording.start()
        for _ in range(steps):
            with recording.step():
                step(*next(calls))
        recording.stop()
    finally:
        recording.close()
    return Timeline.of(recording)


class _Recorder(keras.callbacks.Callback):
    """Records executions of the train function: one with its graphs, `warm` more, then `steps` timed ones.

    An execution is a call of the train function: one step, or steps_per_execution of them.
    """

    def __init__(self, first: int, steps: int, warm: int = 0):
        super().__init__()
        self.first = first
        self.begin = first + warm + 1
        self.last = first + warm + steps
        self.timeline: Timeline | None = None
        self._recording = Recording()
        self._executions = 0
        self._step: Any = None

    def on_train_begin(self, logs=None):
        self._executions = 0
        self._recording.close()  # of an earlier fit that broke off
        self._recording = Recording()

    def on_train_batch_begin(self, batch, logs=None):
        number = self._executions
        if number == self.first:
            self._recording.collect()
        elif self.begin <= number <= self.last:
            if number == self.begin:
                self._recording.start()
            self._step = self._recording.step()
            self._step.__enter__()

    def on_train_batch_end(self, batch, logs=None):
        number = self._executions
        self._executions += 1
        if number == self.first:
            self._recording.collected()
        elif self.begin <= number <= self.last:
            self._step.__exit__(None, None, None)
            if number == self.last:
                self._finish()

    def on_train_end(self, logs=None):
        if self.timeline is None and self._executions > self.begin:  # training ended before the last step
            self._finish()
        self._recording.close()

    def _finish(self):
        self._recording.stop()
        self._recording.close()
        self.timeline = Timeline.of(self._recording)
        self.finished(self.timeline)

    def finished(self, timeline: Timeline) -> None:
        """What to do with the timeline as soon as it is there."""
        model: Any = self.model
        model.stop_training = True

    def result(self) -> Timeline:
        """The timeline, after `fit`."""
        if self.timeline is None:
            raise TraceError(f"training ended after {self._executions} steps; expected {self.begin + 1} to trace one")
        return self.timeline


class TraceSteps(_Recorder):
    """Keras callback that traces steps of a running `fit`, which goes on as if nothing had happened.

        step:  0 … first−1 │ first: its graphs are kept │ first+1 … first+steps: timed │ the rest
               untouched   │        TensorFlow makes a new instance of the step, used until here │ untouched

    For `Trainer.fit` and `keras.Model.fit`. With steps_per_execution a step here is one execution.

    Args:
        directory: new or empty; gets trace.json.gz, report.html and timeline.json while the fit goes on.
        first: the step whose graphs are kept, counted from 0 over the whole fit; at least 1, so that what the first
            step builds is built as always.
        steps: how many steps after it are timed.

    Attributes:
        timeline: the `Timeline`, None until it is there: fewer were timed where training ended early.

    Raises:
        JobError: the directory is not empty.

    Example:
        >>> import keras, numpy as np, tempfile, multitower as mt
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> traced = mt.TraceSteps(tempfile.mkdtemp(), first=3, steps=2)
        >>> x = np.ones([20, 2])
        >>> history = mt.Trainer(model, devices="cpu:1").fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[traced])
        >>> len(traced.timeline.steps)
        2
    """

    def __init__(self, directory: str | Path, *, first: int = 10, steps: int = 3):
        check_count("first", first, 1)
        check_count("steps", steps, 1)
        super().__init__(first, steps)
        self.directory = free_directory(directory)

    def finished(self, timeline: Timeline) -> None:
        timeline.save(self.directory)


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TraceError(f"{name}={value!r}: expected a whole number, {least} or more")
