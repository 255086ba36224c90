"""The critical path of a step: the chain of operations, each waiting for the one before, that ends with the last one.

Walked backwards: from the last operation of the step to the one of its inputs that ended last, and so on; from a
collective to the tower that reached it last. An operation that was ready and did not run waited for the operation that
kept its device busy (logical devices of the CPU share their threads): the one that ended last before it. What lies
between two operations of the chain is the host's: scheduling, and operations too small to be timed.
"""

import bisect
from collections import defaultdict
from dataclasses import dataclass

from .breakdown import is_compute
from .categories import NAMES, is_copy
from .graph import Graph
from .intervals import difference, intersection, union
from .profile import HOST, Operation, Step


@dataclass(frozen=True)
class Stretch:
    """Part of the critical path: operations in a row of one category on one device.

    Attributes:
        device: where; "host" for what lies between operations.
        category: of the operations; "host" for what lies between.
        seconds: how long.
        name: of its longest operation.
    """

    device: str
    category: str
    seconds: float
    name: str


def critical_path(graph: Graph, operations: list[Operation], step: Step) -> list[Stretch]:
    """Stretches of one step in order of time; together they are as long as the step."""
    own = [o for o in operations if o.step == step.number and o.start_seconds < step.end_seconds]
    pieces, moment = [], step.start_seconds
    for operation in _chain(graph, own) if own else []:
        start = max(operation.start_seconds, moment)
        end = min(max(operation.end_seconds, start), step.end_seconds)
        pieces += _between(moment, start, step)
        if end > start:
            pieces.append(Stretch(operation.device, operation.category, end - start, operation.name))
        moment = max(moment, end)
    return [*pieces, *_between(moment, step.end_seconds, step)]


def _between(start: float, end: float, step: Step) -> list[Stretch]:
    """What the host did between two operations: it waited for the next batch, or did something else."""
    gap = [(start, end)] if end > start else []
    waits = intersection(gap, union(step.input_waits))
    parts = [*((*span, "input") for span in waits), *((*span, HOST) for span in difference(gap, waits))]
    return [Stretch(HOST, category, b - a, "") for a, b, category in sorted(parts)]


def _chain(graph: Graph, operations: list[Operation]) -> list[Operation]:
    runs, meetings = defaultdict(list), defaultdict(list)
    for operation in operations:
        runs[operation.name].append(operation)
        if operation.meeting is not None:
            meetings[operation.meeting].append(operation)
    chain = [max(operations, key=lambda o: o.end_seconds)]
    seen, busy = {id(chain[0])}, _Busy(operations)
    while True:
        before = busy.instead(chain[-1], _before(graph, runs, meetings, chain[-1]))
        if before is None or id(before) in seen:
            return chain[::-1]
        seen.add(id(before))
        chain.append(before)


class _Busy:
    """What kept devices busy, by the time it ended."""

    _MOMENT_SECONDS = 1e-4  # shorter gaps are scheduling

    def __init__(self, operations: list[Operation]):
        self._ended: dict[str, list[Operation]] = defaultdict(list)
        for operation in sorted((o for o in operations if is_compute(o)), key=lambda o: o.end_seconds):
            self._ended[_threads(operation.device)].append(operation)

    def instead(self, operation: Operation, before: Operation | None) -> Operation | None:
        """What `operation` waited for: `before`, one of its inputs, or what ran until later where it could have run."""
        if not is_compute(operation):
            return before
        ended = self._ended[_threads(operation.device)]
        place = bisect.bisect_right(ended, operation.start_seconds, key=lambda o: o.end_seconds) - 1
        ready = before.end_seconds if before else 0.0
        if place < 0 or operation.start_seconds - ready < self._MOMENT_SECONDS or ended[place].end_seconds <= ready:
            return before
        return ended[place] if ended[place] is not operation else before


def _threads(device: str) -> str:
    return "CPU" if device.startswith("CPU") else device


def _before(graph: Graph, runs: dict, meetings: dict, operation: Operation) -> Operation | None:
    """What `operation` waited for: the input of it that ended last, before it began to work."""
    if operation.meeting is not None and operation.last_device != operation.device:
        return max(meetings[operation.meeting], key=lambda o: o.start_seconds)
    # a receive is begun early and ends when the tensor comes; everything else begins when its inputs are there
    limit = operation.end_seconds if is_copy(operation.op) else operation.start_seconds
    found = [o for o in _timed_inputs(graph, runs, operation) if o.end_seconds <= limit + 1e-6 or is_copy(o.op)]
    return max(found, key=lambda o: o.end_seconds, default=None)


def _timed_inputs(graph: Graph, runs: dict, operation: Operation) -> list[Operation]:
    """The last run before `operation` of each input, inputs that were not timed (constants, shapes) looked through."""
    if operation.name not in graph:
        return []
    found, seen, queue = [], set(), list(graph[operation.name].inputs)
    while queue:
        name = queue.pop()
        if name in seen or name not in graph:
            continue
        seen.add(name)
        earlier = [o for o in runs[name] if o.start_seconds <= operation.end_seconds and o is not operation]
        if earlier:
            found.append(max(earlier, key=lambda o: o.end_seconds))
        else:
            queue.extend(graph[name].inputs)
    return found


def in_one_line(path: list[Stretch]) -> str:
    """The path in words: neighbours of one category and device joined, pieces under 2 % of it added up at the end."""
    whole = sum(s.seconds for s in path)
    without_gaps = _joined([s for s in path if s.category != HOST or s.seconds >= 0.01 * whole])
    parts = _joined([s for s in without_gaps if s.seconds >= 0.02 * whole])
    rest = whole - sum(s.seconds for s in parts)
    told = " → ".join(f"{_told(s.category, s.device)} {1000 * s.seconds:.1f} ms" for s in parts)
    return told + (f" (and {1000 * rest:.1f} ms in small pieces)" if rest > 0.005 * whole else "")


def _told(category: str, device: str) -> str:
    return "host" if category == HOST else f"{NAMES[category]} {device}"


def _joined(path: list[Stretch]) -> list[Stretch]:
    joined: list[Stretch] = []
    for s in path:
        last = joined[-1] if joined else None
        if last and (last.category, last.device) == (s.category, s.device):
            name = max((last, s), key=lambda part: part.seconds).name
            joined[-1] = Stretch(s.device, s.category, last.seconds + s.seconds, name)
        else:
            joined.append(s)
    return joined


def by_category(path: list[Stretch]) -> dict[tuple[str, str], float]:
    """Seconds of the path for each (category, device), longest first."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for s in path:
        total[s.category, s.device] += s.seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))
