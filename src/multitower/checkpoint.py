"""A training run saved so that it can go on: on as many devices as there are then, as if it had never stopped.

    weights, batch statistics, seeds of layers     model.variables
    slots, iterations, averages, accumulators      optimizer.variables, loss scale included
    state of metrics                               model.metrics_variables
    Keras' global seed
    position in the data                           (epoch, batch)

All of it is taken from `trainer.model`, whose variables are those of tower 0, so nothing of N, of the placement or of
the reduction gets into the file. The tensors are written by tf.train.Checkpoint; `storage` makes that atomic.
"""

import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from . import storage, upstream
from .errors import CheckpointError, StoppedError
from .stopping import stop_requests

__all__ = ["Checkpoints", "Position", "latest", "restore", "save", "stop_requests"]

_VARIABLES = "variables"


@dataclass(frozen=True)
class Position:
    """Where training goes on.

    Attributes:
        epoch: number of the epoch, from 0: `initial_epoch` of `fit`.
        batch: batches of that epoch that have been trained.
        step: updates made so far.
    """

    epoch: int
    batch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, batch {self.batch + 1}"


def latest(directory: str | Path) -> Path | None:
    """The newest checkpoint of a directory, whether it can be used or not; None where there is none."""
    found = storage.checkpoints(Path(directory))
    return found[-1] if found else None


def save(trainer, directory: str | Path, *, epoch: int = 0, batch: int = 0, keep: int | None = 3) -> Path:
    """Save all that the next step depends on as a new checkpoint: whole, or not at all.

    Args:
        trainer: a `multitower.Trainer`.
        directory: where the checkpoints are.
        epoch: the epoch in which training is to go on: after the first epoch, 1.
        batch: batches of that epoch that have been trained.
        keep: how many checkpoints are kept, the newest; None for all.

    Returns:
        The path of the checkpoint, a directory.

    Raises:
        CheckpointError: the model has no variables yet; its towers are independent, so that one of them is not all.
        OSError: it could not be written, the disk being full for example. Those before it are as they were.

    Example:
        >>> trainer.fit(x, y)
        >>> multitower.checkpoint.save(trainer, "checkpoints", epoch=1)
        >>> position = multitower.checkpoint.restore(trainer, "checkpoints")
        >>> trainer.fit(x, y, initial_epoch=position.epoch, epochs=5)
    """
    _check_keep(keep)
    _refuse_independent(trainer)
    _refuse_unbuilt(trainer.model)
    directory = Path(directory)
    groups = _variables(trainer.model)
    position = Position(epoch, batch, _steps(trainer.model))
    manifest = {"position": asdict(position), "variables": _described(groups)}
    try:
        with storage.written(directory, f"epoch-{epoch}-batch-{batch}", manifest) as (unfinished, path):
            tensors = {name: [v.value for v in variables] for name, variables in groups.items()}
            tf.train.Checkpoint(**tensors).write(str(unfinished / _VARIABLES))
        if keep is not None:
            storage.keep_last(directory, keep)
    except (OSError, tf.errors.OpError) as error:
        before = latest(directory)
        reason = " ".join(str(getattr(error, "message", error)).split())
        raise OSError(
            f"checkpoint of {position} could not be written to {directory} ({reason}); "
            f"the last one is {before.name if before else 'none'}"
        ) from error
    return path


def restore(trainer, directory: str | Path, *, batch: Any = None, allow_older: bool = False) -> Position:
    """Bring a model, its optimizer and its metrics to what they were; the next `fit` goes on from there.

    A `fit` that begins with the epoch of the checkpoint passes over the batches that have been trained already:
    callbacks see them once more, with the metrics of the checkpoint, and nothing is computed. That is exact where the
    data come in the same order again: with shuffle=False, or from a tf.data.Dataset that has an order of its own.

    Args:
        trainer: a `multitower.Trainer` of the same model and optimizer, on any number of devices.
        directory: a directory of checkpoints, of which the newest is taken, or one checkpoint.
        batch: one batch (x, y) of data, needed only where the model or its metrics have not been built yet.
        allow_older: take the newest one that can be used where the newest cannot.

    Returns:
        Where training goes on.

    Raises:
        CheckpointError: there is none; the newest is damaged, or of another model: says what is wrong with it.
    """
    _refuse_independent(trainer)
    _build(trainer, batch)
    groups = _variables(trainer.model)
    path, manifest = _usable(Path(directory), groups, allow_older)
    _read(path, manifest, groups)
    position = Position(**manifest["position"])
    trainer.start_at(position.epoch, position.batch)
    return position


