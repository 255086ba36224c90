"""The runner of a study: starts trials where there is room, follows them, records what became of them.

    waiting ──start──> running ──> done | failed | stopped (early)
       ^                  │
       └── interrupted, or out of memory for the first time: once more, alone on the device

What is recorded is recorded before it is acted on: a runner that is killed at any moment leaves a database from which
`recover` goes on. Nothing here imports TensorFlow; the runner takes no GPU memory.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from . import readout, store
from .machine import Place, Slot
from .process import Attempt, Order, end_left_over, read_result
from .slots import RECORDED
from .store import Outcome, Store, Trial
from .study import Study, environment

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5  # between looks at files, locks and the terminal


@dataclass
class Running:
    """A trial that runs.

    Attributes:
        trial: as it was when it was started.
        slot: where it runs.
        folder: of the attempt.
        attempt: its process.
        began: when it was started, by the monotonic clock.
        steps: metrics it reported so far.
        judged: how many of them the rules for ending early have seen.
        ending: status and reason it is being ended with; None while it may run on.
    """

    trial: Trial
    slot: Slot
    folder: Path
    attempt: Attempt
    began: float
    steps: list[float] = field(default_factory=list)
    judged: int = 0
    ending: tuple[str, str] | None = None
    growth: tuple[int, ...] = ()
    grew: float = 0.0


class Watch(Protocol):
    """Who is told what happens."""

    def started(self, running: Running) -> None: ...

    def ended(self, trial: Trial) -> None: ...

    def tick(self, trials: list[Trial], running: list[Running], notes: list[str]) -> None: ...


class Runner:
    """Runs the trials of one study in the slots of one place.

    Attributes:
        asked_to_stop: 0: no; 1: running trials end, no other is started; 2: running ones are ended.
        signal: that asked last; 0 for none.
    """

    def __init__(
        self, directory: Path, study: Study, database: Store, place: Place, watch: Watch, hang_seconds: float | None
    ):
        self._directory, self._study, self._store = directory.resolve(), study, database
        self._place, self._watch, self._hang_seconds = place, watch, hang_seconds
        self._running: dict[int, Running] = {}  # by slot
        self._obstacles: dict[int, str] = {}
        self._looked = 0.0
        self._trials = database.trials()
        self.asked_to_stop = 0
        self.signal = 0

    def run(self) -> None:
        """Run until no trial waits, or until asked to stop."""
        try:
            with self._signals():
                while self._step():
                    time.sleep(_POLL_SECONDS)
        finally:
            for running in self._running.values():
                running.attempt.close()
            self._place.close()

    def _step(self) -> bool:
        look = time.monotonic() - self._looked >= _LOOK_SECONDS
        for running in list(self._running.values()):
            if running.attempt.ended():
                self._finish(running)
            elif look:
                self._look_at(running)
        if self.asked_to_stop > 1:
            self._stop_all()
        elif not self.asked_to_stop:
            self._fill(look)
        if look:
            self._looked = time.monotonic()
            self._watch.tick(self._trials, list(self._running.values()), sorted(self._obstacles.values()))
        return bool(self._running) or (not self.asked_to_stop and bool(self._waiting()))

    def _waiting(self) -> list[Trial]:
        return [trial for trial in self._trials if trial.status == store.WAITING]

    def _end(self, running: Running, outcome: Outcome) -> None:
        self._store.end(running.trial.number, outcome)
        del self._running[running.slot.number]
        self._trials = self._store.trials()
        self._watch.ended(self._trials[running.trial.number])

    # Starting

    def _fill(self, look: bool) -> None:
        """Start waiting trials in free slots, those on devices with the fewest trials first."""
        if look:
            self._obstacles.clear()  # to be asked again
        waiting = self._waiting()
        busy = Counter(running.slot.device for running in self._running.values())
        free = [slot for slot in self._place.slots if slot.number not in self._running]
        for slot in sorted(free, key=lambda slot: (busy[slot.device], slot.number)):
            trial = self._next(slot, waiting)
            if trial and slot.number not in self._obstacles:
                obstacle = self._place.obstacle(slot, busy[slot.device])
                if obstacle:
                    self._obstacles[slot.number] = obstacle
                    continue
                self._start(trial, slot)
                waiting.remove(trial)
                busy[slot.device] += 1
            elif not waiting and not busy[slot.device]:
                self._place.release(slot)

    def _next(self, slot: Slot, waiting: list[Trial]) -> Trial | None:
        """The trial to start in a slot; none where the slot's memory is kept for a trial that needs it all."""
        beside = [running for running in self._running.values() if running.slot.memory == slot.memory]
        if any(running.trial.alone for running in beside):
            return None
        alone = [trial for trial in waiting if trial.alone]
        if alone and slot.memory == self._kept_for(alone[0]):
            return None if beside else alone[0]
        return next((trial for trial in waiting if not trial.alone), None)

    def _kept_for(self, trial: Trial) -> str:
        """The memory a trial waits for to be empty: where it ran out of it."""
        return next((s.memory for s in self._place.slots if s.device == trial.device), self._place.slots[0].memory)

    def _start(self, trial: Trial, slot: Slot) -> None:
        name = Path("trials") / str(trial.number) / str(trial.attempts + 1)
        folder = self._directory / name
        folder.mkdir(parents=True, exist_ok=True)
        base = environment(os.environ, trial, folder, self._study.job)
        seen = self._place.environment(slot, base)
        self._store.begin(trial, slot.device, str(name))
        command = self._study.process_command(trial, slot.device, self._directory, folder)
        order = Order(command, self._study.cwd, [], self._study.report, self._study.metric, RECORDED)
        attempt = self._place.start(slot, folder, order, seen)
        now = time.monotonic()
        running = Running(trial, slot, folder, attempt, now, grew=now)
        self._running[slot.number] = running
        self._trials = self._store.trials()
        self._watch.started(running)

    # Following

    def _look_at(self, running: Running) -> None:
        """Note progress; end a trial that makes none, or that others have left behind."""
        now, growth = time.monotonic(), readout.growth(running.folder)
        if not running.attempt.begun():
            running.grew = now
        if growth != running.growth:
            running.growth, running.grew = growth, now
            self._note_steps(running)
        if running.ending:
            return
        if self._hang_seconds and now - running.grew > self._hang_seconds:
            self._stop(running, store.FAILED, f"hangs: no output for {self._hang_seconds:g} s")
        elif self._study.rule and len(running.steps) > running.judged:
            reason = self._study.rule.verdict(running.trial.number, self._store.steps(), running.judged)
            running.judged = len(running.steps)
            if reason:
                self._stop(running, store.STOPPED, reason)

    def _note_steps(self, running: Running) -> None:
        steps = readout.steps(running.folder, self._study.metric or "val_loss", self._study.is_job)
        if len(steps) > len(running.steps):
            first = len(running.steps)
            self._store.add_steps(running.trial.number, first + 1, steps[first:])
            running.steps = steps

    def _stop(self, running: Running, status: str, reason: str) -> None:
        running.ending = (status, reason)
        running.attempt.stop()

    def _stop_all(self) -> None:
        for running in self._running.values():
            if not running.ending:
                self._stop(running, store.INTERRUPTED, "the runner was stopped")

    def _finish(self, running: Running) -> None:
        """Record the end of an attempt."""
        result = read_result(running.folder)
        self._note_steps(running)
        if running.ending and not (result and result["exit_code"] == 0):
            status, reason = running.ending
            metric = running.steps[-1] if status == store.STOPPED and running.steps else None
            self._end(running, Outcome(status, result, metric, reason))
        else:
            self._end(running, self._outcome(running.trial, running.folder, result))

    def _outcome(self, trial: Trial, folder: Path, result: Any) -> Outcome:
        """What became of an attempt that nobody ended."""
        if result and result["exit_code"] == 0:
            try:
                metric = readout.final_metric(folder, self._study.metric, self._study.is_job)
            except readout.UnreadableError as error:
                return Outcome(store.FAILED, result, reason=str(error))
            return Outcome(store.DONE, result, metric)
        reason = readout.failure(folder, result)
        if not (result and readout.out_of_memory(folder, result)):
            return Outcome(store.FAILED, result, reason=reason)
        where = ", alone on the device too" if trial.alone else ""
        return Outcome(store.FAILED, result, reason=f"out of memory{where}: {reason}", alone=not trial.alone)

    # After a runner that was killed

    def recover(self) -> None:
        """Record what became of the trials that ran when the last runner died; end what is left of them."""
        for trial in [trial for trial in self._trials if trial.status == store.RUNNING]:
            folder = self._directory / str(trial.logs)
            end_left_over(folder)
            self._store.end(trial.number, self._found(trial, folder))
        self._trials = self._store.trials()

    def _found(self, trial: Trial, folder: Path) -> Outcome:
        result = read_result(folder)
        if result and result.get("ended_by") not in ("orphan", "runner"):
            return self._outcome(trial, folder, result)
        if self._study.is_job:  # it may have been killed while it was leaving, its report written
            outcome = self._outcome(trial, folder, {**(result or {}), "exit_code": 0})
            if outcome.status == store.DONE:
                return outcome
        return Outcome(store.INTERRUPTED, result, reason="the runner was killed")

    def retry_failed(self) -> None:
        """Have the failed trials wait again."""
        self._store.retry_failed()
        self._trials = self._store.trials()

    # Signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C once: nothing new is started; twice, or the wish to terminate: running trials are ended."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._asked) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked(self, number: int, _: Any) -> None:
        self.asked_to_stop = 2 if number != signal.SIGINT else self.asked_to_stop + 1
        self.signal = number
