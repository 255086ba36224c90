"""measure(): every configuration in a process of its own, then the advice.

    1 device → for each N, placement and reduce: strong scaling, weak scaling │ N towers that never meet │ N trials

Processes of their own, as a process can split the CPU only once, and memory and first steps belong to a process. One
works at a time, but for trials, which run at once. TensorFlow is not imported here.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import DeviceError, MultitowerError, TowerError
from ..job import find_job
from ..parameters import did_you_mean
from .advice import advise
from .report import Point, Scaling, Trials, spread

PLACEMENTS = ("auto", "replicated", "shared", "independent")
REDUCES = ("auto", "host", "gather", "ring", "nccl")
_PATIENCE_SECONDS = 1800  # for one answer: a first step can take minutes
_SHARED_CORES = (
    "these are logical CPU devices: they share {} cores, so N of them cannot be N times as fast as one; "
    "what shows is what towers cost, not what more devices would give"
)


class _ChildError(Exception):
    """A configuration that failed: the name of the error in its process, and its message."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}")
        self.name, self.message = name, message


def measure(
    job: str = "digits",
    devices: str | Sequence[int] = (1, 2, 4),
    *,
    placement: Sequence[str] = ("auto",),
    reduce: Sequence[str] = ("auto",),
    batch_size: int | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    seconds: float = 5.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Scaling:
    """Measure what more devices give for a job, and say whether they pay.

        speed-up(N) = r(N) / r(1)      efficiency(N) = r(N) / (N · r(1))      of bound(N) = r(N) / r(N, independent)

    with r examples per second: of the same global batch divided over N devices (strong scaling), and of one N times as
    large (weak). Every configuration trains the job's model with Trainer in a process of its own.

    Args:
        job: name of a built-in job or path of a Python file.
        devices: numbers of devices, GPUs where there are any; "cpu:1,2,4" for logical CPU devices. One device is
            measured in any case.
        placement: placements of Trainer; each is combined with each of `reduce`.
        reduce: ways to reduce of Trainer.
        batch_size: rows of the batch on one device; None for the job's own number.
        params: parameters of the job's two functions.
        seed: of Keras' global random state.
        seconds: that each measurement takes, without start and first step.
        progress: called with a line of text before each configuration.

    Returns:
        A `Scaling`: `advice.text` says what to do, `print(scaling)` shows the rest. A configuration that fails is in
        it with its error, the others are measured all the same.

    Raises:
        DeviceError: `devices`, `placement` or `reduce` is not of the form above.
        JobError: the job or its parameters are unusable.
        MultitowerError: the job cannot be trained on one device.

    Example:
        >>> import multitower as mt
        >>> print(mt.measure("digits", "cpu:1,2").advice.text)  # doctest: +SKIP
        Train on one device (8,100 examples/s); one training on 2 does 8,300 (1.02 ×) …
    """
    began = time.perf_counter()
    cpu, counts = parse_counts(devices)
    _check_names("placement", placement, PLACEMENTS)
    _check_names("reduce", reduce, REDUCES)
    if not seconds > 0:
        raise DeviceError(f"seconds={seconds!r}: expected more than 0")
    common = {
        "job": str(find_job(job)) if job.endswith(".py") else job,
        "batch_size": batch_size,
        "params": dict(params or {}),
        "seed": seed,
        "seconds": seconds,
    }
    find_job(job)
    run = _Runner(common, cpu, progress)
    alone = run.point(Point(1, "strong", "auto", "auto"))
    points = [alone, *(run.point_or_error(p) for p in plan(counts, placement, reduce))]
    trials = [run.trials(n) for n in counts if n > 1]
    points = compared(points)
    kind, cores = run.kind, _cores()
    advice = advise(points, trials, kind, cores)
    notes = [_SHARED_CORES.format(cores)] if kind == "CPU" else []
    return Scaling(find_job(job).stem, kind, cores, points, trials, advice, notes, time.perf_counter() - began)


def parse_counts(devices: str | Sequence[int]) -> tuple[bool, list[int]]:
    """(whether CPU devices are asked for, the numbers of devices, rising, each once).

    Example:
        >>> parse_counts("cpu:1,2,4")
        (True, [1, 2, 4])
    """
    text = devices if isinstance(devices, str) else ",".join(map(str, devices))
    kind, colon, rest = text.strip().lower().rpartition(":")
    numbers = [part.strip() for part in rest.split(",")]
    if (colon and kind != "cpu") or not all(n.isdecimal() and 0 < int(n) < 10**4 for n in numbers):
        raise DeviceError(
            f"devices={devices!r}: expected numbers of devices such as 1,2,4, or cpu:1,2,4 for logical CPU devices"
        )
    return bool(colon), sorted({int(n) for n in numbers})


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise DeviceError(f"{what}={name!r} is unknown; expected {', '.join(known)}{did_you_mean(name, known)}")


def plan(counts: Iterable[int], placement: Sequence[str], reduce: Sequence[str]) -> list[Point]:
    """The configurations to measure after that of one device, with their numbers left open."""
    ways = [way for way in product(placement, reduce) if way[0] != "independent"] + [("independent", "auto")]
    return [Point(n, scaling, *way) for n in counts if n > 1 for way in ways for scaling in ("strong", "weak")]


def compared(points: Sequence[Point]) -> list[Point]:
    """The same with speed-up, efficiency and share of the upper bound, where these can be told."""
    alone = next((p.rate for p in points if p.devices == 1 and p.rate), None)
    bounds = {(p.devices, p.scaling): p.rate for p in points if p.placement == "independent"}
    found = []
    for p in points:
        speedup = p.rate / alone if p.rate and alone else None
        bound = bounds.get((p.devices, p.scaling))
        of_bound = p.rate / bound if p.rate and bound else None
        found.append(replace(p, speedup=speedup, efficiency=speedup and speedup / p.devices, of_bound=of_bound))
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Runner:
    """Runs configurations; `kind` is that of the device of the first one."""

    def __init__(self, common: dict[str, Any], cpu: bool, progress: Callable[[str], None]):
        self._common, self._cpu, self._progress = common, cpu, progress
        self.kind = "CPU"

    def point(self, point: Point) -> Point:
        """The point with its numbers.

        Raises:
            MultitowerError: of the kind it was in the process of the configuration, if it was ours.
        """
        try:
            return self._measured(point)
        except _ChildError as error:
            ours = getattr(errors, error.name, None)
            if isinstance(ours, type) and issubclass(ours, MultitowerError):
                raise ours(error.message) from None
            raise TowerError(f"the job cannot be trained on one device: {error}") from None

    def point_or_error(self, point: Point) -> Point:
        """The point with its numbers, or with why there are none."""
        try:
            return self._measured(point)
        except _ChildError as error:
            return replace(point, error=str(error))

    def _measured(self, point: Point) -> Point:
        self._progress(f"{point.devices} × {point.scaling}, placement {point.placement}, reduce {point.reduce}")
        times = point.devices if point.scaling == "weak" else 1
        devices = f"cpu:{point.devices}" if self._cpu else point.devices
        wanted = {"devices": devices, "times": times, "placement": point.placement, "reduce": point.reduce}
        with _Child({**self._common, **wanted, "remove_input": point.placement != "independent"}) as child:
            ready = child.answer()
            child.go_on()
            found = child.answer()
        self.kind = ready["names"][0][:3]
        removed = found["removed_rates"]
        return replace(
            point,
            batch_size=ready["batch_size"],
            first_step_seconds=ready["first_step_seconds"],
            examples_per_second=spread(found["rates"]),
            input_removed=spread(removed) if removed else None,
            meetings=found["meetings"],
            meeting_bytes=found["meeting_bytes"],
            peak_bytes=found["peak_bytes"],
        )

    def trials(self, count: int) -> Trials:
        """As many trainings at once, each on a device of its own; logical CPU devices are all the same CPU."""
        self._progress(f"{count} trials side by side")
        devices = [["CPU:0"] if self.kind == "CPU" else [f"GPU:{i}"] for i in range(count)]
        wanted = {"times": 1, "placement": "auto", "reduce": "auto", "remove_input": False}
        try:
            with ExitStack() as stack:
                children = [
                    stack.enter_context(_Child({**self._common, **wanted, "devices": names})) for names in devices
                ]
                for step in (_Child.answer, _Child.go_on):
                    for child in children:
                        step(child)
                rates = [spread(child.answer()["rates"]).median for child in children]
        except _ChildError as error:
            return Trials(count, None, str(error))
        return Trials(count, sum(rates))


class _Child:
    """The process of a configuration, see `child`; ended by `with`."""

    def __init__(self, wanted: dict[str, Any]):
        self._errors = tempfile.TemporaryFile("w+")
        package = str(Path(errors.__file__).parents[1])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "multitower.scaling.child", json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def go_on(self) -> None:
        """Let it take the measurement that it is ready for."""
        print(file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Its next answer. Synchronises with the process.

        Raises:
            _ChildError: the answer is an error, or there is none.
        """
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE_SECONDS)
        line = self._process.stdout.readline() if ready and self._process.stdout else ""
        if not line:
            raise _ChildError(*self._last_words(bool(ready)))
        answer = json.loads(line)
        if "error" in answer:
            raise _ChildError(answer["error"], answer["message"])
        return answer

    def _last_words(self, ended: bool) -> tuple[str, str]:
        if not ended:
            return "TimeoutError", f"no answer within {_PATIENCE_SECONDS} s"
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or [""]
        return "ended", f"the process ended with code {code}; {lines[-1][:300]}"
