"""One device and N towers side by side: from the same start, step by step, and what to make of the differences."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from ..errors import ModelError
from .experiment import Case, Difference
from .inventory import Entry, layers_of
from .rounding import Rounding, Trajectory, differences
from .twins import ModelTwin, Twin, Values

_HIDES = 0.1  # a bound that is a larger share of what training changed hides what is looked for


def same_start(one: Twin, many: Twin, rows: np.ndarray) -> tuple[Values, bool]:
    """Make both twins complete, and find values from which both can start.

    Returns:
        (values of the entries, whether they are those after one step because this step made variables).

    Raises:
        ModelError: the twins do not have the same variables.
    """
    _build_optimizer(one)
    before = {id(e.variable): value for e, value in zip(one.entries, one.values(), strict=True) if e.kind != "metric"}
    for twin in (one, many):
        twin.warm_up(rows)
    pairs = [[(e.kind, tuple(e.variable.shape)) for e in twin.entries] for twin in (one, many)]
    if pairs[0] != pairs[1]:
        raise ModelError(
            f"two copies of the training have different variables ({len(pairs[0])} and {len(pairs[1])}, or other "
            f"shapes); a function that builds one has to build the same every time"
        )
    values = one.values()
    if any(id(e.variable) not in before for e in one.entries if e.kind != "metric"):
        return values, True
    return [before.get(id(e.variable), value) for e, value in zip(one.entries, values, strict=True)], False


def _build_optimizer(twin: Twin) -> None:
    """Make the optimizer's slots before the first step where that is known to be right: for Keras' own train_step."""
    if not isinstance(twin, ModelTwin) or not all(layer.built for layer in layers_of(twin.model)):
        return
    model = twin.model
    if type(model).train_step is keras.Model.train_step and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
        twin.look()


@dataclass
class Comparison:
    """What was found.

    Attributes:
        one: the one device; its names are those of the report.
        reference: the run on one device.
        rounding: what may differ.
        found: largest difference of each quantity after each step, (steps, quantities).
        apart: {(step, number of entry): tower whose copy differs}.
        rows: of each step's batch.
    """

    one: Twin
    reference: Trajectory
    rounding: Rounding
    found: np.ndarray
    apart: dict[tuple[int, int], int]
    rows: list[int]

    @property
    def entries(self) -> list[Entry]:
        """The variables compared, in the order of the quantities."""
        return self.one.entries

    @property
    def equal(self) -> bool | None:
        """True, False, or None where the comparison means nothing."""
        if self.apart:
            return False
        return None if self.not_comparable else not self.divergences

    @property
    def divergences(self) -> list[tuple[int, Difference]]:
        """(step, what differs): step by step, copies first, then in layer order."""
        beyond = self.found > self.rounding.bound
        found = [(s, self._difference(q, tower)) for (s, q), tower in sorted(self.apart.items())]
        found += [(int(s), self._difference(int(q), None)) for s, q in np.argwhere(beyond) if (s, q) not in self.apart]
        return sorted(found, key=lambda pair: (pair[0], pair[1].tower is None))

    def _difference(self, quantity: int, tower: int | None) -> Difference:
        if quantity >= len(self.entries):
            return Difference("returned", None, self.reference.names[quantity], quantity, tower)
        entry = self.entries[quantity]
        return Difference(entry.kind, entry.layer, entry.path, quantity, tower)

    @property
    def not_comparable(self) -> str | None:
        """Why the numbers mean nothing, or None."""
        drawn = [str(e.layer) for k, e in enumerate(self.entries) if e.kind == "seed" and self._changes[:, k].any()]
        if drawn:
            return (
                f"random layers: {', '.join(dict.fromkeys(drawn))} drew random numbers, which differ from tower to "
                f"tower by intention; switch them off to compare the rest"
            )
        if self.rounding.nondeterministic:
            first = self._difference(self.rounding.nondeterministic[0], None)
            return (
                f"random numbers or something else that is not deterministic: {first.path} differs when one device "
                f"repeats the same steps"
            )
        trained = self._trained
        for step, values in enumerate(self.reference.values):
            wrong = [self.entries[k].path for k in trained if not np.all(np.isfinite(values[k].astype(np.float64)))]
            if wrong:
                return f"{wrong[0]} is not finite on one device after step {step + 1}: a smaller learning rate may help"
        if not self._moved:
            return "nothing is trained: no weight and no optimizer slot changes in these steps"
        if len(self.hidden) == len(self._moved):
            return "rounding is as large as what the training changes: a larger learning rate may help"
        return None

    @property
    def hidden(self) -> list[str]:
        """Paths of the weights and slots that change so little that rounding hides a difference."""
        visible = np.any(self._changes * _HIDES >= self.rounding.bound, axis=0)
        return [self.entries[k].path for k in self._moved if not visible[k]]

    @property
    def _changes(self) -> np.ndarray:
        return self.reference.changes

    @property
    def _trained(self) -> list[int]:
        return [k for k, e in enumerate(self.entries) if e.kind in ("weight", "optimizer") and e.epsilon]

    @property
    def _moved(self) -> list[int]:
        return [k for k in self._trained if self._changes[:, k].any()]

    @property
    def _order(self) -> list[tuple[str | None, str]]:
        """(layer, path) of what depends on the order of rows; state of layers first, which may be why the rest does."""
        found = [self._difference(q, None) for q in self.rounding.order_dependent]
        return [(d.layer, d.path) for d in sorted(found, key=lambda d: d.kind != "state")]

    @property
    def notes(self) -> list[str]:
        """What to know of the bounds."""
        notes: list[str] = []
        if self.hidden and not self.not_comparable:
            few = ", ".join(self.hidden[:4]) + (" …" if len(self.hidden) > 4 else "")
            notes.append(
                f"rounding hides differences in {few}: the bound is over {_HIDES:.0%} of what training changes"
            )
        if self.rounding.order_dependent:
            _, path = self._order[0]
            notes.append(f"depends on the order of the rows on one device: {path}; bounds are from nudged runs alone")
        return notes

    def as_numbers(self) -> dict[str, Any]:
        """The numbers of a `Report`."""
        bound = self.rounding.bound
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(self.found == 0, 0.0, self.found / bound)
        steps = share.argmax(axis=0)
        most = [(float(self.found[s, q]), float(bound[s, q])) for q, s in enumerate(steps)]
        worst = int(share.max(axis=0).argmax())
        numbers = [{"largest_difference": a, "bound": b} for a, b in most]
        apart = {k for _, k in self.apart}
        names = self.reference.names
        return {
            "equal": self.equal,
            "largest_difference": most[worst][0],
            "bound": most[worst][1],
            "worst": names[worst],
            "first_divergence": self._first_divergence(),
            "variables": [
                {"path": e.path, "layer": e.layer, "kind": e.kind, **numbers[k], "copies_equal": k not in apart}
                for k, e in enumerate(self.entries)
            ],
            "metrics": dict(zip(names[len(self.entries) :], numbers[len(self.entries) :], strict=True)),
        }

    def _first_divergence(self) -> dict[str, Any] | None:
        if not self.divergences:
            return None
        step, first = self.divergences[0]
        place = {"layer": first.layer, "variable": first.path, "tower": first.tower}
        return {"step": step + 1, "rows": self.rows[step], **place}

    def case(self, make: Callable[..., tuple[Twin, Twin]], rows: int) -> Case:
        """What the search for the reason starts from."""
        held = ("weight", "state", "seed")
        start = [v for e, v in zip(self.entries, self.reference.start, strict=True) if e.kind in held]
        epsilon = max((e.compute_epsilon for e in self.entries), default=0.0)
        found = [difference for _, difference in self.divergences]
        return Case(make, self.one, start, rows, found, self._order, tolerance=max(1e-3, 8 * epsilon))


def compare(one: Twin, many: Twin, reference: Trajectory, rounding: Rounding, rows: Sequence[np.ndarray]) -> Comparison:
    """Run the towers from the start of the reference, and look at all their copies after every step."""
    apart: dict[tuple[int, int], int] = {}

    def look(step: int) -> None:
        for k, entry in enumerate(many.entries):
            tower = odd_one(many.copies(entry))
            if tower is not None:
                apart[step, k] = tower

    found = differences(many, reference.start, rows, reference, look)
    return Comparison(one, reference, rounding, found, apart, [len(r) for r in rows])


def odd_one(copies: Values) -> int | None:
    """The first tower whose copy is not, to the bit, what most towers have; None if all are equal."""
    contents = [copy.tobytes() for copy in copies]
    [(usual, times)] = Counter(contents).most_common(1)
    return None if times == len(copies) else next(i for i, content in enumerate(contents) if content != usual)
