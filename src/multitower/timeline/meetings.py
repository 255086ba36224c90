"""Where towers meet: the collectives, and the operations that take what several towers have made.

tower 0  ────────▶│ arrives            waits │▓▓▓▓▓ sum ▓▓▓▓▓
tower 1  ─────────────────────────▶│ arrives │▓▓▓▓▓ sum ▓▓▓▓▓     ready: when the last one has arrived
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .graph import Graph, tower_devices
from .profile import Operation


@dataclass(frozen=True)
class Meeting:
    """Towers that came together in one operation of one step.

    Attributes:
        step: number of the traced step.
        arrived_seconds: for each device when it was there, since the first traced step began.
    """

    step: int
    arrived_seconds: dict[str, float]

    @property
    def last_device(self) -> str:
        """The device that came last."""
        return max(self.arrived_seconds, key=lambda device: self.arrived_seconds[device])

    @property
    def ready_seconds(self) -> float:
        """When the last device had come."""
        return self.arrived_seconds[self.last_device]


def meetings(graph: Graph, operations: list[Operation]) -> list[Meeting]:
    """All meetings of the traced steps."""
    return [*_collectives(operations), *_sums(graph, operations)]


def _collectives(operations: list[Operation]) -> Iterator[Meeting]:
    members = defaultdict(list)
    for operation in operations:
        if operation.meeting is not None:
            members[operation.meeting].append(operation)
    for met in members.values():
        if len(met) > 1:
            yield Meeting(met[0].step, {o.device: o.start_seconds for o in met})


def _sums(graph: Graph, operations: list[Operation]) -> Iterator[Meeting]:
    """Operations with inputs of several towers; a tower is there when its input, or the receive of it, has ended."""
    devices = tower_devices(graph)
    ended = {(o.name, o.step): o.end_seconds for o in operations}
    for operation in operations:
        node = graph.get(operation.name)
        if node is None or len({graph[name].call for name in node.values if name in graph} - {""}) < 2:
            continue
        arrived: dict[str, float] = {}
        for name in node.values:
            device = devices.get(graph[name].call) if name in graph else None
            moment = _ended(graph, ended, name, operation.step)
            if device is not None and moment is not None and moment <= operation.end_seconds:
                arrived[device] = max(arrived.get(device, 0.0), moment)
        if len(arrived) > 1:
            yield Meeting(operation.step, arrived)


def _ended(graph: Graph, ended: Mapping[tuple[str, int], float], name: str, step: int) -> float | None:
    """When an input was there: it itself or, where it was not timed, what it was made of."""
    while (name, step) not in ended:
        sources = graph[name].values if name in graph else ()
        if not sources:
            return None
        name = sources[0]
    return ended[name, step]
