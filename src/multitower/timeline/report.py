"""Timeline: what was found out about a step, to read, to look at and to save."""

import json
import statistics
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import JobError, TraceError
from .advice import advise
from .breakdown import SHARE_NAMES, SHARES, Share, breakdown, slowest_tower
from .categories import CATEGORIES, NAMES, categories_of, count_by_category
from .chrome import chrome_events, write_chrome_trace
from .critical import Stretch, critical_path, in_one_line
from .graph import NOT_WORK, Graph, graph_that_ran, in_order, read_graphs, tower_devices
from .meetings import meetings
from .page import page
from .pairs import Misplaced, misplaced
from .profile import Operation, Step, incomplete_steps, read_operations, read_steps
from .recording import Recording

_FILES = ("trace.json.gz", "report.html", "timeline.json")


class Timeline:
    """Some steps, operation by operation: where each ran, when, what for, and where the time went.

    Made by `multitower.trace` and `multitower.TraceSteps`.

    Attributes:
        graph: the operations of the partitioned graphs that ran, by name.
        categories: the category of each.
        operations: every run of an operation in the traced steps, by start.
        steps: the traced steps.
        towers: the device of each tower, in tower order.
        devices: those of the towers; where there are no towers, all devices.
        misplaced: backward operations that do not run on the device of their forward operation.
        compared: how many backward operations were looked at for that.
    """

    def __init__(self, graph: Graph, operations: list[Operation], steps: list[Step]):
        self.graph = graph
        self.categories: Mapping[str, str] = categories_of(graph)
        self.operations = operations
        self.steps = steps
        self.towers = list(dict.fromkeys(tower_devices(graph).values()))
        self.devices = self.towers or sorted({operation.device for operation in operations}, key=in_order)
        self.misplaced: list[Misplaced]
        self.misplaced, self.compared = misplaced(graph, self.categories)

    @classmethod
    def of(cls, recording: Recording) -> "Timeline":
        """The timeline of what was recorded."""
        everything = read_graphs(recording.graphs)
        ran = {o.name for o in read_operations(recording.space, everything, dict.fromkeys(everything, ""))}
        graph = graph_that_ran(recording.graphs, ran)
        operations = read_operations(recording.space, graph, categories_of(graph))
        if not operations:
            raise TraceError(
                "no operation of the step's graphs was seen to run; expected a tf.function that TensorFlow's own "
                "runtime runs: compile without XLA (jit_compile=False)"
            )
        steps = read_steps(recording.space)
        broken = incomplete_steps(recording.space)
        whole = [step for step in steps if step.number not in broken] or steps
        numbers = {step.number for step in whole}
        return cls(graph, [o for o in operations if o.step in numbers], whole)

    @cached_property
    def shares(self) -> list[Share]:
        """Where the time of each device went, in the mean over the steps."""
        met = meetings(self.graph, self.operations)
        return breakdown(self.operations, met, self.steps, self.devices)

    @cached_property
    def typical_step(self) -> Step:
        """The step whose duration is the median one: the critical path and the picture are of it."""
        middle = statistics.median_low(step.seconds for step in self.steps)
        return next(step for step in self.steps if step.seconds == middle)

    @cached_property
    def critical_path(self) -> list[Stretch]:
        """The chain of operations that the typical step took as long as."""
        return critical_path(self.graph, self.operations, self.typical_step)

    @cached_property
    def advice(self) -> str:
        """One sentence: what to change first."""
        return advise(self.shares, self.critical_path, self.operations)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, the mean."""
        return statistics.fmean(step.seconds for step in self.steps)

    @property
    def slowest(self) -> str | None:
        """The device the others waited for longest; None where none waits for another one."""
        return slowest_tower(self.shares)[0]

    @cached_property
    def placement(self) -> dict[str, dict[str, int]]:
        """How many operations of each category each device has; constants and arguments are left out."""
        names: dict[str, list[str]] = {device: [] for device in self.devices}
        for node in self.graph.values():
            if node.op not in NOT_WORK:
                names.setdefault(node.device, []).append(node.name)
        return {device: count_by_category(names[device], self.categories) for device in sorted(names, key=in_order)}

    def summary(self) -> list[tuple[str, str]]:
        """The most important, as rows of a table of two columns."""
        return [
            ("steps", f"{len(self.steps)}, {1000 * self.step_seconds:.1f} ms each in the mean"),
            ("critical path", in_one_line(self.critical_path)),
            ("colocated", self._colocated()),
            ("advice", self.advice),
        ]

    def _colocated(self) -> str:
        if not self.compared:
            return "no backward operation was found"
        if not self.misplaced:
            return f"yes: {self.compared} backward operations run on the device of their forward operation"
        first = self.misplaced[0]
        return (
            f"no: {len(self.misplaced)} of {self.compared} backward operations do not run on the device of their "
            f"forward operation, among them {first.name} on {first.device}, forward on "
            f"{', '.join(first.forward_devices)}"
        )

    def placement_table(self) -> tuple[list[str], list[list[str]]]:
        """(head, rows): operations of each device and category."""
        head = ["operations", *(NAMES[c] for c in CATEGORIES)]
        return head, [[device, *(str(counts[c]) for c in CATEGORIES)] for device, counts in self.placement.items()]

    def time_table(self) -> tuple[list[str], list[list[str]]]:
        """(head, rows): milliseconds and percent of the step for each device; the shares add up to the step."""
        head = ["where the time went", *(SHARE_NAMES[name] for name in SHARES), "sum", "reduction, hidden"]
        return head, [self._time_row(share) for share in self.shares]

    def _time_row(self, share: Share) -> list[str]:
        whole = sum(getattr(share, name) for name in SHARES)
        shown = [(getattr(share, name), share.percent(name)) for name in SHARES]
        shown += [(whole, 100 * whole / share.step_seconds), (share.hidden, share.percent("hidden"))]
        return [share.device, *(f"{1000 * time:.2f} ms  {percent:.1f} %" for time, percent in shown)]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the single operations, for JSON."""
        path = [{"device": s.device, "category": s.category, "seconds": s.seconds} for s in self.critical_path]
        return {
            "devices": self.devices,
            "steps": len(self.steps),
            "step_seconds": self.step_seconds,
            "where_the_time_went": {s.device: _share_as_dict(s) for s in self.shares},
            "slowest": self.slowest,
            "critical_path": in_one_line(self.critical_path),
            "critical_path_seconds": sum(part["seconds"] for part in path),
            "advice": self.advice,
            "placement": self.placement,
            "compared": self.compared,
            "misplaced": [vars(m) for m in self.misplaced],
        }

    def as_json(self, **more: Any) -> str:
        """`as_dict` and `more` as one line."""
        return json.dumps(self.as_dict() | more)

    def chrome_events(self) -> list[dict[str, Any]]:
        """The events of the Chrome trace."""
        labels = {device: f"tower {i} on {device}" for i, device in enumerate(self.towers)}
        return chrome_events(self.graph, self.operations, self.steps, labels)

    def html(self) -> str:
        """The report as one HTML page that needs no other file."""
        return page(self)

    def save(self, directory: str | Path) -> dict[str, str]:
        """Write the Chrome trace, the HTML report and the numbers to a new or empty directory.

        Returns:
            The paths of the files by name: trace.json.gz, report.html, timeline.json.

        Raises:
            JobError: the directory has files in it.
        """
        folder = free_directory(directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(folder / "trace.json.gz", self.chrome_events())
        (folder / "report.html").write_text(self.html(), encoding="utf-8")
        (folder / "timeline.json").write_text(self.as_json() + "\n", encoding="utf-8")
        return {name: str(folder / name) for name in _FILES}


def free_directory(directory: str | Path) -> Path:
    """The directory, which does not exist or is empty; nothing is made yet."""
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise JobError(f"{path} is a file; give a new or empty directory for the timeline")
    if path.exists() and any(path.iterdir()):
        raise JobError(f"directory {path} is not empty and is not overwritten; give another one for the timeline")
    return path


def _share_as_dict(share: Share) -> dict[str, Any]:
    names = [*SHARES, "hidden"]
    times = {f"{name}_seconds": getattr(share, name) for name in names}
    return times | {"percent": {name: share.percent(name) for name in names}, "waited_for_seconds": share.waited_for}


def tables(timeline: Timeline) -> Iterable[tuple[list[str], list[list[str]]]]:
    """The tables of a timeline, in the order to be shown."""
    yield timeline.time_table()
    yield timeline.placement_table()
