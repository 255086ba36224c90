"""One sentence of advice, from the share of the step that could be won back."""

from .breakdown import SHARES, Share, is_compute, slowest_tower
from .categories import NAMES
from .critical import Stretch, by_category
from .graph import without_call
from .profile import HOST, Operation

_WORTH_PERCENT = 10.0  # a share below that is not worth a change


def advise(shares: list[Share], path: list[Stretch], operations: list[Operation]) -> str:
    """What to change first: about the largest share, in the mean over devices, that is not compute.

    Args:
        shares: of each device that has a tower.
        path: critical path of one step.
        operations: of all traced steps.
    """
    means = {name: sum(s.percent(name) for s in shares) / len(shares) for name in SHARES}
    largest = max((name for name in SHARES if name != "compute"), key=lambda name: means[name])
    if means[largest] < _WORTH_PERCENT:
        return _busy(means["compute"], path)
    return _SENTENCES[largest](means[largest], shares, path, operations)


def _busy(percent: float, path: list[Stretch]) -> str:
    work = [(where, time) for where, time in by_category(path).items() if where[0] != HOST]
    most = f", most of it {NAMES[work[0][0][0]]} on {work[0][0][1]}" if work else ""
    return (
        f"The devices compute {percent:.0f} % of the step{most}: faster or more devices would pay, nothing else would."
    )


def _input(percent: float, *_) -> str:
    return (
        f"The step waits for its input {percent:.0f} % of the time: load and decode in parallel "
        "(dataset.map(…, num_parallel_calls=tf.data.AUTOTUNE)), prefetch, or cache what does not change."
    )


def _waiting(percent: float, shares: list[Share], path: list[Stretch], operations: list[Operation]) -> str:
    device, time = slowest_tower(shares)
    meetings = 100 * time / shares[0].step_seconds
    if device is None or meetings < percent / 2:
        return _alone(percent, path)
    name, more = _excess(device, shares, operations)
    why = f", where {name} takes {1000 * more:.1f} ms a step longer than elsewhere" if more > 0.1 * time else ""
    return (
        f"{device} is the tower the others wait for, {1000 * time:.1f} ms a step, {meetings:.0f} % of the time{why}: "
        "make that tower's work equal to the others', or leave the device out."
    )


def _alone(percent: float, path: list[Stretch]) -> str:
    """Devices wait, but not to meet: one of them does something for all."""
    work = next(((c, d) for c, d in by_category(path) if c != HOST), None)
    what = f", most of all in {NAMES[work[0]]} on {work[1]}" if work else ""
    return (
        f"Devices wait {percent:.0f} % of the time while one of them works for all{what}: have every tower do its own "
        "part (placement='replicated' for the update, reduce='ring' for the sums)."
    )


def _excess(device: str, shares: list[Share], operations: list[Operation]) -> tuple[str, float]:
    """The operation that takes longer on `device` than on the mean of the others, and by how many seconds a step."""
    steps = len({o.step for o in operations}) or 1
    others = {share.device for share in shares} - {device}
    excess: dict[str, float] = {}
    for o in operations:
        if is_compute(o) and (o.device == device or o.device in others):
            weight = 1.0 if o.device == device else -1.0 / len(others)
            name = without_call(o.name)
            excess[name] = excess.get(name, 0.0) + weight * o.seconds / steps
    name = max(excess, key=lambda n: excess[n], default="")
    return name, excess.get(name, 0.0)


def _exposed(percent: float, *_) -> str:
    return (
        f"The reduction over towers takes {percent:.0f} % of the time with nothing to hide it: give every tower more "
        "rows for each update (a larger batch, or micro_batches), or fewer weights to send."
    )


def _copies(percent: float, *_) -> str:
    return (
        f"Copies between devices take {percent:.0f} % of the time: keep what the towers read on every device "
        "(placement='replicated'), and send less of the batch."
    )


def _host(percent: float, *_) -> str:
    return (
        f"No operation runs {percent:.0f} % of the time, while Python and TensorFlow prepare the next ones: raise "
        "steps_per_execution or the batch, and look at what callbacks do on every batch."
    )


_SENTENCES = {"exposed": _exposed, "copies": _copies, "input": _input, "waiting": _waiting, "host": _host}
