"""One configuration in a process of its own: a Trainer on the job's data, timed. Started by `study`.

    argument: the configuration (JSON)  →  what it is (JSON)  →  a line on standard input  →  what came out (JSON)

The wait in between lets trials side by side be timed at the same moment. Standard output is the channel; what the job
prints goes to standard error.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from ..batches import row_count
from ..device import devices, peak_memory_bytes
from ..errors import BatchError
from ..job import Job, check_job_params, load_job, make_model
from ..train import load_data
from ..trainer import Trainer
from .exchanges import meetings

WINDOWS = 9
_WITHOUT_END = 1_000_000  # epochs, and steps of an epoch: a callback ends the training
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # getrusage: bytes on macOS, KiB on Linux


def main() -> int:
    """Answer as the module says; an error is an answer too, and the exit code 1."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tf.get_logger().setLevel("ERROR")
    try:
        for answer in answers(json.loads(sys.argv[1])):
            print(json.dumps(answer), file=channel, flush=True)
            sys.stdin.readline()
    except Exception as error:
        message = " ".join(str(error).split())
        print(json.dumps({"error": type(error).__name__, "message": message[:500]}), file=channel, flush=True)
        return 1
    return 0


def answers(wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Make and warm up the training, then time it; see `study.configuration` for what is wanted."""
    names = devices(wanted["devices"])
    job = load_job(wanted["job"])
    check_job_params(job, wanted["params"])
    keras.utils.set_random_seed(wanted["seed"])
    data = Data(job, wanted["params"], wanted["batch_size"], wanted["times"])
    began = time.perf_counter()
    trainer = Trainer(
        make_model(job, wanted["params"]), names, placement=wanted["placement"], reduce=wanted["reduce"]
    )
    _fit(trainer, data.repeated, Windows(1, seconds=0))
    first_step_seconds = time.perf_counter() - began
    _fit(trainer, data.repeated, Windows(3, seconds=0))
    yield {"names": names, "batch_size": data.batch_size, "first_step_seconds": first_step_seconds}

    window_seconds = wanted["seconds"] / WINDOWS
    own, removed = Windows(WINDOWS + 1, window_seconds), Windows(WINDOWS + 1, window_seconds)
    _fit(trainer, data.own, own)
    if wanted["remove_input"]:
        _fit(trainer, data.repeated, removed)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES
    together = len(names) > 1
    met, met_bytes = meetings(trainer.graphs[-1], -(-data.batch_size // len(names))) if together else (None, None)
    yield {
        "rates": own.rates(data.batch_size),
        "removed_rates": removed.rates(data.batch_size),
        "meetings": met,
        "meeting_bytes": met_bytes,
        "peak_bytes": {**peak_memory_bytes(names), "process": resident},
    }


def _fit(trainer: Trainer, arguments: dict[str, Any], windows: "Windows") -> None:
    trainer.fit(**arguments, epochs=_WITHOUT_END, callbacks=[windows], verbose=0)


class Windows(keras.callbacks.Callback):
    """Times stretches of training, and ends it after enough of them; what is between epochs is left out.

    Args:
        count: windows until the training ends.
        seconds: of a window, at least; each has at least one execution.
    """

    def __init__(self, count: int, seconds: float):
        super().__init__()
        self._count, self._seconds = count, seconds
        self._done: list[tuple[int, float]] = []
        self._steps, self._before, self._last_batch, self._start_seconds = 0, 0.0, -1, 0.0

    def rates(self, rows: int) -> list[float]:
        """Rows per second in each window; the first one, in which pipelines fill up, is left out."""
        return [steps * rows / seconds for steps, seconds in self._done[1:]]

    def on_epoch_begin(self, epoch, logs=None):
        self._last_batch, self._start_seconds = -1, time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._steps += batch - self._last_batch
        self._last_batch = batch
        if self._before + time.perf_counter() - self._start_seconds < self._seconds:
            return
        for value in (logs or {}).values():
            np.asarray(value)  # synchronises: a GPU may still be computing the step
        now = time.perf_counter()
        self._done.append((self._steps, self._before + now - self._start_seconds))
        self._steps, self._before, self._start_seconds = 0, 0.0, now
        if len(self._done) == self._count:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self._before += time.perf_counter() - self._start_seconds


class Data:
    """The training data of a job in batches of B rows, and one of these batches again and again.

    Args:
        job: the job.
        params: parameters of its functions.
        batch_size: rows of the batch of one device; None for the job's own number.
        times: B is as many times that.

    Attributes:
        batch_size: B.
        own: arguments of fit for the data as the job gives them; batches of fewer rows are left out.
        repeated: arguments of fit for the first batch, from memory.

    Raises:
        BatchError: the job has less than one batch.
        JobError: it has a dataset whose batches cannot be made larger.
    """

    def __init__(self, job: Job, params: dict[str, Any], batch_size: int | None, times: int):
        asked = (batch_size or job.batch_size) * times
        train, _ = load_data(job, params, asked if batch_size or times > 1 else None)
        if isinstance(train, tf.data.Dataset):
            first = next(iter(train))
            self.batch_size = int(_rows(first))
            self.own = {"x": train.filter(lambda *batch: _rows(batch) == self.batch_size), "shuffle": False}
        else:
            self.batch_size = asked
            self.own = {**_cut(train, _whole_batches(train, asked)), "batch_size": asked}
            first = tuple(_cut(train, asked).values())
        batches = tf.data.Dataset.from_tensors(first).repeat()
        self.repeated = {"x": batches, "steps_per_epoch": _WITHOUT_END, "shuffle": False}


def _rows(batch: Any) -> Any:
    return tf.cast(row_count(tf.nest.flatten(batch)[0]), tf.int64)


def _whole_batches(arrays: Any, batch_size: int) -> int:
    """Rows of all whole batches."""
    rows = len(keras.tree.flatten(arrays)[0])
    if rows < batch_size:
        raise BatchError(f"a global batch of {batch_size} rows, and the job has {rows} to train on; give fewer devices")
    return rows // batch_size * batch_size


def _cut(arrays: Any, rows: int) -> dict[str, Any]:
    """The first rows of arrays, by the names that fit has for them."""
    present = {k: a for k, a in zip(("x", "y", "sample_weight"), arrays, strict=False) if a is not None}
    return {name: keras.tree.map_structure(lambda a: a[:rows], part) for name, part in present.items()}


if __name__ == "__main__":
    sys.exit(main())
