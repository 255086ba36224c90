"""measure(): every configuration in a process of its own, then the advice.

    1 device → for each N, placement and reduce: strong scaling, weak scaling │ N towers that never meet │ N trials

Processes of their own, as a process can split the CPU only once, and memory and first steps belong to a process. One
works at a time, but for trials, which run at once. On CPU devices one device takes turns with every configuration, as
the speed of a shared machine drifts; on GPUs its memory is given back first. TensorFlow is not imported here.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

from .. import errors
from ..errors import DeviceError, MultitowerError, TowerError
from ..job import builtin_jobs, find_job
from ..parameters import did_you_mean
from .advice import advise
from .process import Child, ChildError
from .report import Point, Scaling, Spread, Trials, spread

PLACEMENTS = ("auto", "replicated", "shared", "independent")
REDUCES = ("auto", "host", "gather", "ring", "nccl")
_ROUNDS = 3
_SHARED_CORES = (
    "these are logical CPU devices: they share {} cores, so N of them cannot be N times as fast as one; "
    "what shows is what towers cost, not what more devices would give"
)


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
    file = find_job(job)
    common = {
        "job": job if job in builtin_jobs() else str(file),
        "batch_size": batch_size,
        "params": dict(params or {}),
        "seed": seed,
        "seconds": seconds / _ROUNDS,
    }
    with ExitStack() as stack:
        run = _Runner(common, cpu, progress, stack)
        points = [run.alone, *(run.point(p) for p in plan(counts, placement, reduce))]
        trials = [run.trials(n) for n in counts if n > 1]
    points, cores = compared(points), _cores()
    notes = [_SHARED_CORES.format(cores)] if run.kind == "CPU" else []
    advice = advise(points, trials, run.kind, cores)
    return Scaling(file.stem, run.kind, cores, points, trials, advice, notes, time.perf_counter() - began)


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
    speedups = [p.rate / p.one_device.median if p.rate and p.one_device else None for p in points]
    bounds = {(p.devices, p.scaling): s for p, s in zip(points, speedups, strict=True) if p.placement == "independent"}
    found = []
    for p, speedup in zip(points, speedups, strict=True):
        bound = bounds.get((p.devices, p.scaling))
        of_bound = speedup / bound if speedup and bound else None
        found.append(replace(p, speedup=speedup, efficiency=speedup and speedup / p.devices, of_bound=of_bound))
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Runner:
    """Runs configurations.

    Attributes:
        kind: that of the device of the first one, "CPU" or "GPU".
        alone: the point of one device.
    """

    def __init__(self, common: dict[str, Any], cpu: bool, progress: Callable[[str], None], stack: ExitStack):
        self._common, self._cpu, self._progress = common, cpu, progress
        self._one: Child | None = None  # the process of one device, where it takes turns with others
        self._one_rate: Spread | None = None
        self.kind = "CPU"
        self.alone = self._measure_alone(stack)

    def _measure_alone(self, stack: ExitStack) -> Point:
        """The point of one device.

        Raises:
            MultitowerError: of the kind it was in the process of the configuration, if it was ours.
        """
        point = Point(1, "strong", "auto", "auto")
        own = stack.enter_context(ExitStack())
        try:
            child = own.enter_context(Child(self._wanted(point)))
            point = self._measured(point, child)
        except ChildError as error:
            ours = getattr(errors, error.name, None)
            if isinstance(ours, type) and issubclass(ours, MultitowerError):
                raise ours(error.message) from None
            raise TowerError(f"the job cannot be trained on one device: {error}") from None
        self.kind = child.ready["names"][0][:3]
        if self.kind == "CPU":
            self._one = child
        else:
            own.close()
        self._one_rate = point.examples_per_second
        return replace(point, one_device=self._one_rate)

    def point(self, point: Point) -> Point:
        """The point with its numbers, or with why there are none."""
        try:
            with Child(self._wanted(point)) as child:
                return self._measured(point, child)
        except ChildError as error:
            return replace(point, error=str(error))

    def _wanted(self, point: Point) -> dict[str, Any]:
        self._progress(f"{point.devices} × {point.scaling}, placement {point.placement}, reduce {point.reduce}")
        return self._common | {
            "devices": f"cpu:{point.devices}" if self._cpu else point.devices,
            "times": point.devices if point.scaling == "weak" else 1,
            "placement": point.placement,
            "reduce": point.reduce,
            "remove_input": point.placement != "independent",
        }

    def _measured(self, point: Point, child: "Child") -> Point:
        child.start()
        rounds, one = self._rounds([child])
        removed = [rate for found in rounds[0] for rate in found["removed_rates"]]
        told = ("placement_used", "reduce_used", "batch_size", "first_step_seconds", "meetings", "meeting_bytes")
        return replace(
            point,
            **{name: child.ready[name] for name in told},
            examples_per_second=_spread_of(rounds[0]),
            input_removed=spread(removed) if removed else None,
            peak_bytes=rounds[0][-1]["peak_bytes"],
            one_device=one,
        )

    def _rounds(self, children: Sequence["Child"]) -> tuple[list[list[dict[str, Any]]], Spread | None]:
        """What came out of every round of each of the children, which run at once, and of one device in between."""
        found: list[list[dict[str, Any]]] = [[] for _ in children]
        one: list[dict[str, Any]] = []
        for _ in range(_ROUNDS):
            for child in children:
                child.go_on()
            for child, own in zip(children, found, strict=True):
                own.append(child.answer())
            if self._one:
                self._one.go_on()
                one.append(self._one.answer())
        return found, _spread_of(one) if one else self._one_rate

    def trials(self, count: int) -> Trials:
        """As many trainings at once, each on a device of its own; logical CPU devices are all the same CPU."""
        self._progress(f"{count} trials side by side")
        devices = [["CPU:0"] if self.kind == "CPU" else [f"GPU:{i}"] for i in range(count)]
        wanted = {"times": 1, "placement": "auto", "reduce": "auto", "remove_input": False}
        try:
            with ExitStack() as stack:
                made = [Child(self._common | wanted | {"devices": names}) for names in devices]
                children = [stack.enter_context(child) for child in made]
                for child in children:
                    child.start()
                rounds, one = self._rounds(children)
        except ChildError as error:
            return Trials(count, error=str(error))
        together = sum(_spread_of(own).median for own in rounds)
        return Trials(count, together, together / one.median if one else None)


def _spread_of(rounds: Iterable[dict[str, Any]]) -> Spread:
    return spread([rate for found in rounds for rate in found["rates"]])
