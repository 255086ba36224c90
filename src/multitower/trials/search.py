"""One study from its arguments to its results.

arguments ──check──> study.db, job/ ──Runner──> trials/ ──> ranking.json, trials.png
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..device_spec import Spec
from ..errors import JobError
from ..job import builtin_jobs, find_job
from . import picture, results, snapshot, study
from .guard import start_time
from .lease import Lock
from .live import Silent
from .machine import Machine, Place, holder_text
from .process import end_left_over
from .runner import Runner
from .space import Choice, Range, draw, grid
from .store import Store
from .study import DATABASE, Study

_ORPHAN_SECONDS = 15.0  # for the guards of a runner that was killed to end what it left


@dataclass(frozen=True)
class Asked:
    """The arguments of a search that say what is searched; all unset to resume a study by its directory alone."""

    job: str | None = None
    command: Sequence[str] | None = None
    space: Mapping[str, Choice | Range] = field(default_factory=dict)
    count: int | None = None
    repeat: int = 1
    metric: str | None = None
    mode: str | None = None
    seed: int = 0
    halving: int | None = None
    early_stop: bool = False
    min_steps: int = 1
    epochs: int | None = None
    batch_size: int | None = None

    @property
    def named(self) -> bool:
        """Whether they name anything to run."""
        return bool(self.job or self.command)

    def study(self) -> Study:
        """The study they describe, checked without running anything.

        Raises:
            JobError: job, command, parameters, metric or rules are unusable.
        """
        self._check()
        metric = self.metric or ("val_loss" if self.job or self.halving or self.early_stop else None)
        mode = self.mode or (study.mode_of(metric) if metric else "min")
        command = list(self.command) if self.command else None
        rules = (self.halving, self.early_stop, self.min_steps)
        return Study(self._job(), command, os.getcwd(), metric, mode, *rules, self.epochs, self.batch_size)

    def _job(self) -> str | None:
        return self.job if self.job is None or self.job in builtin_jobs() else str(find_job(self.job))

    def _check(self) -> None:
        if self.job and self.command:
            raise JobError(f"a job ({self.job}) and a command ({self.command[0]}) are given; give one of them")
        if not self.space and self.repeat == 1:
            raise JobError("there is nothing to search; give --set NAME=VALUE,VALUE or --repeat K")
        if self.job:
            snapshot.check_names(find_job(self.job), list(self.space))
        elif self.command:
            study.check_command(self.command, list(self.space))
            if self.epochs or self.batch_size:
                raise JobError("--epochs and --batch-size are for jobs; write them into the command")

    def settings(self) -> list[dict[str, Any]]:
        """The settings they describe, each once."""
        return grid(self.space) if self.count is None else draw(self.space, self.count, self.seed)


@dataclass(frozen=True)
class How:
    """How a study is run: may be other at each resumption."""

    devices: Spec = None
    per_device: int = 1
    share: bool = False
    hang_seconds: float | None = 3600.0
    retry_failed: bool = False
    ray: str | None = None


def search(asked: Asked, how: How, run_dir: str | Path | None, resume: bool, watch: Silent) -> results.Results:
    """Make or resume a study, and run it until no trial waits.

    Raises:
        MultitowerError: an argument, a job, the devices or the directory are unusable; nothing was started.
    """
    directory, new = _directory(asked, run_dir, resume)
    described = (asked.study(), asked.settings()) if asked.named else None
    if described and asked.count and len(described[1]) < asked.count:
        watch.told(f"there are only {len(described[1])} different settings, not {asked.count}")
    with closing(_place(how, directory)) as place:  # devices that do not exist are told before anything is written
        directory.mkdir(parents=True, exist_ok=True)
        lock = _lock(directory)
        try:
            place.lock = lock.fileno
            if new and described:
                study.begin(directory, *described, asked.repeat, asked.seed)
            with closing(Store(directory / DATABASE)) as database:
                if described and not new:
                    study.check_same(*described, asked.repeat, asked.seed, database)
                return _run(directory, database, place, how, watch)
        finally:
            lock.release()


def _run(directory: Path, database: Store, place: Place, how: How, watch: Silent) -> results.Results:
    what = study.load(database.study())
    runner = Runner(directory, what, database, place, watch, how.hang_seconds)
    runner.recover()
    if how.retry_failed:
        runner.retry_failed()
    try:
        runner.run()
    finally:
        watch.close()
    path = directory / "trials.png"
    interrupted = _interrupted(runner)
    found = results.collect(database.trials(), what.metric, what.mode, directory, str(path), interrupted)
    problem = picture.draw(found, path)
    if problem:
        watch.told(problem)
        found = replace(found, picture=None)
    (directory / "ranking.json").write_text(found.as_json() + "\n", encoding="utf-8")
    return found


def _interrupted(runner: Runner) -> int:
    """The exit code of a runner that was asked to stop; 0 where it was not."""
    if not runner.asked_to_stop:
        return 0
    return results.STOPPED_CODE if runner.asked_to_stop == 1 else 128 + runner.signal


def _place(how: How, directory: Path) -> Place:
    if how.ray is None:
        return Machine(how.devices, how.per_device, how.share, holder_text(directory))
    try:
        from .ray_cluster import Cluster
    except ImportError as error:
        raise JobError(f"--ray {how.ray}: Ray is missing ({error}); pip install 'multitower[ray]'") from error
    return Cluster(how.ray, how.devices, how.per_device, directory)


def _directory(asked: Asked, run_dir: str | Path | None, resume: bool) -> tuple[Path, bool]:
    """The study's directory, and whether the study is new."""
    if not resume and not asked.named:
        raise JobError("there is nothing to run; give a job, or a command, or --resume with --run-dir")
    if not resume:
        name = Path(asked.job or (asked.command or ["study"])[0]).stem
        return study.free_directory(run_dir, name), True
    if run_dir is None:
        raise JobError("--resume needs --run-dir, the directory of the study")
    directory = Path(run_dir)
    if (directory / DATABASE).exists():
        return directory, False
    if not asked.named:
        raise JobError(f"{directory} holds no study; give what to run, or the directory of a study")
    return study.free_directory(run_dir, "study"), True


def _lock(directory: Path) -> Lock:
    """The study for this process alone; waits for what a killed runner left to end, and ends it.

    Raises:
        JobError: a living runner has it.
    """
    lock, until = Lock(directory / "runner.lock"), time.monotonic() + _ORPHAN_SECONDS
    while not lock.take(f"{os.getpid()} {start_time(os.getpid())}"):
        pid, _, began = lock.holder().partition(" ")
        if pid.isdigit() and str(start_time(int(pid))) == began:
            raise JobError(f"{directory} is being run by process {pid}; wait for it, or end it")
        if time.monotonic() > until:
            for order in directory.glob("trials/*/*/process.json"):
                end_left_over(order.parent)
            until = time.monotonic() + _ORPHAN_SECONDS
        time.sleep(0.05)
    return lock
