"""What `multitower trace` does: some steps of a job on towers, traced and written to a directory."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ..device import devices as choose_devices
from ..job import check_job_params, find_job, load_job, make_model
from ..train import load_data
from ..trainer import Trainer
from .report import Timeline, free_directory
from .tracing import trace


@dataclass(frozen=True)
class TracedJob:
    """A timeline and where it was written.

    Attributes:
        timeline: the `Timeline`.
        files: paths by name.
        seconds: of the whole run.
    """

    timeline: Timeline
    files: dict[str, str]
    seconds: float

    def as_json(self) -> str:
        """One line: what `timeline.json` holds, the files and the seconds."""
        return self.timeline.as_json(files=self.files, seconds=self.seconds)


def trace_job(
    job: str,
    devices: Any = None,
    steps: int = 3,
    batch_size: int | None = None,
    params: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
) -> TracedJob:
    """Trace steps of a job's training; the trained model is not kept.

    Args:
        job: name of a built-in job or path of a Python file.
        devices: as `multitower.devices` takes them.
        steps: how many steps are timed.
        batch_size: rows of the global batch; None for the job's own number.
        params: parameters of the job's two functions.
        directory: where to write, new or empty; None for `traces/JOB-DATE-TIME`.
        seed: of Keras' global random state, set before data and model are made.

    Raises:
        MultitowerError: job, parameters, devices, data or directory are unusable.
    """
    start_seconds = time.perf_counter()
    stem = find_job(job).stem
    folder = free_directory(directory or Path("traces") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    names = choose_devices(devices)
    loaded, given = load_job(job), dict(params or {})
    check_job_params(loaded, given)
    keras.utils.set_random_seed(seed)
    train, _ = load_data(loaded, given, batch_size)
    trainer = Trainer(make_model(loaded, given), names)
    how = {} if isinstance(train, tf.data.Dataset) else {"batch_size": batch_size or loaded.batch_size}
    timeline = trace(trainer, train, steps=steps, **how)
    files = timeline.save(folder)
    return TracedJob(timeline, files, time.perf_counter() - start_seconds)
