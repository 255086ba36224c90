"""What came out of a study: each setting once, ranked, as a table, as JSON and as a picture."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from . import store
from .store import Trial

_ORDER = (store.DONE, store.STOPPED, store.FAILED, store.RUNNING, store.WAITING)
STOPPED_CODE = 3  # Ctrl-C once; twice is 130, as for every command


@dataclass(frozen=True)
class Results:
    """The trials of a study, each setting once; what `multitower.trials.run` returns.

    Attributes:
        trials: {"params", "status", "metric", "seconds", "device", "reason", "logs", "seed"} of each setting, in the
            order of the search; with repetitions the mean of the metric, the sum of the seconds, and "repeats", each of
            them.
        best: the entry of `trials` with the best metric among those that are done; None where none is.
        metric: its name.
        mode: "min" or "max", which is best.
        directory: of the study.
        database: the SQLite file in it.
        picture: file of the picture; None where there is nothing to draw, or matplotlib is missing.
        interrupted: the exit code of being asked to stop; 0 for not asked.
    """

    trials: list[dict[str, Any]]
    best: dict[str, Any] | None
    metric: str
    mode: str
    directory: str
    database: str
    picture: str | None = None
    interrupted: int = 0

    @property
    def exit_code(self) -> int:
        """0: every trial done, or stopped early; 1: some failed; 3: asked to stop once; 130, 143: at once."""
        if self.interrupted:
            return self.interrupted
        return int(any(trial["status"] == store.FAILED for trial in self.trials))

    def ranked(self) -> list[dict[str, Any]]:
        """The trials, best first: those done, then those stopped early, failed, and not run."""
        return sorted(self.trials, key=lambda trial: (_ORDER.index(trial["status"]), _loss(trial, self.mode)))

    def as_json(self) -> str:
        """One line of strict JSON."""
        names = ("trials", "best", "metric", "mode", "directory", "database", "picture")
        return json.dumps({name: getattr(self, name) for name in names}, allow_nan=False, default=str)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of the ranked table."""
        names = list(self.trials[0]["params"]) if self.trials else []
        rows = [
            [
                str(rank),
                *(short(trial["params"][name]) for name in names),
                short(trial["metric"]),
                trial["status"],
                "–" if trial["seconds"] is None else f"{trial['seconds']:.1f}",
                trial["device"] or "–",
                trial["reason"] or "",
            ]
            for rank, trial in enumerate(self.ranked(), 1)
        ]
        return ["", *names, self.metric, "status", "seconds", "device", ""], rows


def _loss(trial: dict[str, Any], mode: str) -> float:
    if trial["metric"] is None:
        return math.inf
    return -trial["metric"] if mode == "max" else trial["metric"]


def short(value: Any) -> str:
    """A value for a table."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def collect(
    trials: Sequence[Trial], metric: str | None, mode: str, directory: Path, picture: str | None, interrupted: int
) -> Results:
    """The results of a study's trials as they are now."""
    by_setting: dict[int, list[Trial]] = {}
    for trial in trials:
        by_setting.setdefault(trial.setting, []).append(trial)
    entries = [_entry(directory, repeats) for _, repeats in sorted(by_setting.items())]
    done = [entry for entry in entries if entry["status"] == store.DONE and entry["metric"] is not None]
    best = min(done, key=lambda entry: _loss(entry, mode), default=None)
    database = str(directory / "study.db")
    return Results(entries, best, metric or "val_loss", mode, str(directory), database, picture, interrupted)


def _entry(directory: Path, repeats: Sequence[Trial]) -> dict[str, Any]:
    each = [_facts(directory, trial) for trial in repeats]
    if len(each) == 1:
        return each[0]
    status = max((facts["status"] for facts in each), key=_ORDER.index)
    metrics = [facts["metric"] for facts in each if facts["metric"] is not None]
    seconds = [facts["seconds"] for facts in each if facts["seconds"] is not None]
    return {
        "params": each[0]["params"],
        "status": status,
        "metric": fmean(metrics) if len(metrics) == len(each) else None,
        "seconds": sum(seconds) if seconds else None,
        "device": ", ".join(dict.fromkeys(facts["device"] for facts in each if facts["device"])) or None,
        "reason": next((facts["reason"] for facts in each if facts["reason"]), None),
        "logs": None,
        "repeats": each,
    }


def _facts(directory: Path, trial: Trial) -> dict[str, Any]:
    return {
        "params": trial.params,
        "status": trial.status,
        "metric": trial.metric,
        "seconds": trial.seconds,
        "device": trial.device,
        "reason": trial.reason,
        "logs": str(directory / trial.logs) if trial.logs else None,
        "seed": trial.seed,
    }