def _usable(directory: Path, groups, allow_older: bool) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that is whole and of this model, and its manifest."""
    found = [directory] if storage.is_checkpoint(directory) else storage.checkpoints(directory)
    if not found:
        raise CheckpointError(f"{directory} holds no checkpoint")
    problems = []
    for path, older in zip(reversed(found), [*reversed(found[:-1]), None], strict=True):
        try:
            return path, _checked(path, groups)
        except CheckpointError as error:
            problems.append(str(error))
            if not allow_older:
                raise CheckpointError(f"{error}{_offer(older)}") from None
        warnings.warn(f"{problems[-1]}; an older one is used", stacklevel=3)
    raise CheckpointError(f"no checkpoint of {directory} can be used: {'; '.join(problems)}")


def _offer(older: Path | None) -> str:
    if older is None:
        return ""
    return f"; the one before it is {older.name}, used only with --allow-older, in Python allow_older=True"


def _checked(path: Path, groups) -> dict[str, Any]:
    manifest = storage.checked(path)
    expected, got = _described(groups), manifest["variables"]
    at_epoch_end = manifest["position"]["batch"] == 0
    for group in sorted({*expected, *got}):
        if group == "metrics" and at_epoch_end:  # an epoch begins with metrics set back
            continue
        _compare(path, group, got.get(group, []), expected.get(group, []))
    return manifest


def _compare(path: Path, group: str, got, expected) -> None:
    for i in range(max(len(got), len(expected))):
        there, here = (list_[i] if i < len(list_) else None for list_ in (got, expected))
        if there is None or here is None or _comparable(there) != _comparable(here):
            raise CheckpointError(
                f"checkpoint {path} is of another model: variable {i} of {group} is {_told(there)} in it and "
                f"{_told(here)} here"
            )


def _comparable(variable):
    """Path, shape and dtype; without the numbers Keras gives to names, which depend on what was made before."""
    return re.sub(r"_\d+(?=/|_|$)", "", variable[0]), variable[1], variable[2]


def _told(variable) -> str:
    return "missing" if variable is None else f"{variable[0]} {tuple(variable[1])} {variable[2]}"


def _read(path: Path, manifest, groups) -> None:
    """Assign the values of the file; Python's assignments are what the towers' copies follow."""
    reader = tf.train.load_checkpoint(str(path / _VARIABLES))
    for group, variables in groups.items():
        if len(variables) != len(manifest["variables"].get(group, [])):
            continue  # metrics at the end of an epoch, see _checked
        for i, variable in enumerate(variables):
            variable.assign(reader.get_tensor(f"{group}/{i}/.ATTRIBUTES/VARIABLE_VALUE"))


def _variables(model) -> dict[str, list[Any]]:
    """Keras variables in groups, each once, in an order that depends on the model alone."""
    groups = {
        "model": model.variables,
        **{name: optimizer.variables for name, optimizer in _optimizers(model).items()},
        "metrics": model.metrics_variables,
        "seed": [upstream.global_seed_generator().state],
    }
    seen: set[int] = set()
    return {name: [v for v in variables if _is_new(v, seen)] for name, variables in groups.items()}


def _is_new(variable, seen: set[int]) -> bool:
    new = id(variable) not in seen
    seen.add(id(variable))
    return new


def _optimizers(model) -> dict[str, keras.Optimizer]:
    """The optimizer the model was compiled with, and others it has as attributes (a GAN's two)."""
    return {name: value for name, value in sorted(vars(model).items()) if isinstance(value, keras.Optimizer)}


def _described(groups) -> dict[str, list[Any]]:
    return {name: [[v.path, list(v.shape), v.dtype] for v in variables] for name, variables in groups.items()}


def _steps(model) -> int:
    return int(model.optimizer.iterations.numpy()) if model.optimizer is not None else 0


def _build(trainer, batch) -> None:
    """Make what the first step would make: weights, slots, metrics."""
    if batch is not None:
        trainer.test_on_batch(*batch)
        trainer.model.reset_metrics()
    _refuse_unbuilt(trainer.model)
    for optimizer in _optimizers(trainer.model).values():
        if not optimizer.built:
            optimizer.build(trainer.model.trainable_variables)


def _refuse_unbuilt(model) -> None:
    if not model.built:
        raise CheckpointError(
            f"model {model.name!r} has no variables yet; train a batch first, or give restore one: batch=(x, y)"
        )


def _refuse_independent(trainer) -> None:
    if trainer.placement == "independent":
        raise CheckpointError(
            "placement='independent' trains another model on every tower, and a checkpoint holds one; "
            "use 'replicated' or 'shared'"
        )


def _check_keep(keep) -> None:
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep}: expected the number of checkpoints to keep, 1 or more, or None for all")


