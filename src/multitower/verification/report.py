"""The report of `multitower.verify`: what was compared, how far apart it was, and why."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

_SHOWN = 12  # variables in the printed table


@dataclass(frozen=True)
class Report:
    """N towers against one device.

    Attributes:
        equal: whether everything was within its bound and all copies were equal to the bit; None where it could not be
            compared, for the reason given.
        largest_difference: absolute, of the variable or number that came nearest to its bound, or exceeded it most.
        bound: what rounding may do to that one, see `multitower.verification.rounding`.
        worst: its path.
        first_divergence: None, or {step: from 1, rows: of that step's batch, layer, variable, tower: whose copy differs
            from the other towers', None where they agree}.
        reason: why it is not equal or could not be compared, None if that cannot be told.
        notes: what to know of the comparison: random layers that ran as in inference, what rounding hides, ….
        variables: {path, layer, kind, largest_difference, bound, copies_equal} of each; kind is "weight", "state",
            "optimizer", "metric" or "seed".
        metrics: {name: {largest_difference, bound}} of the numbers that a step returns, the loss among them.
        devices: names, in tower order.
        steps: updates compared.
        batches: rows of the batch of each step.
        seconds: that all of it took.
    """

    equal: bool | None
    largest_difference: float
    bound: float
    worst: str
    first_divergence: dict[str, Any] | None
    reason: str | None
    notes: list[str]
    variables: list[dict[str, Any]]
    metrics: dict[str, dict[str, float]]
    devices: list[str]
    steps: int
    batches: list[int]
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 equal, 1 not equal, 2 could not be compared."""
        return {True: 0, False: 1, None: 2}[self.equal]

    def as_json(self) -> str:
        """One line of JSON; numbers that are not finite are null."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)

    def summary(self) -> list[tuple[str, str]]:
        """(what, text) for a table of two columns."""
        towers = len(self.devices)
        verdict = {True: "yes, up to rounding", False: "NO", None: "could not be compared"}[self.equal]
        rows = [(f"{towers} {'tower' if towers == 1 else 'towers'} = one device", verdict)]
        if self.reason:
            rows.append(("reason", self.reason))
        if self.first_divergence:
            rows.append(("first divergence", _told(self.first_divergence)))
        beyond = self.largest_difference > self.bound
        rows += [
            (
                "furthest over its bound" if beyond else "nearest to its bound",
                f"{self.worst}: {self.largest_difference:.2g} apart, bound {self.bound:.2g}",
            ),
            ("devices", ", ".join(self.devices)),
            ("rows of each step", ", ".join(map(str, self.batches))),
            *(("note", note) for note in self.notes),
            ("seconds", f"{self.seconds:.1f}"),
        ]
        return rows

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of the metrics and of the variables nearest to their bounds."""
        rows = [
            [name, "returned", _short(m["largest_difference"]), _short(m["bound"]), _share(m), ""]
            for name, m in self.metrics.items()
        ]
        worst_first = sorted(self.variables, key=lambda v: (v["copies_equal"], -_ratio(v)))
        for v in worst_first[:_SHOWN]:
            copies = "equal" if v["copies_equal"] else "DIFFER"
            rows.append([v["path"], v["kind"], *map(_short, (v["largest_difference"], v["bound"])), _share(v), copies])
        left = worst_first[_SHOWN:]
        if left:
            rows.append([f"… {len(left)} more", "", "", "", f"≤ {_ratio(left[0]):.2g}", ""])
        return ["", "kind", "largest difference", "bound", "of bound", "copies"], rows

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.summary())
        lines = [f"{name:{width}}  {text}" for name, text in self.summary()]
        head, rows = self.table()
        widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
        for row in [head, *rows]:
            lines.append("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
        return "\n".join(lines)


def _told(divergence: dict[str, Any]) -> str:
    place = f"step {divergence['step']}, a batch of {divergence['rows']} rows: {divergence['variable']}"
    if divergence["layer"]:
        place += f" of {divergence['layer']}"
    return place if divergence["tower"] is None else f"{place}, on tower {divergence['tower']}"


def _ratio(numbers: dict[str, Any]) -> float:
    difference, bound = numbers["largest_difference"], numbers["bound"]
    return difference / bound if bound else math.inf if difference else 0.0


def _share(numbers: dict[str, Any]) -> str:
    return f"{_ratio(numbers):.2g}"


def _short(value: float) -> str:
    return f"{value:.2g}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
