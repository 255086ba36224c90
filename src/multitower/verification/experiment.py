"""Single steps that show what towers make of the gradient, in copies of a training (see `diagnosis`).

The gradient itself is looked at, not what an optimizer makes of it: every Keras optimizer of the copies is replaced by
w ← w − g, and one step is taken on 2N + 1 rows, which are unevenly split:

    whole      one device, all rows
    parts[i]   one device, the rows of tower i only
    towers[i]  tower i of N
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .inventory import optimizers_of
from .twins import Twin, Values

Prepare = Callable[[Any], Any]
Update = list[np.ndarray]


@dataclass(frozen=True)
class Difference:
    """A quantity that differs.

    Attributes:
        kind: as in `inventory.Entry`; "returned" for a number that the step returns.
        layer: that holds it, None for a returned number.
        path: its name.
        number: its position among the quantities compared; weights and states come first.
        tower: whose copy differs from the other towers'; None where all towers have the same.
    """

    kind: str
    layer: str | None
    path: str
    number: int
    tower: int | None


@dataclass
class Case:
    """What is known when the reason is looked for.

    Attributes:
        make: makes twins, (one device, towers), after changing what they use by the function it is given.
        one: the one device of the comparison, which has the names that the report uses.
        start: value of each weight, state and seed, in order.
        rows: B, rows of the batch there is.
        differences: everything that differs, the first first; those of copies before the others of the same step.
        order_dependent: (layer, path) of what depends on the order of the rows on one device.
        tolerance: relative difference of gradients that rounding can make.
    """

    make: Callable[[Prepare], tuple[Twin, Twin]]
    one: Twin
    start: Values
    rows: int
    differences: list[Difference]
    order_dependent: list[tuple[str | None, str]]
    tolerance: float


@dataclass
class Experiment:
    """Single steps of w ← w − g from the start of the case: what each side adds to its weights.

    Args:
        case: what is known.
        prepare: changes the model of both sides before they are made.

    Attributes:
        whole: of one device on all rows.
        parts: of one device on the rows of each tower.
        towers: of each tower; equal where gradients are reduced.
        state_apart: numbers of the entries, other than weights, that have different values on the towers.
    """

    case: Case
    prepare: Prepare
    whole: Update = field(init=False)
    parts: list[Update] = field(init=False)
    towers: list[Update] = field(init=False)
    state_apart: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.one, self._many = self.case.make(self.prepare)
        count = len(self._many.copies(self._many.entries[0]))
        self.rows = np.arange(2 * count + 1) % self.case.rows
        self.shards = np.array_split(self.rows, count)
        for twin in (self.one, self._many):
            twin.warm_up(self.rows)
        self.whole = self.on_one_device(self.rows)
        self.parts = [self.on_one_device(shard) for shard in self.shards]
        self.towers, self.state_apart = self._on_towers()

    def on_one_device(self, rows: np.ndarray) -> Update:
        """What one device adds to the weights in a step on these rows."""
        self.one.run(self._start(self.one), [rows], lambda *_: None)
        return self._update([self.one.copies(e)[0] for e in self.one.entries])

    def _on_towers(self) -> tuple[list[Update], set[int]]:
        self._many.run(self._start(self._many), [self.rows], lambda *_: None)
        copies = [self._many.copies(entry) for entry in self._many.entries]
        apart = {
            k
            for k, (entry, values) in enumerate(zip(self._many.entries, copies, strict=True))
            if entry.kind != "weight" and len({v.tobytes() for v in values}) > 1
        }
        return [self._update([values[i] for values in copies]) for i in range(len(copies[0]))], apart

    def _start(self, twin: Twin) -> Values:
        """The start of the case where it has a value; optimizers and metrics as they are."""
        given = iter(self.case.start)
        held = ("weight", "state", "seed")
        return [next(given) if e.kind in held else v for e, v in zip(twin.entries, twin.values(), strict=True)]

    def _update(self, values: Values) -> Update:
        weights = [k for k, entry in enumerate(self.one.entries) if entry.kind == "weight"]
        starts = dict(zip(self._held(), self.case.start, strict=True))
        return [np.asarray(values[k], np.float64) - np.asarray(starts[k], np.float64) for k in weights]

    def _held(self) -> list[int]:
        return [k for k, entry in enumerate(self.one.entries) if entry.kind in ("weight", "state", "seed")]

    @property
    def agree(self) -> bool:
        """Whether all towers add the same to their weights."""
        return all(self.near(tower, self.towers[0]) for tower in self.towers)

    def near(self, a: Update, b: Update) -> bool:
        """Whether a is b up to rounding, for every variable."""
        limit = self.case.tolerance
        scale = limit * limit * _size(b)
        return all(
            np.array_equal(x, y, equal_nan=True) or _size([x - y]) <= limit * _size([y]) + scale
            for x, y in zip(a, b, strict=True)
        )


def plain_gradient(root: Any) -> None:
    """Make every optimizer w ← w − g: those of a model or layer, or the optimizer itself."""
    for owner, name, _ in optimizers_of(root):
        setattr(owner, name, keras.optimizers.SGD(1.0))
    if isinstance(root, keras.Optimizer):
        root.update_step = _subtract
        root.clipnorm = root.clipvalue = root.global_clipnorm = root.weight_decay = None


def _subtract(gradient: Any, variable: Any, learning_rate: Any) -> None:
    variable.assign_sub(tf.convert_to_tensor(gradient))


def _size(update: Update) -> float:
    return float(np.sqrt(sum(np.sum(np.square(part)) for part in update)))


def times(factor: float, update: Update) -> Update:
    """factor · update."""
    return [factor * part for part in update]


def total(updates: Sequence[Update], weights: Sequence[float] | None = None) -> Update:
    """Σ_i weights[i] · updates[i]."""
    factors = weights if weights is not None else [1.0] * len(updates)
    scaled = [times(f, u) for f, u in zip(factors, updates, strict=True)]
    return [functools.reduce(np.add, parts) for parts in zip(*scaled, strict=True)]


def ratio(a: Update, b: Update) -> float:
    """The c for which c · b is nearest to a; 0 where b is."""
    below = sum(float(np.sum(y * y)) for y in b)
    return sum(float(np.sum(x * y)) for x, y in zip(a, b, strict=True)) / below if below else 0.0
