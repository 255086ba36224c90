"""How far rounding alone moves a training: the bound that N towers are held to, measured on one device.

Towers add up the same numbers in another order, and rounding errors grow from step to step by as much as the model
makes them grow. How much that is, the model itself tells. One device trains the same steps again

    repeated    unchanged                                       what differs is not deterministic
    nudged      twice, from weights w · (1 ± ε), random signs   rounding in the step, and how it grows
    permuted    twice, the rows of each batch in another order  rounding in sums over rows

where ε is the spacing of floating-point numbers in the dtype a layer computes in: the smallest change its inputs can
see. For a variable (slot, metric) v after step t, with d_k the largest difference of an element in run k,

    bound_t = 32 · max_k max_(s ≤ t) d_k(s)  +  8 ε · max_(s ≤ t) |v_s|

The 32 allows for having few samples of a random quantity: were it one Gaussian number, four samples would be too small
by that factor once in a million. The second term is what is lost in storing v itself. A nudge is taken off a weight
before it is compared, so that what counts is what the nudge does to its training. Whole numbers (counters) have to be
equal, up to what the runs on one device show.

Source of the idea: backward error analysis (Higham, "Accuracy and stability of numerical algorithms", 2002, 1.5): a
computed result is the exact one of slightly other inputs; and random rounding as in CESTAC (Vignes, 1974).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .twins import Twin, Values

FACTOR = 32
FLOOR = 8


@dataclass
class Trajectory:
    """What a run on one device went through.

    Attributes:
        names: of the quantities: paths of the entries, then names of the numbers that the step returns.
        start: values of the entries before the first step.
        values: for each step, the values of the quantities.
        epsilon: for each quantity, the spacing of numbers next to 1; 0 for whole numbers.
    """

    names: list[str]
    start: Values
    values: list[Values]
    epsilon: np.ndarray

    @cached_property
    def changes(self) -> np.ndarray:
        """Largest change of an element since the start, (steps, quantities); of a returned number, its size."""
        zeros = [np.zeros(())] * (len(self.names) - len(self.start))
        return np.array([[distance(a, b) for a, b in zip(v, self.start + zeros, strict=True)] for v in self.values])

    @cached_property
    def sizes(self) -> np.ndarray:
        """Largest size of an element so far, (steps, quantities)."""
        first = [largest(v) for v in self.start] + [0.0] * (len(self.names) - len(self.start))
        rows = [first, *([largest(v) for v in values] for values in self.values)]
        return np.maximum.accumulate(np.array(rows), axis=0)[1:]


@dataclass
class Rounding:
    """What rounding can do to each quantity.

    Attributes:
        bound: (steps, quantities).
        nondeterministic: numbers of quantities that differ when the same steps are repeated, by more than rounding.
        order_dependent: numbers of quantities that depend on the order of the rows; the bound then rests on the
            nudged runs alone.
    """

    bound: np.ndarray
    nondeterministic: list[int]
    order_dependent: list[int]


def record(twin: Twin, start: Values, rows: Sequence[np.ndarray]) -> Trajectory:
    """Train and keep what every step left."""
    steps: list[Values] = []
    names: list[str] = []

    def keep(step: int, values: Values, returned: dict[str, float]) -> None:
        names[:] = returned
        steps.append([*values, *map(np.asarray, returned.values())])

    twin.run(start, rows, keep)
    own = [entry.epsilon for entry in twin.entries]
    epsilon = np.array([*own, *[max(own, default=0.0)] * len(names)])
    return Trajectory([*(entry.path for entry in twin.entries), *names], start, steps, epsilon)


def differences(
    twin: Twin,
    start: Values,
    rows: Sequence[np.ndarray],
    reference: Trajectory,
    see: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Train and compare every step with the reference: the largest difference of an element, (steps, quantities).

    Args:
        twin: whose run this is.
        start: of this run; where it differs from the reference's, so much is taken off the values.
        rows: row numbers of the batch of each step.
        reference: what to compare with.
        see: called after each step with its number from 0.
    """
    found = np.zeros((len(rows), len(reference.names)))
    nudges = [a.astype(np.float64) - b if a is not b else None for a, b in zip(start, reference.start, strict=True)]
    names = reference.names[len(start) :]

    def compare(step: int, values: Values, returned: dict[str, float]) -> None:
        missing = np.array(np.nan)
        numbers = [np.asarray(returned[name]) if name in returned else missing for name in names]
        offsets = [*nudges, *[None] * len(names)]
        pairs = zip([*values, *numbers], reference.values[step], offsets, strict=True)
        found[step] = [distance(a if o is None else a - o, b) for a, b, o in pairs]
        if see is not None:
            see(step)

    twin.run(start, rows, compare)
    return found


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of an element, infinite where one is not a number and the other is another."""
    if a.size == 0 or np.array_equal(a, b):
        return 0.0
    a, b = (np.asarray(v, np.complex128 if v.dtype.kind == "c" else np.float64) for v in (a, b))
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart)))


def largest(value: np.ndarray) -> float:
    """The largest size of a finite element."""
    sizes = np.abs(np.asarray(value, np.complex128 if value.dtype.kind == "c" else np.float64))
    return float(np.max(sizes[np.isfinite(sizes)], initial=0.0))


def measure(twin: Twin, reference: Trajectory, rows: Sequence[np.ndarray]) -> Rounding:
    """Run the steps of the reference on one device again, disturbed as rounding would, and derive the bound."""
    random = np.random.default_rng(0)
    floor = FLOOR * reference.epsilon * reference.sizes
    nudged = [differences(twin, _nudged(twin, reference.start, random), rows, reference) for _ in range(2)]
    repeated = differences(twin, reference.start, rows, reference)
    permuted = [differences(twin, reference.start, [random.permutation(r) for r in rows], reference) for _ in range(2)]
    nondeterministic = _random(repeated, floor, twin, reference)
    order_dependent = _more_than_rounding(np.max(permuted, axis=0), _bound(nudged, floor), twin, reference)
    runs = [*nudged, repeated] if order_dependent else [*nudged, repeated, *permuted]
    return Rounding(_bound(runs, floor), nondeterministic, order_dependent)


def _bound(runs: Sequence[np.ndarray], floor: np.ndarray) -> np.ndarray:
    return FACTOR * np.maximum.accumulate(np.max(runs, axis=0), axis=0) + floor


def _nudged(twin: Twin, start: Values, random: np.random.Generator) -> Values:
    """The start with every weight one rounding step larger or smaller, at random."""
    values = []
    for entry, value in zip(twin.entries, start, strict=True):
        if entry.kind == "weight":
            signs = random.choice([-1.0, 1.0], size=value.shape)
            value = (value * (1 + entry.compute_epsilon * signs)).astype(value.dtype)
        values.append(value)
    return values


def _random(found: np.ndarray, floor: np.ndarray, twin: Twin, reference: Trajectory) -> list[int]:
    """Quantities that differ between equal runs, if it is not rounding that differs (sums on a GPU, in any order).

    Rounding is all there is in a weight whose gradient is zero but for rounding, and an optimizer may make much of it.
    Random numbers show in what the step returns, or in most weights.
    """
    beyond = _more_than_rounding(found, floor, twin, reference)
    moved = [k for k, e in enumerate(twin.entries) if e.kind == "weight" and reference.changes[:, k].any()]
    weights = [k for k in moved if k in beyond]
    returned = [k for k in beyond if k >= len(twin.entries)]
    return beyond if returned or 2 * len(weights) > len(moved) else []


def _more_than_rounding(found: np.ndarray, bound: np.ndarray, twin: Twin, reference: Trajectory) -> list[int]:
    """Quantities beyond the bound, and by a share of their own change that no rounding makes."""
    share = np.sqrt(max((entry.compute_epsilon for entry in twin.entries), default=0.0))
    beyond = (found > bound) & (found > share * np.maximum.accumulate(reference.changes, axis=0))
    return np.flatnonzero(beyond.any(axis=0)).tolist()
