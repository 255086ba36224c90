"""The results of a study: one SQLite file, `study.db`, that any other tool can read at any time.

    study     name, value (JSON)                        what is searched, how, and for what
    trials    a row for each setting and repetition     params (JSON), status, metric, seconds, device, reason, logs
    attempts  a row for each process that was started   environment (JSON), began, ended, status, reason
    steps     metric after each epoch, or JSON line     of the trial's latest attempt
    results   a view: trials with a column for each parameter

Every change is one transaction, on disk when it returns: after a kill −9 the file is as before the change or after it.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..parameters import literal

WAITING, RUNNING, DONE, FAILED, STOPPED, INTERRUPTED = (
    "waiting",
    "running",
    "done",
    "failed",
    "stopped",  # early, as hopeless
    "interrupted",  # an attempt only: its runner was stopped or killed; the trial waits again
)
_SCHEMA = """
CREATE TABLE study (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE trials (
    number INTEGER PRIMARY KEY, setting INTEGER NOT NULL, repetition INTEGER NOT NULL, seed INTEGER NOT NULL,
    params TEXT NOT NULL, literals TEXT NOT NULL, status TEXT NOT NULL, metric REAL, seconds REAL, device TEXT,
    reason TEXT, logs TEXT,
    attempts INTEGER NOT NULL DEFAULT 0, alone INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE attempts (
    trial INTEGER NOT NULL, attempt INTEGER NOT NULL, status TEXT NOT NULL, device TEXT NOT NULL, logs TEXT NOT NULL,
    environment TEXT, began REAL, ended REAL, exit_code INTEGER, reason TEXT, PRIMARY KEY (trial, attempt)
);
CREATE TABLE steps (trial INTEGER NOT NULL, step INTEGER NOT NULL, metric REAL, PRIMARY KEY (trial, step));
"""


@dataclass(frozen=True)
class Trial:
    """A row of `trials`.

    Attributes:
        number: from 0, in the order of the search.
        setting: number of the setting; its repetitions have the same.
        repetition: 0 … K − 1.
        seed: given to the job or the command.
        params: the setting.
        status: "waiting", "running", "done", "failed" or "stopped" (early).
        metric: its result; of a stopped trial, the last it reported; None where there is none.
        seconds: of the last attempt, from the start of its process to its end.
        device: of the last attempt.
        reason: why it failed or was stopped.
        logs: folder of the last attempt, below the study's.
        attempts: processes started so far.
        alone: whether it has to have its device for itself, as it ran out of memory.
    """

    number: int
    setting: int
    repetition: int
    seed: int
    params: dict[str, Any]
    status: str
    metric: float | None
    seconds: float | None
    device: str | None
    reason: str | None
    logs: str | None
    attempts: int
    alone: bool


@dataclass(frozen=True)
class Outcome:
    """What became of an attempt.

    Attributes:
        status: "done", "failed", "stopped" or "interrupted".
        result: what the guard wrote, with the times; None where it was killed.
        metric: as of a Trial.
        reason: as of a Trial.
        alone: whether the trial, which ran out of memory, is started once more, alone on its device.
    """

    status: str
    result: Mapping[str, Any] | None = None
    metric: float | None = None
    reason: str | None = None
    alone: bool = False

    @property
    def again(self) -> bool:
        """Whether the trial waits to be started again."""
        return self.alone or self.status == INTERRUPTED


class Store:
    """The database of a study, opened by its runner."""

    def __init__(self, path: Path):
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.execute("PRAGMA synchronous=FULL")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def study(self) -> dict[str, Any]:
        """What `create` was given."""
        return {name: json.loads(value) for name, value in self._db.execute("SELECT name, value FROM study")}

    def trials(self) -> list[Trial]:
        """All trials, in their order."""
        names = list(Trial.__dataclass_fields__)
        columns = ", ".join("literals" if name == "params" else name for name in names)
        rows = self._db.execute(f"SELECT {columns} FROM trials ORDER BY number")
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [Trial(**{**row, "params": _params(row["params"]), "alone": bool(row["alone"])}) for row in found]

    def begin(self, trial: Trial, device: str, logs: str) -> None:
        """The next attempt of a trial is about to be started."""
        attempt = trial.attempts + 1
        with self._transaction():
            self._db.execute(
                "UPDATE trials SET status = ?, device = ?, logs = ?, attempts = ?, reason = NULL WHERE number = ?",
                (RUNNING, device, logs, attempt, trial.number),
            )
            self._db.execute(
                "INSERT INTO attempts (trial, attempt, status, device, logs) VALUES (?, ?, ?, ?, ?)",
                (trial.number, attempt, RUNNING, device, logs),
            )
            self._db.execute("DELETE FROM steps WHERE trial = ?", (trial.number,))

    def end(self, number: int, outcome: Outcome) -> None:
        """The latest attempt of a trial has ended."""
        result = outcome.result or {}
        began, ended, code, device = (result.get(name) for name in ("began", "ended", "exit_code", "device"))
        seen = json.dumps(result.get("environment"))
        seconds = ended - began if began and ended else None
        with self._transaction():
            self._db.execute(
                "UPDATE attempts SET status = ?, began = ?, ended = ?, exit_code = ?, reason = ?, environment = ?, "
                "device = coalesce(?, device) "
                "WHERE trial = ? AND attempt = (SELECT max(attempt) FROM attempts WHERE trial = ?)",
                (outcome.status, began, ended, code, outcome.reason, seen, device, number, number),
            )
            self._db.execute(
                "UPDATE trials SET status = ?, metric = ?, seconds = ?, reason = ?, alone = max(alone, ?), "
                "device = coalesce(?, device) WHERE number = ?",
                (
                    WAITING if outcome.again else outcome.status,
                    outcome.metric,
                    seconds,
                    outcome.reason,
                    outcome.alone,
                    device,
                    number,
                ),
            )

    def add_steps(self, number: int, first: int, metrics: Sequence[float]) -> None:
        """Metrics a running trial reported, from step `first` on, counted from 1."""
        rows = [(number, first + i, value if value == value else None) for i, value in enumerate(metrics)]
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", rows)

    def steps(self) -> dict[int, list[float]]:
        """What each trial's latest attempt reported so far, step by step; nan where it was no number."""
        found: dict[int, list[float]] = {}
        for number, metric in self._db.execute("SELECT trial, metric FROM steps ORDER BY trial, step"):
            found.setdefault(number, []).append(float("nan") if metric is None else metric)
        return found

    def retry_failed(self) -> None:
        """Failed trials wait again."""
        with self._transaction():
            self._db.execute("UPDATE trials SET status = ?, alone = 0 WHERE status = ?", (WAITING, FAILED))

    def gaps(self) -> list[float]:
        """Seconds between the end of one attempt and the start of the next, on each device."""
        query = "SELECT device, began, ended FROM attempts WHERE ended IS NOT NULL ORDER BY device, began"
        rows = list(self._db.execute(query))
        return [after[1] - before[2] for before, after in pairwise(rows) if before[0] == after[0]]


def create(path: Path, study: Mapping[str, Any], settings: Sequence[Mapping[str, Any]], repeat: int, seed: int) -> None:
    """Make the database of a study: a trial for each setting and repetition; the whole file appears or nothing."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with closing(sqlite3.connect(part)) as db:
        db.executescript(_SCHEMA)
        db.execute(_view(list(settings[0]) if settings else []))
        db.executemany("INSERT INTO study VALUES (?, ?)", [(name, json.dumps(value)) for name, value in study.items()])
        db.executemany(
            "INSERT INTO trials (number, setting, repetition, seed, params, literals, status) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (setting + repetition * len(settings), setting, repetition, seed + repetition, *_texts(params), WAITING)
                for repetition in range(repeat)
                for setting, params in enumerate(settings)
            ],
        )
        db.commit()
    part.replace(path)


def _texts(params: Mapping[str, Any]) -> tuple[str, str]:
    """A setting as JSON, for other tools, and as Python literals, which tell a tuple from a list."""
    return json.dumps(params), json.dumps({name: repr(value) for name, value in params.items()})


def _params(literals: str) -> dict[str, Any]:
    return {name: literal(text) for name, text in json.loads(literals).items()}


def _view(names: Sequence[str]) -> str:
    columns = "".join(f"json_extract(params, '$.{name}') AS \"param_{name}\", " for name in names)
    return (
        f"CREATE VIEW results AS SELECT number, {columns}seed, status, metric, seconds, device, reason, logs, attempts "
        "FROM trials ORDER BY number"
    )
