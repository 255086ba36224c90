"""What is seen while a study runs: a table that is kept up to date on a terminal, a line for each event elsewhere."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from . import store
from .results import short
from .runner import Running
from .store import Trial

_LAST = 10  # ended trials shown


class Silent:
    """Nothing is shown: for programs."""

    def started(self, running: Running) -> None: ...

    def ended(self, trial: Trial) -> None: ...

    def tick(self, trials: list[Trial], running: list[Running], notes: list[str]) -> None: ...

    def told(self, note: str) -> None:
        """Something that is not as it might be expected."""

    def close(self) -> None:
        """Nothing to take away."""


class Lines(Silent):
    """A line when a trial starts or ends, and when what keeps trials waiting changes."""

    def __init__(self, write: Callable[[str], Any]):
        self._write = write
        self._notes: list[str] = []

    def started(self, running: Running) -> None:
        self._write(f"trial {running.trial.number} started on {running.slot.device}: {setting(running.trial)}")

    def ended(self, trial: Trial) -> None:
        metric = "" if trial.metric is None else f", metric {short(trial.metric)}"
        seconds = "" if trial.seconds is None else f" after {trial.seconds:.1f} s"
        reason = f" ({trial.reason})" if trial.reason else ""
        status = "waits again" if trial.status == store.WAITING else trial.status
        self._write(f"trial {trial.number} {status}{seconds}{metric}{reason}")

    def told(self, note: str) -> None:
        self._write(note)

    def tick(self, trials: list[Trial], running: list[Running], notes: list[str]) -> None:
        for note in notes:
            if note not in self._notes:
                self._write(f"waiting: {note}")
        self._notes = notes


class LiveTable(Silent):
    """The running trials with their progress, the last that ended, and how many there are of each kind."""

    def __init__(self, metric: str, epochs: int | None):
        from rich.live import Live

        self._metric, self._epochs = metric, epochs
        self._ended: list[Trial] = []
        self._live = Live(auto_refresh=False)  # refreshed by the runner: no thread beside it
        self._live.start()

    def ended(self, trial: Trial) -> None:
        self._ended = [*self._ended, trial][-_LAST:]

    def tick(self, trials: list[Trial], running: list[Running], notes: list[str]) -> None:
        self._live.update(self._table(trials, running, notes), refresh=True)

    def _table(self, trials: list[Trial], running: list[Running], notes: list[str]) -> Any:
        from rich.markup import escape
        from rich.table import Table

        counts = Counter(trial.status for trial in trials)
        caption = ", ".join(f"{count} {status}" for status, count in counts.items())
        notes = [f"waiting: {note}" for note in notes]
        table = Table("trial", "setting", "status", "device", "progress", self._metric, "seconds", title_justify="left")
        table.caption = escape("\n".join([caption, *notes]))
        for trial in self._ended:
            table.add_row(str(trial.number), escape(setting(trial)), trial.status, trial.device, "", *_numbers(trial))
        for now in running:
            seconds = f"{time.monotonic() - now.began:.0f}"
            last = short(now.steps[-1]) if now.steps else "–"
            status = "ending" if now.ending else "running"
            place = [status, now.slot.device, self._progress(len(now.steps))]
            table.add_row(str(now.trial.number), escape(setting(now.trial)), *place, last, seconds)
        return table

    def _progress(self, steps: int) -> str:
        if not self._epochs:
            return f"step {steps}"
        done = min(10, 10 * steps // self._epochs)
        return f"{'━' * done}{'╌' * (10 - done)} {steps}/{self._epochs}"

    def told(self, note: str) -> None:
        self._live.console.print(note, markup=False)

    def close(self) -> None:
        """Leave the table as it was last."""
        self._live.stop()


def _numbers(trial: Trial) -> tuple[str, str]:
    return short(trial.metric), short(trial.seconds)


def setting(trial: Trial) -> str:
    """A trial's setting on one line."""
    params = " ".join(f"{name}={short(value)}" for name, value in trial.params.items())
    return f"{params} seed={trial.seed}" if trial.repetition or not params else params


def watch_terminal(stdout: Any, metric: str | None, epochs: int | None) -> Silent:
    """A live table where a stream is a terminal, lines where it is not."""
    if stdout.isatty():
        return LiveTable(metric or "val_loss", epochs)
    return Lines(lambda line: print(line, file=stdout, flush=True))
