"""What `multitower train` does: a job on towers, from checks to the saved model and the report.

    job, parameters, run directory -> devices -> data, model (-> checkpoint) -> Trainer.fit, which saves checkpoints
    -> evaluate -> model.keras, report.json

What costs little to check is checked first, and the devices are chosen before a job's code can start TensorFlow.
"""

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from .checkpoint import Checkpoints, latest, restore
from .device import devices as choose_devices
from .epochs import Epochs
from .errors import JobError
from .job import (
    Job,
    check_job_params,
    find_job,
    load_job,
    make_callbacks,
    make_data,
    make_model,
    with_batch_size,
)
from .parameters import accepts
from .placement import variables_device
from .run_directory import RunDirectory, Settings, resumed
from .schedule import scale_learning_rate, scaling_factor
from .stopping import stop_requests
from .summaries import Summaries, Table, draw_curves
from .throughput import Throughput, rows_by_step
from .trainer import Trainer


@dataclass(frozen=True)
class Saving:
    """How often a run saves a checkpoint, and how many it keeps: arguments of `checkpoint.Checkpoints`."""

    every_epochs: int | None = 1
    every_steps: int | None = None
    keep: int | None = 3


@dataclass(frozen=True)
class Report:
    """What came out of a run; `as_json` is what `--json` prints and `logs/report.json` holds.

    Attributes:
        job: its name.
        accuracy: on the validation data; None where the model has no metric of that name.
        loss: on the validation data.
        metrics: every metric after training, of "train" and "validation".
        examples_per_second: rows trained per second, first execution and validation left out; None for a single one.
        devices: device of each tower.
        towers: N.
        batch_size: B, rows of the global batch.
        rows_per_tower: rows of each tower in a full batch.
        placement: where variables lived.
        reduce: how towers met.
        scale_lr: the rule by which the job's learning rate was scaled for B: "none", "linear" or "sqrt".
        lr_factor: by how much it was multiplied.
        epochs: epochs trained, those before the run went on included.
        first_epoch: number of the epoch, from 0, that training began with; not 0 for a run that goes on.
        seconds: of the whole run, start to saved model.
        seed: of Keras' global random state.
        params: parameters given to the job.
        checkpoints: directory of the checkpoints that are kept.
        model: file of the trained model, for `keras.models.load_model`.
        run_dir: directory of the run.
        logs: directory of history.csv, tensorboard and report.json.
        curves: picture of what history.csv holds; None where matplotlib is not installed.
    """

    job: str
    accuracy: float | None
    loss: float | None
    metrics: dict[str, dict[str, Any]]
    examples_per_second: float | None
    devices: list[str]
    towers: int
    batch_size: int
    rows_per_tower: list[int]
    placement: str
    reduce: str
    scale_lr: str
    lr_factor: float
    epochs: int
    first_epoch: int
    seconds: float
    seed: int
    params: dict[str, Any]
    checkpoints: str
    model: str
    run_dir: str
    logs: str
    curves: str | None

    def as_json(self) -> str:
        """One line of JSON; numbers that are not finite are null."""
        return json.dumps(_finite(asdict(self)), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run(
    job: str | None = None,
    devices: Any = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    params: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    seed: int | None = None,
    *,
    scale_lr: str | None = None,
    placement: str = "auto",
    reduce: str = "auto",
    resume: str | Path | None = None,
    allow_older: bool = False,
    saving: Saving = Saving(),
    evaluate_on: str = "all",
    gradient_norms: bool = False,
) -> Report:
    """Train a job and save model, history and report in a run directory, a new one or that of a run that goes on.

    Args:
        job: name of a built-in job or path of a Python file; None for `digits`, or for the job of the run that goes on.
        devices: as `multitower.devices` takes them; a run can go on on others.
        epochs: passes over the training data; None for the job's own number.
        batch_size: rows of the global batch; None for the job's own number.
        params: parameters of the job's two functions.
        run_dir: where to write, new or empty; None for `runs/JOB-DATE-TIME`.
        seed: of Keras' global random state, set before data and model are made, and of the order of arrays; None for 0.
        scale_lr: "none", "linear" or "sqrt": how the learning rate follows the global batch, from the job's own number
            of rows (`multitower.schedule.scaling_factor`); None for "none".
        placement: as `multitower.Trainer` takes it, "independent" apart.
        reduce: as `multitower.Trainer` takes it.
        resume: the directory of a run to go on with, from its newest checkpoint.
        allow_older: go on from the newest checkpoint that can be used, if the newest cannot.
        saving: how often checkpoints are saved and how many are kept.
        evaluate_on: "all" devices or "one".
        gradient_norms: whether the norms of gradients go into the summaries.

    Raises:
        MultitowerError: job, parameters, devices, data, run directory or checkpoint are unusable; training has not
            begun.
        StoppedError: SIGTERM or SIGINT came while training, and a checkpoint has been saved.

    An error of training itself is passed on with a note that tells what the run directory holds.
    """
    start_seconds = time.perf_counter()
    asked = Settings(job or "", dict(params or {}), batch_size, seed or 0, epochs, scale_lr)
    directory, settings = _directory(asked, run_dir, seed, resume)
    ready = _prepare(settings, choose_devices(devices), placement, reduce, evaluate_on)
    if resume is None:
        directory.make()
        directory.keep(ready.settings)
    with directory.in_use():
        first = 0 if resume is None else _restored(ready, directory, allow_older)
        directory.keep(ready.settings)
        speed, trained = _Fitting(ready, directory, first, saving, gradient_norms).fit()
        metrics = {
            name: ready.trainer.evaluate(**_arguments(part, ready.batch_size), verbose=0, return_dict=True)
            for name, part in (("train", ready.train), ("validation", ready.validation))
        }
        ready.trainer.model.save(directory.model)
        seconds = time.perf_counter() - start_seconds
        report = _report(ready, directory, metrics, speed, epochs=trained, first_epoch=first, seconds=seconds)
        directory.report.write_text(report.as_json() + "\n", encoding="utf-8")
    return report


@dataclass(frozen=True)
class _Ready:
    """Everything a run needs before its first step; nothing has been written yet."""

    job: Job
    settings: Settings
    trainer: Trainer
    train: Any
    validation: Any
    callbacks: list[keras.callbacks.Callback]
    batch_size: int
    lr_factor: float


def _prepare(settings: Settings, names: list[str], placement: str, reduce: str, evaluate_on: str) -> _Ready:
    if placement == "independent":
        raise JobError(
            "placement='independent' trains no model: towers do not meet; expected 'replicated', 'shared' or 'auto' "
            "(`multitower measure` uses it as an upper bound)"
        )
    job = load_job(settings.job)
    check_job_params(job, settings.params)
    keras.utils.set_random_seed(settings.seed)
    used = with_batch_size(job, settings.params, len(names), settings.batch_size)
    train, validation = load_data(job, used, settings.batch_size)
    batch_size = rows if isinstance(rows := used.get("batch_size"), int) else job.batch_size
    factor = scaling_factor(settings.scale_lr or "none", batch_size, job.batch_size)
    with _beside(placement):
        model = _make_scaled(job, used, factor)
    trainer = Trainer(model, devices=names, placement=placement, reduce=reduce, evaluate_on=evaluate_on)
    settings = replace(settings, epochs=settings.epochs or job.epochs)
    if job.per_tower:  # a run that goes on on other devices keeps its global batch
        settings = replace(settings, batch_size=batch_size)
    return _Ready(job, settings, trainer, train, validation, make_callbacks(job, used), batch_size, factor)


def _report(ready: _Ready, directory: RunDirectory, metrics: dict, speed: Throughput, **known: Any) -> Report:
    trainer, batch_size = ready.trainer, speed.batch_size or ready.batch_size
    return Report(
        job=ready.job.name,
        accuracy=metrics["validation"].get("accuracy"),
        loss=metrics["validation"].get("loss"),
        metrics=metrics,
        examples_per_second=speed.examples_per_second,
        devices=list(trainer.devices),
        towers=len(trainer.devices),
        batch_size=batch_size,
        rows_per_tower=_shares(batch_size, len(trainer.devices)),
        placement=trainer.placement,
        reduce=trainer.reduce,
        scale_lr=ready.settings.scale_lr or "none",
        lr_factor=ready.lr_factor,
        seed=ready.settings.seed,
        params=dict(ready.settings.params),
        checkpoints=str(directory.checkpoints),
        model=str(directory.model),
        run_dir=str(directory.path),
        logs=str(directory.logs),
        curves=draw_curves(directory.history, directory.logs / "curves.png"),
        **known,
    )


def _beside(placement: str):
    """The device that "shared:DEVICE" names as that of the variables made in here."""
    device = variables_device(placement)
    return tf.device(device) if device else nullcontext()


def _make_scaled(job: Job, params: Mapping[str, Any], factor: float) -> keras.Model:
    """The job's model, its learning rate times a factor."""
    model = make_model(job, params)
    if factor != 1:
        scale_learning_rate(model.optimizer, factor)
    return model


def _directory(asked: Settings, run_dir, seed: int | None, resume) -> tuple[RunDirectory, Settings]:
    """The run's directory, and what it is to do."""
    if resume is None:
        job = asked.job or "digits"
        return RunDirectory.new(run_dir, find_job(job).stem), replace(asked, job=job)
    if run_dir is not None:
        raise JobError("--resume and --run-dir: a run goes on in its own directory; leave --run-dir out")
    directory = RunDirectory.of_a_run(resume)
    kept, source = directory.kept()
    settings = resumed(kept, asked, seed)
    if settings.source != source:
        print(f"the file of job {settings.job} has changed since the run began")
    return directory, settings


def _restored(ready: _Ready, directory: RunDirectory, allow_older: bool) -> int:
    """Bring the model to the checkpoint the run goes on from; the number of the epoch in which it does."""
    if latest(directory.checkpoints) is None:
        print("the run was stopped before its first checkpoint: it begins again")
        return 0
    data = ready.validation
    batches = data if isinstance(data, tf.data.Dataset) else Epochs(data, ready.batch_size).dataset
    batch = next(iter(batches))
    batch = batch if isinstance(batch, tuple) else (batch,)
    position = restore(ready.trainer, directory.checkpoints, batch=batch, allow_older=allow_older)
    trained, wanted = position.epoch, ready.settings.epochs or 0
    if trained > wanted or (trained == wanted and directory.report.is_file()):
        raise JobError(f"the run in {directory.path} has trained {trained} epochs; give --epochs more than that")
    print(f"going on at {position} of {wanted} epochs, after {position.step} steps")
    return position.epoch


def load_data(job: Job, params: Mapping[str, Any], batch_size: int | None) -> tuple[Any, Any]:
    """The job's data; a batch size goes to a `load_data` that accepts one, as a dataset's batches are its own."""
    takes_batch_size = accepts(job.load_data, "batch_size")
    if batch_size and takes_batch_size:
        params = {**params, "batch_size": batch_size}
    train, validation = make_data(job, params)
    if batch_size and not takes_batch_size and isinstance(train, tf.data.Dataset):
        raise JobError(
            f"--batch-size {batch_size}: job {job.name} loads a tf.data.Dataset of batches and its load_data has no "
            "parameter batch_size; add that parameter, or leave --batch-size out"
        )
    return train, validation


class _Fitting:
    """`Trainer.fit` with what a run of `multitower train` has around it."""

    def __init__(self, ready: _Ready, directory: RunDirectory, first: int, saving: Saving, norms: bool):
        self._ready, self._directory, self._first = ready, directory, first
        self._saving, self._norms = saving, norms

    def fit(self) -> tuple[Throughput, int]:
        """Train; the clock of the rows per second, and the number of epochs trained in all."""
        ready, train, validation = self._ready, self._ready.train, self._ready.validation
        data = Epochs(train, ready.batch_size, ready.settings.seed, self._first)
        rows = None if isinstance(train, tf.data.Dataset) else rows_by_step(_length(train), ready.batch_size)
        speed = Throughput(rows, first_batch=ready.trainer.first_batch)
        summaries = Summaries(
            ready.trainer, self._directory.logs / "tensorboard", every_steps=100, gradients=self._norms, speed=speed
        )
        table = Table(self._directory.history, self._first)
        progress = keras.callbacks.ProgbarLogger()  # before what adds to the logs: lines stay short
        with stop_requests() as stop, closing(summaries):
            saving = Checkpoints(ready.trainer, self._directory.checkpoints, stop=stop, **asdict(self._saving))
            with closing(saving):
                result = ready.trainer.fit(
                    speed.watched(data.dataset) if rows is None else data.dataset,
                    validation_data=tuple(validation) if isinstance(validation, list) else validation,
                    validation_batch_size=None if isinstance(validation, tf.data.Dataset) else ready.batch_size,
                    initial_epoch=self._first,
                    epochs=ready.settings.epochs,
                    shuffle=False,  # `data` does it
                    callbacks=[data, speed, progress, summaries, table, saving, *ready.callbacks],
                    verbose=1 if sys.stdout.isatty() else 2,
                )
        return speed, self._first + len(result.epoch)


def _length(arrays: Any) -> int:
    return int(next(leaf.shape[0] for leaf in keras.tree.flatten(arrays) if leaf is not None))


def _arguments(part: Any, batch_size: int) -> dict[str, Any]:
    """The arguments of `fit` and `evaluate` for a dataset, which has its own batches, or for arrays."""
    if isinstance(part, tf.data.Dataset):
        return {"x": part}
    return dict(zip(("x", "y", "sample_weight"), part, strict=False)) | {"batch_size": batch_size}


def _shares(batch_size: int, towers: int) -> list[int]:
    """Rows of each tower: B // N, one more for the first B mod N."""
    return [batch_size // towers + (i < batch_size % towers) for i in range(towers)]
