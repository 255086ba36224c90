"""Chrome's trace format: opens in https://ui.perfetto.dev and chrome://tracing.

A process for each device, its threads the lanes; `cat` is the category of an operation; arrows lead from a send to its
receive, and from the device that reached a collective last to those that waited for it.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .graph import Graph, without_call
from .intervals import union
from .lanes import lanes
from .profile import Operation, Step

Event = dict[str, Any]
# Numbers of the host's process and thread; those of the devices follow. None is 0, which Perfetto takes for the idle
# process, and no two threads have the same.
_HOST = _STEPS = 1
_INPUT = 2


def chrome_events(
    graph: Graph, operations: list[Operation], steps: list[Step], labels: Mapping[str, str]
) -> list[Event]:
    """The events of a trace.

    Args:
        graph: nodes, for the arrows of copies.
        operations: what ran.
        steps: the traced steps.
        labels: what to call each device, its name at the end.
    """
    events: list[Event] = [*_process(_HOST, "host: Python"), *_thread(_HOST, _STEPS, "steps"), *map(_step, steps)]
    events += _thread(_HOST, _INPUT, "next batch")
    events += [_input_wait(wait) for wait in union(wait for step in steps for wait in step.input_waits)]
    places: dict[int, tuple[int, int]] = {}  # id of an operation: process, thread
    numbered = itertools.count(_INPUT + 1)
    for process, (device, kinds) in enumerate(lanes(operations).items(), _HOST + 1):
        events += _process(process, labels.get(device, device))
        for kind, of_kind in kinds.items():
            for number, lane in enumerate(of_kind):
                thread = next(numbered)
                events += _thread(process, thread, kind if len(of_kind) == 1 else f"{kind} {number}")
                places |= {id(operation): (process, thread) for operation in lane}
    events += [_slice(operation, *places[id(operation)]) for operation in operations]
    arrows = itertools.chain(_copy_arrows(graph, operations), _meeting_arrows(operations))
    for number, (start, begin, end, finish) in enumerate(arrows):
        kind = {"cat": start.category, "name": without_call(start.name), "id": number}
        events.append({"ph": "s", "ts": _us(begin), **_place(places[id(start)]), **kind})
        events.append({"ph": "f", "bp": "e", "ts": _us(finish), **_place(places[id(end)]), **kind})
    return events


def write_chrome_trace(path: Path, events: list[Event]) -> None:
    """Write events as gzipped JSON."""
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _place(place: tuple[int, int]) -> Event:
    return {"pid": place[0], "tid": place[1]}


def _process(process: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}},
    ]


def _thread(process: int, thread: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}},
    ]


def _step(step: Step) -> Event:
    return {
        "ph": "X",
        "name": f"step {step.number}",
        "cat": "step",
        "ts": _us(step.start_seconds),
        "dur": _us(step.called_seconds - step.start_seconds),
        **_place((_HOST, _STEPS)),
    }


def _input_wait(wait: tuple[float, float]) -> Event:
    times = {"ts": _us(wait[0]), "dur": _us(wait[1] - wait[0])}
    return {"ph": "X", "name": "next batch", "cat": "input", **times, **_place((_HOST, _INPUT))}


def _slice(operation: Operation, process: int, thread: int) -> Event:
    told: Event = {"op": operation.op, "step": operation.step}
    if operation.ready_seconds is not None:
        told["waited_ms"] = round(1e3 * (operation.ready_seconds - operation.start_seconds), 6)
        told["last"] = operation.last_device
    return {
        "ph": "X",
        "name": operation.name,
        "cat": operation.category,
        "ts": _us(operation.start_seconds),
        "dur": _us(operation.seconds),
        "args": told,
        **_place((process, thread)),
    }


Arrow = tuple[Operation, float, Operation, float]  # from an operation at a time to an operation at a time


def _copy_arrows(graph: Graph, operations: list[Operation]) -> Iterator[Arrow]:
    sends = defaultdict(list)
    for operation in operations:
        if operation.op in ("_Send", "_HostSend"):
            sends[operation.name].append(operation)
    for receive in (o for o in operations if o.op in ("_Recv", "_HostRecv")):
        for sender in (name for name in graph[receive.name].inputs if name in sends):
            sent = [o for o in sends[sender] if o.step == receive.step and o.start_seconds <= receive.end_seconds]
            if sent:
                yield sent[-1], sent[-1].start_seconds, receive, receive.end_seconds


def _meeting_arrows(operations: list[Operation]) -> Iterator[Arrow]:
    meetings = defaultdict(list)
    for operation in operations:
        if operation.meeting is not None:
            meetings[operation.meeting].append(operation)
    for members in meetings.values():
        last = max(members, key=lambda o: o.start_seconds)
        for other in members:
            if other is not last:
                yield last, last.start_seconds, other, max(other.ready_seconds or 0.0, last.start_seconds)