class Checkpoints(keras.callbacks.Callback):
    """Keras callback that saves a checkpoint every so many epochs and steps, and where a stop is asked for.

    Give it to `fit` behind callbacks that write what belongs to an epoch (a table, say): that is on the disk first.

    Args:
        trainer: the `multitower.Trainer` whose `fit` it is given to.
        directory: where the checkpoints are; one run at a time writes there.
        every_epochs: epochs from one checkpoint to the next; None for none at the end of epochs.
        every_steps: steps from one to the next, also in the middle of an epoch; None for none there.
        keep: how many are kept, the newest; None for all.
        stop: a `Stop` of `stop_requests`: where it was asked for, the step is finished, a checkpoint is saved and
            `StoppedError` raised.

    Raises:
        CheckpointError: from `fit`: another run writes there, or see `save`.

    Example:
        >>> with multitower.checkpoint.stop_requests() as stop:
        ...     saving = multitower.checkpoint.Checkpoints(trainer, "checkpoints", every_steps=1000, stop=stop)
        ...     trainer.fit(dataset, epochs=90, callbacks=[saving])
    """

    def __init__(self, trainer, directory, *, every_epochs=1, every_steps=None, keep=3, stop=None):
        super().__init__()
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None and value < 1:
                raise CheckpointError(f"{name}={value}: expected 1 or more, or None")
        _check_keep(keep)
        self._trainer, self._directory, self._keep, self._stop = trainer, Path(directory), keep, stop
        self._every_epochs, self._every_steps = every_epochs, every_steps
        self._lock = None
        self._epoch: int | None = None
        self._first = self._done = self._unsaved = 0
        self.path: Path | None = None

    def on_train_begin(self, logs=None):
        _refuse_independent(self._trainer)
        self.close()
        self._lock = storage.Lock(self._directory)
        storage.sweep(self._directory)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._done = self._first = self._trainer.first_batch(epoch)

    def on_train_batch_end(self, batch, logs=None):
        if batch < self._first:
            return
        self._unsaved += batch + 1 - self._done
        self._done = batch + 1
        if self._stop_signal:
            self._save_and_stop()
        elif self._every_steps is not None and self._unsaved >= self._every_steps:
            self._save(self._epoch, self._done)

    def on_test_batch_end(self, batch, logs=None):
        if self._epoch is not None and self._stop_signal:  # not for an evaluation after training
            self._save_and_stop()

    def on_epoch_end(self, epoch, logs=None):
        self._epoch, self._done = epoch + 1, 0
        if self._stop_signal:
            self._save_and_stop()
        elif self._every_epochs is not None and (epoch + 1) % self._every_epochs == 0:
            self._save(epoch + 1, 0)

    def on_train_end(self, logs=None):
        self.close()

    def close(self):
        """Let others write to the directory; `fit` does it, unless it ends with an error."""
        self._epoch = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def _stop_signal(self):
        return self._stop.signal if self._stop is not None else None

    def _save(self, epoch, batch):
        self.path = save(self._trainer, self._directory, epoch=epoch, batch=batch, keep=self._keep)
        self._unsaved = 0

    def _save_and_stop(self):
        self._save(self._epoch, self._done)
        self.close()
        raise StoppedError(f"stopped by {self._stop_signal}, saved in {self.path}")
