"""Where the time of a step went, on each device.

Every moment of a step is counted once, as the first of these that is true of the device at that moment:

    compute      an operation runs on it that is not of the reduction
    exposed      an operation of the reduction runs on it, or a collective that all towers have reached
    copies       a tensor is being sent from it or to it
    input        the step waits for its next batch
    waiting      it has reached a meeting that another tower has not, waits for a tensor of another device, or is done
                 while another one is not
    host         none of these: TensorFlow's scheduling, Python between steps

So the shares add up to the whole step. `hidden` is the time the reduction works while the device computes: part of
compute, shown beside it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .categories import is_collective, is_copy, waits_for_input
from .intervals import Intervals, difference, intersection, seconds, union
from .meetings import Meeting
from .profile import Operation, Step

SHARES = ("compute", "exposed", "copies", "input", "waiting", "host")
SHARE_NAMES = {
    "compute": "compute",
    "exposed": "reduction, exposed",
    "copies": "copies",
    "input": "waiting for input",
    "waiting": "waiting for the slowest tower",
    "host": "host gaps",
}


@dataclass(frozen=True)
class Share:
    """Where a device's time went, as seconds of a step, the mean over the traced steps.

    Attributes:
        device: its name.
        step_seconds: the whole step.
        compute, exposed, copies, input, waiting, host: see the module; they add up to `step_seconds`.
        hidden: seconds in which the reduction worked behind compute.
        waited_for: for each other device, seconds waited for it to come to a meeting.
    """

    device: str
    step_seconds: float
    compute: float
    exposed: float
    copies: float
    input: float
    waiting: float
    host: float
    hidden: float
    waited_for: dict[str, float]

    def percent(self, share: str) -> float:
        """A share in percent of the step."""
        return 100 * getattr(self, share) / self.step_seconds if self.step_seconds else 0.0


def is_compute(operation: Operation) -> bool:
    """Whether an operation keeps its device busy, rather than moving or awaiting tensors."""
    waits = is_collective(operation.op) or is_copy(operation.op) or waits_for_input(operation.op)
    return not waits and operation.op != "Memcpy" and operation.ready_seconds is None


def breakdown(
    operations: Iterable[Operation], meetings: Iterable[Meeting], steps: list[Step], devices: list[str]
) -> list[Share]:
    """The mean over the steps, for each device."""
    by_step, met = defaultdict(list), defaultdict(list)
    for operation in operations:
        by_step[operation.step].append(operation)
    for meeting in meetings:
        met[meeting.step].append(meeting)
    return [_mean(device, [_share(by_step[s.number], met[s.number], s, device) for s in steps]) for device in devices]


def _share(operations: list[Operation], meetings: list[Meeting], step: Step, device: str) -> Share:
    own = [o for o in operations if o.device == device]
    before = [m for m in meetings if device in m.arrived_seconds]
    sets = {
        "compute": _spans(o for o in own if is_compute(o) and o.category != "reduce"),
        "exposed": union(
            [
                *((o.ready_seconds, o.end_seconds) for o in own if o.ready_seconds is not None),
                *_spans(o for o in own if is_compute(o) and o.category == "reduce"),
            ]
        ),
        "copies": _spans(o for o in own if o.op in ("_Send", "_HostSend", "Memcpy")),
        "input": union([*_spans(o for o in operations if waits_for_input(o.op)), *step.input_waits]),
        "waiting": union([*_waits(own, before, device), *_idle_at_end(own, operations)]),
    }
    rest: Intervals = [(step.start_seconds, step.end_seconds)]
    found, idle = {}, rest
    for name, moments in sets.items():
        found[name] = seconds(intersection(rest, moments))
        rest, idle = difference(rest, moments), rest
    hidden = seconds(intersection(sets["compute"], sets["exposed"]))
    return Share(
        device, step.seconds, **found, host=seconds(rest), hidden=hidden, waited_for=_awaited(before, device, idle)
    )


def _spans(operations: Iterable[Operation]) -> Intervals:
    return union((o.start_seconds, o.end_seconds) for o in operations)


def _waits(own: list[Operation], meetings: list[Meeting], device: str) -> Intervals:
    """Before the others are there; before a tensor of another device is there."""
    for_towers = [(m.arrived_seconds[device], m.ready_seconds) for m in meetings]
    return union([*for_towers, *_spans(o for o in own if o.op in ("_Recv", "_HostRecv"))])


def _idle_at_end(own: list[Operation], operations: list[Operation]) -> Intervals:
    """From the end of the device's last operation to that of the last operation of any device."""
    if not own:
        return []
    return union([(max(o.end_seconds for o in own), max(o.end_seconds for o in operations))])


def _awaited(meetings: list[Meeting], device: str, idle: Intervals) -> dict[str, float]:
    """For each other device, how long this one was idle because that one had not come yet."""
    spans = defaultdict(list)
    for m in meetings:
        if m.last_device != device:
            spans[m.last_device].append((m.arrived_seconds[device], m.ready_seconds))
    return {other: seconds(intersection(idle, union(times))) for other, times in spans.items()}


def _mean(device: str, shares: list[Share]) -> Share:
    def mean(name: str) -> float:
        return sum(getattr(s, name) for s in shares) / len(shares)

    others = {d for s in shares for d in s.waited_for}
    waited = {d: sum(s.waited_for.get(d, 0.0) for s in shares) / len(shares) for d in sorted(others)}
    return Share(device, mean("step_seconds"), *(mean(name) for name in (*SHARES, "hidden")), waited_for=waited)


def slowest_tower(shares: list[Share]) -> tuple[str | None, float]:
    """The device the others waited for longest in meetings, and the mean seconds a step each waited for it."""
    waited: dict[str, float] = defaultdict(float)
    for share in shares:
        for device, time in share.waited_for.items():
            waited[device] += time
    if not waited:
        return None, 0.0
    device = max(waited, key=lambda d: waited[d])
    others = [s for s in shares if s.device != device and s.waited_for]
    return device, waited[device] / max(len(others), 1)
