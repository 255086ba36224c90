"""Where the time of a step went, on each device.

Every moment of a step is counted once, as the first of these that is true of the device at that moment:

    compute      an operation runs on it
    exposed      it takes part in a collective that all towers have reached
    copies       a tensor is being sent from it or to it
    input        the step waits for its next batch
    waiting      it is in a collective that another tower has not reached, waits for a tensor of another device, or is
                 done while another one is not
    host         none of these: TensorFlow's scheduling, Python between steps

So the shares add up to the whole step. `hidden` is the time a collective works while the device computes: part of
compute, shown beside it.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .categories import is_collective, is_copy, waits_for_input
from .intervals import Intervals, difference, intersection, seconds, union
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
        hidden: seconds in which a collective worked behind compute.
        waited_for: for each other device, seconds waited for it in collectives.
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


def breakdown(operations: Iterable[Operation], steps: list[Step], devices: list[str]) -> list[Share]:
    """The mean over the steps, for each device."""
    by_step = defaultdict(list)
    for operation in operations:
        by_step[operation.step].append(operation)
    shares = [[_share(by_step[step.number], step, device) for step in steps] for device in devices]
    return [_mean(device, of_steps) for device, of_steps in zip(devices, shares, strict=True)]


def _share(operations: list[Operation], step: Step, device: str) -> Share:
    own = [o for o in operations if o.device == device]
    sets = {
        "compute": _spans(o for o in own if is_compute(o)),
        "exposed": union((o.ready_seconds, o.end_seconds) for o in own if o.ready_seconds is not None),
        "copies": _spans(o for o in own if o.op in ("_Send", "_HostSend", "Memcpy")),
        "input": union([*_spans(o for o in operations if waits_for_input(o.op)), *step.input_waits]),
        "waiting": union([*_waits(own), *_idle_at_end(own, operations)]),
    }
    rest: Intervals = [(step.start_seconds, step.end_seconds)]
    found = {}
    for name, moments in sets.items():
        found[name] = seconds(intersection(rest, moments))
        rest = difference(rest, moments)
    hidden = seconds(intersection(sets["compute"], sets["exposed"]))
    return Share(device, step.seconds, **found, host=seconds(rest), hidden=hidden, waited_for=_waited_for(own, device))


def _spans(operations: Iterable[Operation]) -> Intervals:
    return union((o.start_seconds, o.end_seconds) for o in operations)


def _waits(own: list[Operation]) -> Intervals:
    """Before the others are there, in a collective; before a tensor of another device is there."""
    for_towers = [(o.start_seconds, o.ready_seconds) for o in own if o.ready_seconds is not None]
    return union([*for_towers, *_spans(o for o in own if o.op in ("_Recv", "_HostRecv"))])


def _idle_at_end(own: list[Operation], operations: list[Operation]) -> Intervals:
    """From the end of the device's last operation to that of the last operation of any device."""
    if not own:
        return []
    return union([(max(o.end_seconds for o in own), max(o.end_seconds for o in operations))])


def _waited_for(own: list[Operation], device: str) -> dict[str, float]:
    waited: dict[str, float] = defaultdict(float)
    for o in own:
        if o.ready_seconds is not None and o.last_device not in (None, device):
            waited[o.last_device] += o.ready_seconds - o.start_seconds
    return dict(waited)


def _mean(device: str, shares: list[Share]) -> Share:
    def mean(name: str) -> float:
        return sum(getattr(s, name) for s in shares) / len(shares)

    others = {d for s in shares for d in s.waited_for}
    waited = {d: sum(s.waited_for.get(d, 0.0) for s in shares) / len(shares) for d in sorted(others)}
    return Share(device, mean("step_seconds"), *(mean(name) for name in (*SHARES, "hidden")), waited_for=waited)


def slowest_tower(shares: list[Share]) -> tuple[str | None, float]:
    """The device the others waited for longest in collectives, and the mean seconds a step each waited for it."""
    waited: dict[str, float] = defaultdict(float)
    for share in shares:
        for device, time in share.waited_for.items():
            waited[device] += time
    if not waited:
        return None, 0.0
    device = max(waited, key=lambda d: waited[d])
    others = [s for s in shares if s.device != device and s.waited_for]
    return device, waited[device] / max(len(others), 1)
