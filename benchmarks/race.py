"""Competitors taking turns: each lives in a process of its own, and only one of them works at a time.

    start A, first steps of A │ start B, first steps of B │ … │ A B C │ C B A │ A B C │ …

Processes of their own, as memory, threads, the split of the CPU and the keys of collectives belong to a process. Turns,
as the speed of a machine drifts: ratios are those of medians over the same rounds.
"""

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from entrants import Competitor

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])}
PATIENCE_SECONDS = 300  # for one answer
MOST_STEPS = 2000  # in one round


@dataclass
class Result:
    """What came out for one competitor on one network; `error` where it failed, with what there is till then."""

    network: str
    competitor: Competitor
    first_step_seconds: float | None = None
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    error: str | None = None

    @property
    def median(self):
        """Median over rounds of the seconds of a step, None if there is none."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def quartiles(self):
        """First and third quartile of the seconds of a step."""
        if len(self.step_seconds) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.step_seconds, n=4, method="inclusive")
        return first, third


class WorkerError(Exception):
    """A worker failed; the message is the end of what it wrote."""


class Worker:
    """The process of one competitor; closed by `with`."""

    def __init__(self, network, competitor):
        self.result = Result(network, competitor)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by close()
        command = [sys.executable, str(HERE / "worker.py"), network, str(competitor)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=ENVIRONMENT
        )

    def first_steps(self):
        """Wait for the first answer, and choose how many steps a round has."""
        first = self._answer()
        self.result.first_step_seconds, self.result.losses = first["first_step_seconds"], first["losses"]

    def warm_up(self, seconds):
        """Find the number of steps that take about `seconds`."""
        self._ask(2)
        self._steps = 1
        while (took := self._ask(self._steps)) < seconds / 2 and self._steps < MOST_STEPS:
            wanted = int(self._steps * seconds / max(took, 1e-6))
            self._steps = max(1, min(wanted, 8 * self._steps, MOST_STEPS))

    def round(self):
        """Run the steps of a round."""
        self.result.step_seconds.append(self._ask(self._steps) / self._steps)

    def _ask(self, steps):
        try:
            print(steps, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        answer = self._answer()
        self.result.peak_bytes = answer["peak_bytes"]
        return answer["seconds"]

    def _answer(self):
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_SECONDS)
        if not ready:
            raise WorkerError(f"no answer within {PATIENCE_SECONDS} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        return json.loads(line)

    def _last_words(self):
        self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self._process.returncode}"

    def close(self):
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def race(network, competitors, rounds, seconds_per_round):
    """A `Result` for each competitor; a competitor that fails is out, the others go on.

    Args:
        network: its name.
        competitors: of `entrants`.
        rounds: turns of each; 0 for the first steps alone.
        seconds_per_round: that each turn takes, about; at least one step.
    """
    workers, racing = [], []
    try:
        for competitor in competitors:
            worker = Worker(network, competitor)
            workers.append(worker)
            if _goes_on(worker, worker.first_steps) and rounds and _goes_on(worker, worker.warm_up, seconds_per_round):
                racing.append(worker)
        for number in range(rounds):
            for worker in racing if number % 2 == 0 else racing[::-1]:
                if worker.result.error is None:
                    _goes_on(worker, worker.round)
    finally:
        for worker in workers:
            worker.close()
    return [worker.result for worker in workers]


def _goes_on(worker, function, *arguments):
    try:
        function(*arguments)
    except WorkerError as error:
        worker.result.error = str(error)
    return worker.result.error is None
