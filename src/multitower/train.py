"""What `multitower train` does: a job on towers, from checks to the saved model and the report.

    job, parameters, run directory -> devices -> data, model -> Trainer.fit -> evaluate -> model.keras, report.json

What costs little to check is checked first, and the devices are chosen before a job's code can start TensorFlow.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from .device import devices as choose_devices
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
from .schedule import scale_learning_rate, scaling_factor
from .throughput import Throughput, rows_by_step
from .trainer import Trainer


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
        scale_lr: the rule by which the job's learning rate was scaled for B: "none", "linear" or "sqrt".
        lr_factor: by how much it was multiplied.
        epochs: epochs trained.
        seconds: of the whole run, start to saved model.
        seed: of Keras' global random state.
        params: parameters given to the job.
        model: file of the trained model, for `keras.models.load_model`.
        run_dir: directory of the run.
        logs: directory of history.csv and report.json.
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
    scale_lr: str
    lr_factor: float
    epochs: int
    seconds: float
    seed: int
    params: dict[str, Any]
    model: str
    run_dir: str
    logs: str

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
    job: str,
    devices: Any = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    params: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    seed: int = 0,
    scale_lr: str = "none",
) -> Report:
    """Train a job and save model, history and report in a new run directory.

    Args:
        job: name of a built-in job or path of a Python file.
        devices: as `multitower.devices` takes them.
        epochs: passes over the training data; None for the job's own number.
        batch_size: rows of the global batch; None for the job's own number.
        params: parameters of the job's two functions.
        run_dir: where to write, new or empty; None for `runs/JOB-DATE-TIME`.
        seed: of Keras' global random state, set before data and model are made.
        scale_lr: "none", "linear" or "sqrt": how the learning rate follows the global batch, from the job's own number
            of rows (`multitower.schedule.scaling_factor`).

    Raises:
        MultitowerError: job, parameters, devices, data or run directory are unusable; training has not begun.

    An error of training itself is passed on with a note that tells what the run directory holds.
    """
    start_seconds = time.perf_counter()
    directory = _free_run_dir(run_dir, find_job(job).stem)
    names = choose_devices(devices)
    loaded, given = load_job(job), dict(params or {})
    check_job_params(loaded, given)
    keras.utils.set_random_seed(seed)
    used = with_batch_size(loaded, given, len(names), batch_size)
    train, validation = load_data(loaded, used, batch_size)
    batch_size = rows if isinstance(rows := used.get("batch_size"), int) else loaded.batch_size
    factor = scaling_factor(scale_lr, batch_size, loaded.batch_size)
    trainer = Trainer(_make_scaled(loaded, used, factor), devices=names)
    callbacks = make_callbacks(loaded, used)
    model, logs = directory / "model.keras", directory / "logs"
    _make(logs)
    with _in_run_dir(directory):
        epochs = epochs or loaded.epochs
        speed, trained = _fit(trainer, train, validation, batch_size, epochs, logs / "history.csv", callbacks)
        metrics = {
            name: trainer.evaluate(**_arguments(part, batch_size), verbose=0, return_dict=True)
            for name, part in (("train", train), ("validation", validation))
        }
        trainer.model.save(model)
        report = Report(
            job=loaded.name,
            accuracy=metrics["validation"].get("accuracy"),
            loss=metrics["validation"].get("loss"),
            metrics=metrics,
            examples_per_second=speed.examples_per_second,
            devices=list(trainer.devices),
            towers=len(trainer.devices),
            batch_size=speed.batch_size or batch_size,
            rows_per_tower=_shares(speed.batch_size or batch_size, len(trainer.devices)),
            scale_lr=scale_lr,
            lr_factor=factor,
            epochs=trained,
            seconds=time.perf_counter() - start_seconds,
            seed=seed,
            params=given,
            model=str(model),
            run_dir=str(directory),
            logs=str(logs),
        )
        (logs / "report.json").write_text(report.as_json() + "\n", encoding="utf-8")
    return report


def _make_scaled(job: Job, params: Mapping[str, Any], factor: float) -> keras.Model:
    """The job's model, its learning rate times a factor."""
    model = make_model(job, params)
    if factor != 1:
        scale_learning_rate(model.optimizer, factor)
    return model


def _free_run_dir(run_dir: str | Path | None, job: str) -> Path:
    """A directory that does not exist or is empty; nothing is created yet, so that a bad job leaves nothing behind."""
    if run_dir is None:
        run_dir = Path("runs") / f"{job}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = Path(run_dir)
    if directory.exists() and not directory.is_dir():
        raise JobError(f"run directory {directory} is a file; give --run-dir a new or empty directory")
    if directory.exists() and any(directory.iterdir()):
        raise JobError(f"run directory {directory} is not empty and is not overwritten; give --run-dir another one")
    return directory


def _make(logs: Path) -> None:
    try:
        logs.mkdir(parents=True)
    except OSError as error:  # no permission, or another run of the same second was faster
        raise JobError(
            f"run directory: {logs} cannot be made ({error.strerror}); give --run-dir another one"
        ) from error


@contextmanager
def _in_run_dir(directory: Path) -> Iterator[None]:
    """Make an error, Ctrl-C too, tell what the run directory holds."""
    try:
        yield
    except BaseException as error:
        files = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
        error.add_note(f"{directory} holds {', '.join(files) or 'no file'}")
        raise


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


def _fit(
    trainer: Trainer,
    train: Any,
    validation: Any,
    batch_size: int,
    epochs: int,
    history: Path,
    callbacks: list[keras.callbacks.Callback],
):
    """Train; the clock of the rows per second, and the number of epochs."""
    if isinstance(train, tf.data.Dataset):
        speed = Throughput()
        train = speed.watched(train)
    else:
        speed = Throughput(rows_by_step(len(keras.tree.flatten(train)[0]), batch_size))
    table = keras.callbacks.CSVLogger(str(history))
    try:
        result = trainer.fit(
            **_arguments(train, batch_size),
            validation_data=tuple(validation) if isinstance(validation, list) else validation,
            epochs=epochs,
            shuffle=not isinstance(train, tf.data.Dataset),  # Keras warns otherwise: a dataset shuffles itself
            callbacks=[speed, table, *callbacks],
            verbose=1 if sys.stdout.isatty() else 2,
        )
    finally:
        if table.csv_file:  # Keras closes it only where training ends well
            table.csv_file.close()
    return speed, len(result.epoch)


def _arguments(part: Any, batch_size: int) -> dict[str, Any]:
    """The arguments of `fit` and `evaluate` for a dataset, which has its own batches, or for arrays."""
    if isinstance(part, tf.data.Dataset):
        return {"x": part}
    return dict(zip(("x", "y", "sample_weight"), part, strict=False)) | {"batch_size": batch_size}


def _shares(batch_size: int, towers: int) -> list[int]:
    """Rows of each tower: B // N, one more for the first B mod N."""
    return [batch_size // towers + (i < batch_size % towers) for i in range(towers)]
