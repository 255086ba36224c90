"""A copy of the user's training that can be set to a state, trained on chosen rows, and looked at after every step.

- ModelTwin: a copy of a compiled model; keras.Model.fit on one device, or a Trainer's on towers
- StepTwin: a hand-written step; a tf.function on one device, or multitower.replicate's on towers
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..errors import ModelError, MultitowerError, TowerError
from .inventory import Entry, inventory
from .row_batches import dataset, take

Values = list[np.ndarray]
AfterStep = Callable[[int, Values, dict[str, float]], None]


class Twin:
    """A copy of the user's training.

    Args:
        batch: tensors that the batches are taken from.
        roots: what the step uses, see `inventory`.
        towers: a Trainer or Replicated; None for one device.
        device: name of the one device; None for towers.

    Attributes:
        entries: what a step can change; the first step may add to it.
    """

    def __init__(self, batch: Any, roots: Sequence[Any], towers: Any, device: str | None):
        self.batch = batch
        self.roots = roots
        self.towers = towers
        self.entries: list[Entry] = inventory(*roots)
        self._device = device

    def values(self) -> Values:
        """What the entries hold now."""
        return [_numpy(entry.variable) for entry in self.entries]

    def set(self, values: Iterable[np.ndarray]) -> None:
        """Give the entries these values, in order."""
        for entry, value in zip(self.entries, values, strict=True):
            entry.variable.assign(value)

    def copies(self, entry: Entry) -> Values:
        """What the entry holds on each tower."""
        if self.towers is None:
            return [_numpy(entry.variable)]
        return [_numpy(copy) for copy in self.towers.copies(entry.variable)]

    def run(self, start: Values | None, rows: Sequence[np.ndarray], after_step: AfterStep) -> None:
        """Train one step on each of these vectors of row numbers.

        Args:
            start: values of the entries before the first step; None to go on from where the copy is.
            rows: row numbers of the batch of each step.
            after_step: called after each step with its number from 0, the entries' values, and the numbers that the
                step returned, by name.

        Raises:
            ModelError: the training fails on one device.
            TowerError: it fails on towers.
        """
        done = []

        def count(step: int, values: Values, returned: dict[str, float]) -> None:
            done.append(step)
            after_step(step, values, returned)

        try:
            with tf.device(self._device) if self._device else nullcontext():
                self._run(start, rows, count)
        except MultitowerError:
            raise
        except Exception as error:
            raise self._failed(error, len(done), len(rows[min(len(done), len(rows) - 1)])) from error

    def _run(self, start: Values | None, rows: Sequence[np.ndarray], after_step: AfterStep) -> None:
        raise NotImplementedError

    def _failed(self, error: Exception, steps: int, rows: int) -> MultitowerError:
        """The user's training has failed: where, and on which side."""
        told = f"{type(error).__name__}: {_message(error)}"
        place = f"step {steps + 1}, on a batch of {rows} rows"
        if self.towers is not None:
            return TowerError(f"one device can train this, towers fail in {place}: {told}")
        return ModelError(f"one device cannot train this on batches of different sizes, it fails in {place}: {told}")

    def warm_up(self, rows: np.ndarray) -> None:
        """Take one step, which makes the variables that a first step makes, and list everything again."""
        self.run(None, [rows], lambda *_: None)
        self.look()

    def look(self) -> None:
        """List the entries again: something has made variables."""
        self.entries = inventory(*self.roots)


class ModelTwin(Twin):
    """A copy of a compiled model; it belongs to the twin.

    Args:
        model: the copy.
        batch: see `Twin`.
        trainer: a Trainer of the copy; None for one device.
        device: see `Twin`.
    """

    def __init__(self, model: keras.Model, batch: Any, trainer: Any = None, device: str | None = None):
        super().__init__(batch, [model], trainer, device)
        self.model = model

    def _run(self, start: Values | None, rows: Sequence[np.ndarray], after_step: AfterStep) -> None:
        watch = _Watch(self, start, after_step)
        fit: Any = self.model.fit if self.towers is None else self.towers.fit
        fit(dataset(self.batch, rows), epochs=1, shuffle=False, verbose=0, callbacks=[watch])

    def warm_up(self, rows: np.ndarray) -> None:
        super().warm_up(rows)
        self.model.reset_metrics()


class StepTwin(Twin):
    """A hand-written step.

    Args:
        call: the step for one device, or a `Replicated`.
        batch: its arguments, see `Twin`.
        roots: see `Twin`.
        device: see `Twin`.
    """

    def __init__(self, call: Any, batch: Any, roots: Sequence[Any], device: str | None = None):
        super().__init__(batch, roots, call if device is None else None, device)
        self._call = call

    def _run(self, start: Values | None, rows: Sequence[np.ndarray], after_step: AfterStep) -> None:
        if start is not None:
            self.set(start)
        for step, numbers in enumerate(rows):
            results = self._call(*take(self.batch, numbers))
            after_step(step, self.values(), single_numbers(results))


class _Watch(keras.callbacks.Callback):
    """Sets the start, starts the metrics afresh for every step, and hands over what the step left."""

    def __init__(self, twin: ModelTwin, start: Values | None, after_step: AfterStep):
        super().__init__()
        self._twin, self._start, self._after_step = twin, start, after_step
        self._step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self._start is not None:
            self._twin.set(self._start)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._twin.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._after_step(self._step, self._twin.values(), single_numbers(logs))
        self._step += 1


def single_numbers(results: Any) -> dict[str, float]:
    """The single numbers in what a step returned, by name; what has rows is left out."""
    named = [("/".join(map(str, path)) or "result", value) for path, value in keras.tree.flatten_with_path(results)]
    arrays = [(name, np.asarray(value)) for name, value in named if value is not None]
    return {name: float(value) for name, value in arrays if value.ndim == 0 and value.dtype.kind in "fiub"}


def _numpy(variable: Any) -> np.ndarray:
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return np.asarray(value.numpy())


def _message(error: Exception) -> str:
    """The message on one line, without the places in Python that TensorFlow lists in it."""
    lines = [line.strip() for line in str(error).splitlines()]
    listed = ("File ", "Detected at node", "Graph execution error", "[[", "<stack traces")
    return " ".join(line for line in lines if line and not line.startswith(listed))[:400]
