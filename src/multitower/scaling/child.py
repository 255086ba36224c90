"""One configuration in a process of its own: a Trainer on the job's data, timed. Started by `study`.

    argument: the configuration (JSON)  →  what it is (JSON)
    a line on standard input            →  what came out of a round (JSON)      … until standard input is closed

The waits in between let configurations take turns, and trials side by side be timed at the same moment. Standard output
is the channel; what the job prints goes to standard error.
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
from ..job import Job, check_job_params, load_job, make_model, with_batch_size
from ..train import load_data
from ..trainer import Trainer
from .exchanges import meetings

WINDOWS = 3  # of a round, with the own input and without it each
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
            if not sys.stdin.readline():
                break
    except Exception as error:
        message = " ".join(str(error).split())
        print(json.dumps({"error": type(error).__name__, "message": message[:500]}), file=channel, flush=True)
        return 1
    return 0


def answers(wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Make and warm up the training, then time it, round after round; `study._Runner` says what is wanted."""
    names = devices(wanted["devices"])
    job = load_job(wanted["job"])
    check_job_params(job, wanted["params"])
    keras.utils.set_random_seed(wanted["seed"])
    data = Data(job, wanted["params"], wanted["batch_size"], wanted["times"])
    began = time.perf_counter()
    trainer = Trainer(make_model(job, data.params), names, placement=wanted["placement"], reduce=wanted["reduce"])
    warm_up = data.repeated | {"epochs": 1, "verbose": 0}
    trainer.fit(**warm_up | {"steps_per_epoch": 1})
    first_step_seconds = time.perf_counter() - began
    trainer.fit(**warm_up | {"steps_per_epoch": 3})
    shard_rows = -(-data.batch_size // len(names))
    met, met_bytes = meetings(trainer.graphs[-1], shard_rows) if len(names) > 1 else (None, None)
    yield {
        "names": names,
        "placement_used": trainer.placement,
        "reduce_used": trainer.reduce,
        "batch_size": data.batch_size,
        "first_step_seconds": first_step_seconds,
        "meetings": met,
        "meeting_bytes": met_bytes,
    }
    while True:
        rates = {"rates": data.own, "removed_rates": data.repeated if wanted["remove_input"] else None}
        yield {
            **{name: _rates(trainer, data, arguments, wanted["seconds"]) for name, arguments in rates.items()},
            "peak_bytes": {**peak_memory_bytes(names), "process": _resident_bytes()},
        }


def _rates(trainer: Trainer, data: "Data", arguments: dict[str, Any] | None, seconds: float) -> list[float]:
    """Rows per second in the windows of a round; none where there are no arguments for fit."""
    if arguments is None:
        return []
    windows = Windows(WINDOWS + 1, seconds / WINDOWS)
    trainer.fit(**arguments, epochs=_WITHOUT_END, callbacks=[windows], verbose=0)
    return windows.rates(data.batch_size)[:WINDOWS]


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES


class Windows(keras.callbacks.Callback):
    """Times stretches of training, and ends it after enough of them.

    What is between epochs is left out, and so is the first execution of an epoch that has more: it waits for the
    dataset to be set up again.

    Args:
        count: windows until the training ends.
        seconds: of a window, at least; each has at least one execution.
    """

    def __init__(self, count: int, seconds: float):
        super().__init__()
        self._count, self._seconds = count, seconds
        self._done: list[tuple[int, float]] = []
        self._steps, self._used = 0, 0.0  # of the window that is open
        self._batches, self._first = 0, (0, 0.0)  # of the epoch; steps and seconds of its first execution
        self._start_seconds = 0.0

    def rates(self, rows: int) -> list[float]:
        """Rows per second in each window; the first one, in which pipelines fill up, is left out."""
        return [steps * rows / seconds for steps, seconds in self._done[1:]]

    def on_epoch_begin(self, epoch, logs=None):
        self._batches, self._start_seconds = 0, time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        steps, self._batches = batch + 1 - self._batches, batch + 1
        if steps == self._batches:
            self._first = steps, self._seconds_since(logs)
            return
        self._steps += steps
        if self._used + time.perf_counter() - self._start_seconds >= self._seconds:
            self._used += self._seconds_since(logs)
            self._close()

    def on_epoch_end(self, epoch, logs=None):
        self._used += time.perf_counter() - self._start_seconds
        if self._batches == self._first[0]:
            self._steps, self._used = self._steps + self._first[0], self._used + self._first[1]
        if self._steps and self._used >= self._seconds:
            self._close()

    def _seconds_since(self, logs):
        """Seconds on the clock, which starts anew. Synchronises: a GPU may still be computing the step."""
        for value in (logs or {}).values():
            np.asarray(value)
        now, start = time.perf_counter(), self._start_seconds
        self._start_seconds = now
        return now - start

    def _close(self):
        self._done.append((self._steps, self._used))
        self._steps, self._used = 0, 0.0
        if len(self._done) >= self._count and self.model is not None:
            self.model.stop_training = True


class Data:
    """The training data of a job in batches of B rows, and one of these batches again and again.

    Args:
        job: the job.
        params: parameters of its functions.
        batch_size: rows of the batch of one device; None for the job's own number.
        times: B is as many times that.

    Attributes:
        batch_size: B.
        params: parameters of the job's functions, with B where it is told.
        own: arguments of fit for the data as the job gives them; batches of fewer rows are left out.
        repeated: arguments of fit for the first batch, from memory.

    Raises:
        BatchError: the job has less than one batch.
        JobError: it has a dataset whose batches cannot be made larger.
    """

    def __init__(self, job: Job, params: dict[str, Any], batch_size: int | None, times: int):
        asked = (batch_size or params.get("batch_size") or job.batch_size) * times
        explicit = asked if batch_size or times > 1 else None
        self.params = with_batch_size(job, params, 1, explicit)
        train, _ = load_data(job, self.params, explicit)
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
