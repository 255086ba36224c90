"""Lanes: operations that overlap in time, one below the other, so that none hides another one."""

import heapq
from collections import defaultdict
from collections.abc import Iterable

from .categories import is_collective, is_copy, waits_for_input
from .profile import Operation

_APART_SECONDS = 5e-9  # readers of traces round to nanoseconds, and drop what then overlaps
KINDS = ("operations", "collectives", "copies", "input")


def kind_of(operation: Operation) -> str:
    """Which lanes of its device an operation belongs to."""
    if operation.ready_seconds is not None or is_collective(operation.op):
        return "collectives"
    if is_copy(operation.op) or operation.op == "Memcpy":
        return "copies"
    return "input" if waits_for_input(operation.op) else "operations"


def lanes(operations: Iterable[Operation]) -> dict[str, dict[str, list[list[Operation]]]]:
    """For each device, for each kind, lanes of operations that do not overlap, as few as there can be."""
    by_device: dict[str, dict[str, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for operation in operations:
        by_device[operation.device][kind_of(operation)].append(operation)
    return {
        device: {kind: _separated(kinds[kind]) for kind in KINDS if kind in kinds}
        for device, kinds in sorted(by_device.items())
    }


def _separated(operations: list[Operation]) -> list[list[Operation]]:
    found: list[list[Operation]] = []
    free: list[tuple[float, int]] = []  # (end of its last operation, lane)
    for operation in sorted(operations, key=lambda o: o.start_seconds):
        if free and free[0][0] + _APART_SECONDS <= operation.start_seconds:
            _, lane = heapq.heappop(free)
        else:
            lane = len(found)
            found.append([])
        found[lane].append(operation)
        heapq.heappush(free, (operation.end_seconds, lane))
    return found
