"""The result of `multitower.measure`: what was measured in each configuration, and the advice."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Spread:
    """Examples per second over the windows of a measurement: median, and first and third quartile."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """One configuration; `error` says why it could not be measured, and the other numbers are None then.

    Attributes:
        devices: N.
        scaling: "strong" (the global batch of one device, divided over N) or "weak" (N times as large).
        placement: what was asked of Trainer.
        reduce: what was asked of Trainer.
        placement_used: what Trainer chose.
        reduce_used: what Trainer chose; "none" for one device.
        batch_size: B, rows of the global batch.
        examples_per_second: with the job's own input.
        input_removed: with the same batch repeated from memory.
        first_step_seconds: model and Trainer made, step traced, optimised and run once.
        meetings: how often a tower meets the others in a step; None for one device.
        meeting_bytes: what one tower gives to these in a step.
        peak_bytes: most memory used, by device; "process" is resident memory of the whole process.
        one_device: examples per second of one device; on CPU devices measured in turns with this configuration.
        speedup: examples per second / those of one device.
        efficiency: speedup / N.
        of_bound: speedup / that of N towers that never meet.
        error: what went wrong, None where nothing did.
    """

    devices: int
    scaling: str
    placement: str
    reduce: str
    placement_used: str | None = None
    reduce_used: str | None = None
    batch_size: int | None = None
    examples_per_second: Spread | None = None
    input_removed: Spread | None = None
    first_step_seconds: float | None = None
    meetings: int | None = None
    meeting_bytes: int | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)
    one_device: Spread | None = None
    speedup: float | None = None
    efficiency: float | None = None
    of_bound: float | None = None
    error: str | None = None

    @property
    def rate(self) -> float | None:
        """Median examples per second; None where it could not be measured."""
        return self.examples_per_second.median if self.examples_per_second else None


@dataclass(frozen=True)
class Trials:
    """N trainings at once, each on one device in a process of its own.

    Attributes:
        count: N.
        examples_per_second: of all together; None where they failed.
        speedup: that / examples per second of one training alone.
        error: what went wrong.
    """

    count: int
    examples_per_second: float | None = None
    speedup: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        action: "train" on N devices, "trials" side by side, fix the "input", or train on "one" device.
        devices: N of it.
        text: in plain words, with the numbers.
        numbers: what it rests on.
    """

    action: str
    devices: int
    text: str
    numbers: dict[str, float]


@dataclass(frozen=True)
class Scaling:
    """What more devices give.

    Attributes:
        job: its name.
        kind: "CPU" or "GPU".
        cores: CPU cores this process may use.
        points: every configuration.
        trials: trainings side by side.
        advice: what to do.
        notes: what to know of the numbers.
        seconds: that all of it took.
    """

    job: str
    kind: str
    cores: int
    points: list[Point]
    trials: list[Trials]
    advice: Advice
    notes: list[str]
    seconds: float

    def as_json(self) -> str:
        """One line of JSON; what could not be measured is null."""
        return json.dumps(asdict(self), allow_nan=False)

    def summary(self) -> list[tuple[str, str]]:
        """(what, text) for a table of two columns."""
        rows = [("advice", self.advice.text), ("devices", f"{self.kind}, {self.cores} cores")]
        rows += [("note", note) for note in self.notes]
        for t in self.trials:
            rate = f"{t.examples_per_second or 0:,.0f} examples/s together, {_short(t.speedup)} × one alone"
            rows.append((f"{t.count} trials side by side", f"failed: {t.error}" if t.error else rate))
        failed = [p for p in self.points if p.error]
        rows += [(f"failed: {p.devices} × {p.scaling}, {p.placement}, {p.reduce}", str(p.error)) for p in failed]
        return [*rows, ("seconds", f"{self.seconds:.1f}")]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of the configurations."""
        head = [
            "N",
            "scaling",
            "placement, reduce",
            "batch",
            "examples/s (quartiles)",
            "no input",
            "speed-up",
            "efficiency",
        ]
        head += ["of bound", "meetings", "MB", "peak MiB", "first step s"]
        return head, [_row(p) for p in self.points if not p.error]

    def __str__(self) -> str:
        head, rows = self.table()
        widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
        lines = [f"{name}: {text}" for name, text in self.summary()]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]
        return "\n".join(lines)


def _row(p: Point) -> list[str]:
    rate, removed, megabytes = p.examples_per_second, p.input_removed, _scaled(p.meeting_bytes, 1e-6)
    return [
        str(p.devices),
        p.scaling,
        f"{_chosen(p.placement, p.placement_used)}, {_chosen(p.reduce, p.reduce_used)}",
        str(p.batch_size),
        f"{rate.median:,.0f} ({rate.low:,.0f}–{rate.high:,.0f})" if rate else "–",
        f"{removed.median:,.0f}" if removed else "–",
        _short(p.speedup),
        _short(p.efficiency),
        _short(p.of_bound),
        "–" if p.meetings is None else str(p.meetings),
        _short(megabytes),
        " + ".join(f"{b / 2**20:.0f}" for b in p.peak_bytes.values()),
        _short(p.first_step_seconds),
    ]


def _chosen(asked: str, used: str | None) -> str:
    return f"{asked}: {used}" if asked == "auto" and used else asked


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one number, by linear interpolation."""
    ordered = sorted(values)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return Spread(quantile(0.5), quantile(0.25), quantile(0.75))
