"""What to do, from measured numbers alone.

input removed: much faster?  ──yes──>  fix the input
      │ no
N devices faster than one?   ──yes──>  train on the N that is fastest; trials in numbers beside it
      │ no
N trials at once do more?    ──yes──>  N trials side by side
      │ no
train on one device
"""

from collections.abc import Sequence

from .report import Advice, Point, Trials

INPUT_GAIN = 1.25  # without its input the training is faster by this: the input is what it waits for
PAYS = 1.1  # less than this is within what a machine varies by


def advise(points: Sequence[Point], trials: Sequence[Trials], kind: str = "GPU", cores: int = 1) -> Advice:
    """The advice for what was measured.

    Args:
        points: configurations; those with an error, and towers without reduction, are passed over.
        trials: trainings side by side.
        kind: "CPU" or "GPU".
        cores: that CPU devices share.

    Raises:
        ValueError: nothing was measured on one device.
    """
    measured = [p for p in points if p.rate and p.speedup and p.placement != "independent"]
    alone = next((p for p in measured if p.devices == 1), None)
    if alone is None:
        raise ValueError("there is no measurement on one device to compare with")
    best = max((p for p in measured if p.devices > 1), key=_gain, default=alone)
    most = max((t for t in trials if t.speedup and t.count > 1), key=_gain, default=None)
    numbers = {"one_device": _rate(alone), f"train_on_{best.devices}": _rate(best), "speedup": _gain(best)}
    if most:
        numbers |= {f"{most.count}_trials": most.examples_per_second or 0.0, "trials_speedup": _gain(most)}
    waits = max((alone, best), key=_input_gain)
    if _input_gain(waits) >= INPUT_GAIN:
        return _fix_input(waits, numbers)
    if best.devices > 1 and _gain(best) >= PAYS:
        return _train(best, alone, most, numbers)
    if most and _gain(most) >= PAYS:
        return _trials(most, best, alone, numbers)
    return _one(best, alone, most, numbers, f"; the {cores} cores are shared by all" if kind == "CPU" else "")


def _rate(point: Point) -> float:
    return point.rate or 0.0


def _gain(measured: Point | Trials) -> float:
    """Examples per second / those of one device."""
    return measured.speedup or 0.0


def _input_gain(point: Point) -> float:
    """What the training gains without its input; 1 where that is within what the measurements vary by."""
    own, removed = point.examples_per_second, point.input_removed
    return removed.median / own.median if own and removed and removed.low > own.high else 1.0


def _fix_input(point: Point, numbers: dict[str, float]) -> Advice:
    removed = point.input_removed.median if point.input_removed else 0.0
    on = "one device" if point.devices == 1 else f"{point.devices} devices"
    text = (
        f"Fix the input pipeline first: on {on} training does {_rate(point):,.0f} examples/s with its input and "
        f"{removed:,.0f} with a batch that is there already ({removed / _rate(point):.2f} ×); "
        f"more devices would wait for the same input. Prefetch, cache or parallelise its dataset."
    )
    return Advice("input", point.devices, text, numbers | {"input_removed": removed})


def _train(best: Point, alone: Point, most: Trials | None, numbers: dict[str, float]) -> Advice:
    text = (
        f"Train on {best.devices} devices, with a global batch of {best.batch_size}: {_rate(best):,.0f} examples/s, "
        f"{_gain(best):.2f} × one device ({_rate(alone):,.0f})."
    )
    if best.placement != "auto" or best.reduce != "auto":
        text += f" That is with placement={best.placement}, reduce={best.reduce}."
    if most and _gain(most) >= PAYS * _gain(best):
        text += f" For a search over many trainings, {most.count} trials side by side do more: {_together(most)}."
    return Advice("train", best.devices, text, numbers)


def _trials(most: Trials, best: Point, alone: Point, numbers: dict[str, float]) -> Advice:
    text = f"Run {most.count} trials side by side, one per device: {_together(most)} ({_rate(alone):,.0f})"
    return Advice("trials", most.count, f"{text}{_not_faster(best)}.", numbers)


def _one(best: Point, alone: Point, most: Trials | None, numbers: dict[str, float], why: str) -> Advice:
    text = f"Train on one device ({_rate(alone):,.0f} examples/s){_not_faster(best)}"
    text += f"; {most.count} trials at once do {_together(most)}" if most else ""
    return Advice("one", 1, f"{text}{why}.", numbers)


def _together(trials: Trials) -> str:
    return f"{trials.examples_per_second or 0:,.0f} examples/s together, {_gain(trials):.2f} × one alone"


def _not_faster(best: Point) -> str:
    return f"; one training on {best.devices} is {_gain(best):.2f} × as fast" if best.devices > 1 else ""
