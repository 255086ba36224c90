"""From a recording to operations: name, device, category, start and end of everything that ran in the traced steps."""

import bisect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .. import upstream
from .categories import is_collective
from .graph import Graph, short_device, without_call
from .recording import INPUT, STEP

HOST = "host"
_ASYNC = (upstream.ASYNC_START, upstream.ASYNC_DONE)


@dataclass(frozen=True)
class Operation:
    """One run of one operation.

    Attributes:
        name: as in the graph; of a kernel without one, the kernel's.
        op: its type.
        device: where it ran.
        category: see `categories`.
        start_seconds: since the first traced step began.
        end_seconds: likewise.
        step: number of the traced step, from 0.
        ready_seconds: of a collective, when the last device had arrived, from which on it works and does not wait;
            None for other operations.
        last_device: of a collective, the device that arrived last.
        meeting: of a collective, what the operations of all devices that met have in common.
    """

    name: str
    op: str
    device: str
    category: str
    start_seconds: float
    end_seconds: float
    step: int
    ready_seconds: float | None = None
    last_device: str | None = None
    meeting: tuple | None = None

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Step:
    """One traced step: from its begin to the begin of the next traced one, the last one to its own end.

    Attributes:
        number: from 0.
        start_seconds: since the first traced step began.
        called_seconds: when the step itself returned; what comes after is Python between steps.
        end_seconds: likewise.
        input_waits: (start, end) of the times something waited for a dataset's next batch.
    """

    number: int
    start_seconds: float
    called_seconds: float
    end_seconds: float
    input_waits: tuple[tuple[float, float], ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class _Event:
    name: str
    start: float
    end: float
    told: dict[str, Any]


def read_steps(space: Any) -> list[Step]:
    """The traced steps, in order."""
    events = [e for line in _host_lines(space) for e in line if e.name in (STEP, INPUT, upstream.NEXT_BATCH)]
    called = sorted((e for e in events if e.name == STEP), key=lambda e: e.start)
    waits = [(e.start, e.end) for e in events if e.name != STEP]
    zero = called[0].start
    steps = []
    for number, event in enumerate(called):
        end = called[number + 1].start if number + 1 < len(called) else event.end
        own = tuple((a - zero, b - zero) for a, b in waits if event.start <= a < end)
        steps.append(Step(number, event.start - zero, event.end - zero, end - zero, own))
    return steps


def read_operations(space: Any, graph: Graph, categories: dict[str, str]) -> list[Operation]:
    """All operations of the traced steps, by start.

    Args:
        space: the XSpace of the recording.
        graph: its nodes.
        categories: of the nodes.
    """
    host = list(_host_lines(space))
    called = sorted((e for line in host for e in line if e.name == STEP), key=lambda e: e.start)
    zero = called[0].start
    starts = [e.start for e in called]

    def operation(name: str, start: float, end: float, step: int) -> Operation:
        node = graph[name]
        return Operation(name, node.op, node.device, categories[name], start - zero, end - zero, step)

    def step_at(moment: float) -> int | None:
        step = bisect.bisect_right(starts, moment) - 1
        return step if step >= 0 and moment <= called[step].end else None

    runs = {e.told.get("id"): step_at(e.start) for line in host for e in line if e.name == upstream.FUNCTION_RUN}
    runs = {number: step for number, step in runs.items() if step is not None}
    found = [operation(*run) for run in (*_synchronous(host, graph, runs), *_asynchronous(host, graph, runs))]
    kernels = list(_kernels(space, graph, categories, zero, step_at))
    if kernels:  # of operations on accelerators the host's events are only the launches
        found = [o for o in found if o.device.startswith("CPU") or (is_collective(o.op) and not _has_nccl(kernels))]
    return _with_meetings(sorted([*found, *kernels], key=lambda o: o.start_seconds))


def incomplete_steps(space: Any) -> set[int]:
    """Numbers of the steps in which an operation is known to have started, and not to have ended.

    TensorFlow records an event when it ends; one that was still open when the profiler stopped is lost, with what ran
    inside it.
    """
    steps = read_steps(space)
    host = list(_host_lines(space))
    zero = min(e.start for line in host for e in line if e.name == STEP)
    open_since: dict[tuple, list[float]] = defaultdict(list)
    for event in sorted((e for line in host for e in line if e.name in _ASYNC), key=lambda e: e.start):
        key = (event.told.get("name"), event.told.get("step_id"))
        if event.name == upstream.ASYNC_START:
            open_since[key].append(event.start - zero)
        elif open_since[key]:
            open_since[key].pop(0)
    moments = [moment for starts in open_since.values() for moment in starts]
    return {s.number for s in steps if any(s.start_seconds <= m <= s.called_seconds for m in moments)}


def _host_lines(space: Any) -> Iterator[list[_Event]]:
    """The events of each thread of the host, by start."""
    for plane in space.planes:
        if plane.name.startswith("/host:CPU"):
            yield from (_events(plane, line) for line in plane.lines)


def _events(plane: Any, line: Any) -> list[_Event]:
    begin = line.timestamp_ns * 1e-9
    events = []
    for event in line.events:
        start = begin + event.offset_ps * 1e-12
        told = {plane.stat_metadata[s.metadata_id].name: _value(plane, s) for s in event.stats}
        events.append(
            _Event(plane.event_metadata[event.metadata_id].name, start, start + event.duration_ps * 1e-12, told)
        )
    return sorted(events, key=lambda e: (e.start, -e.end))


def _value(plane: Any, stat: Any) -> Any:
    kind = stat.WhichOneof("value")
    return plane.stat_metadata[stat.ref_value].name if kind == "ref_value" else getattr(stat, kind)


def _synchronous(host: list[list[_Event]], graph: Graph, runs: dict[Any, int]) -> Iterator[tuple]:
    """Operations that ran on a thread of TensorFlow from start to end: inside an event of the executor of the step."""
    for line in host:
        until, step = 0.0, None
        for event in line:
            if event.name == upstream.EXECUTOR:
                until, step = event.end, runs.get(event.told.get("id"))
                continue
            name = event.name.rpartition(":")[0]
            if event.start < until and step is not None and name in graph and not is_collective(graph[name].op):
                yield name, event.start, event.end, step


def _asynchronous(host: list[list[_Event]], graph: Graph, runs: dict[Any, int]) -> Iterator[tuple]:
    """Operations that start on one thread and end on another one: collectives, receives, the next batch."""
    started = defaultdict(list)
    for event in sorted((e for line in host for e in line if e.name in _ASYNC), key=lambda e: e.start):
        name, run = event.told.get("name"), event.told.get("step_id")
        if name not in graph or run not in runs:
            continue
        if event.name == upstream.ASYNC_START:
            started[name, run].append(event.start)
        elif started[name, run]:
            yield name, started[name, run].pop(0), event.start, runs[run]


def _kernels(space: Any, graph: Graph, categories: dict[str, str], zero: float, step_at: Any) -> Iterator[Operation]:
    """What ran on accelerators: a plane for each, a line for each stream of it."""
    for plane in space.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for event in (e for line in plane.lines if "Stream" in line.name for e in _events(plane, line)):
            step = step_at(event.start)
            if step is not None:
                name, op, category = _what(event, graph, categories)
                device = short_device(plane.name.split(" ")[0])
                yield Operation(name, op, device, category, event.start - zero, event.end - zero, step)


def _what(event: _Event, graph: Graph, categories: dict[str, str]) -> tuple[str, str, str]:
    """Name, type and category of a kernel: those of the operation it says it belongs to."""
    if "memcpy" in event.name.lower():
        return event.name, "Memcpy", "copy"
    for told in (v for v in event.told.values() if isinstance(v, str)):
        for part in told.split("::"):
            name = part.rpartition(":")[0]
            if name in graph:
                return name, graph[name].op, categories[name]
    return event.name, "kernel", "reduce" if "nccl" in event.name.lower() else "forward"


def _has_nccl(kernels: list[Operation]) -> bool:
    return any("nccl" in o.name.lower() or (is_collective(o.op)) for o in kernels)


def _with_meetings(operations: list[Operation]) -> list[Operation]:
    """Collectives with when, and because of whom, they began to work.

    Towers run the same trace, so the operations that meet have the same name behind the tower's call, and the same
    place among the runs of that name (in a loop); kernels without a name meet in the order they run.
    """
    meetings, seen = defaultdict(list), defaultdict(int)
    for i, operation in enumerate(operations):
        if not is_collective(operation.op) and "nccl" not in operation.name.lower():
            continue
        key = (operation.step, without_call(operation.name))
        meetings[(*key, seen[(*key, operation.device)])].append(i)
        seen[(*key, operation.device)] += 1
    result = list(operations)
    for key, members in meetings.items():
        last = max((operations[i] for i in members), key=lambda o: o.start_seconds)
        for i in members:
            ready = min(last.start_seconds, operations[i].end_seconds)
            result[i] = replace(operations[i], ready_seconds=ready, last_device=last.device, meeting=key)
    return result
