"""Trials that are ended early: successive halving, and the median rule for hopeless ones.

    halving, η = 3, from step 1:   after 1, 3, 9, 27 … steps a trial goes on if it is among the best third of those
                                   that have come as far by now
    median rule:                   after each step a trial ends whose best so far is worse than the median, over the
                                   other trials, of their mean up to that step

Both look at trials that have run, are running or were ended early; nothing waits for others, so no device is idle, and
the first trial to reach a rung goes on. Sources: L. Li et al., A System for Massively Parallel Hyperparameter Tuning,
MLSys 2020 (asynchronous successive halving; here running trials are ended rather than paused ones promoted); D. Golovin
et al., Google Vizier, KDD 2017, section 3.2.2 (median stopping rule).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_OTHERS = 3  # trials the median is taken over, at least


@dataclass(frozen=True)
class Rule:
    """When a trial is ended early.

    Attributes:
        halving: η, of which one in η goes on at each rung; None for no halving.
        median: whether the median rule is applied.
        min_steps: epochs, or lines of JSON, before any rule is applied; the first rung.
        larger_is_better: of the metric.
    """

    halving: int | None
    median: bool
    min_steps: int
    larger_is_better: bool

    def verdict(self, number: int, steps: Mapping[int, Sequence[float]], seen: int) -> str | None:
        """Why a running trial is to be ended, None if it goes on.

        Args:
            number: of the trial.
            steps: the metric of each trial after each of its steps; nan counts as the worst.
            seen: steps of this trial that were judged before.
        """
        losses = {n: [self._loss(value) for value in values] for n, values in steps.items()}
        own = losses.get(number, [])
        for step in range(max(seen + 1, self.min_steps), len(own) + 1):
            reason = self._halved(number, losses, step) or self._hopeless(number, losses, step)
            if reason:
                return f"{reason} at step {step}"
        return None

    def _loss(self, value: float) -> float:
        if math.isnan(value):
            return math.inf
        return -value if self.larger_is_better else value

    def _halved(self, number: int, losses: Mapping[int, Sequence[float]], step: int) -> str | None:
        if not self.halving or not _is_rung(step, self.min_steps, self.halving):
            return None
        rung = sorted(values[step - 1] for values in losses.values() if len(values) >= step)
        keep = math.ceil(len(rung) / self.halving)
        if losses[number][step - 1] <= rung[keep - 1]:
            return None
        return f"halving: not among the best {keep} of {len(rung)}"

    def _hopeless(self, number: int, losses: Mapping[int, Sequence[float]], step: int) -> str | None:
        if not self.median:
            return None
        means = [sum(v[:step]) / step for n, v in losses.items() if n != number and len(v) >= step]
        if len(means) < _OTHERS or min(losses[number][:step]) <= median(means):
            return None
        return f"hopeless: worse than the median of {len(means)} others"


def _is_rung(step: int, first: int, factor: int) -> bool:
    while first < step:
        first *= factor
    return first == step
