"""A study: what is searched, of what, for which metric; and the directory that holds it.

STUDY/study.db       settings and results (store.py)
STUDY/job/           the job as it was at the start (snapshot.py)
STUDY/trials/N/K/    attempt K of trial N: stdout.log, stderr.log, order.json, result.json, run/
STUDY/ranking.json, ranking.txt, trials.png     at the end
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import JobError
from ..job import builtin_jobs, find_job
from ..parameters import did_you_mean, literal
from . import snapshot, store
from .early import Rule
from .readout import REPORT
from .store import Trial

DATABASE = "study.db"
# -P: modules of a job are those of the snapshot, not of the working directory
_TRAIN = (sys.executable, "-P", "-m", "multitower.cli", "train")
_PACKAGES = Path(__file__).resolve().parents[2]  # where multitower is imported from
_LARGER = ("acc", "auc", "f1", "precision", "recall", "iou", "dice", "r2", "examples_per_second", "score", "reward")
_SMALLER = ("loss", "err", "mae", "mse", "rmse", "mape", "msle", "deviance", "perplexity", "crossentropy", "seconds")


@dataclass(frozen=True)
class Study:
    """What a study is; recorded in its database, so that it can be resumed with nothing but its directory.

    Attributes:
        job: name of a built-in job or path of a file; None for a command.
        command: program and arguments with {NAME} for parameters; None for a job.
        cwd: directory trials run in.
        metric: what trials are compared by; None for a command's exit code alone.
        mode: "min" or "max": which metric is best.
        halving, early_stop, min_steps: see `early.Rule`.
        epochs, batch_size: given to a job.
    """

    job: str | None
    command: list[str] | None
    cwd: str
    metric: str | None
    mode: str
    halving: int | None = None
    early_stop: bool = False
    min_steps: int = 1
    epochs: int | None = None
    batch_size: int | None = None

    @property
    def is_job(self) -> bool:
        """Whether `multitower train` runs the trials."""
        return self.job is not None

    @property
    def rule(self) -> Rule | None:
        """When trials are ended early; None for never."""
        if not self.halving and not self.early_stop:
            return None
        return Rule(self.halving, self.early_stop, self.min_steps, self.mode == "max")

    @property
    def report(self) -> str | None:
        """The file below an attempt's folder that holds a job's result."""
        return REPORT if self.is_job else None

    def process_command(self, trial: Trial, device: str, directory: Path, folder: Path) -> list[str]:
        """Program and arguments of a trial's process."""
        if self.command:
            values = {"seed": trial.seed, "trial": trial.number, "device": device, "dir": folder, **trial.params}
            return [fill(part, values) for part in self.command]
        return [*_TRAIN, self._job_file(directory), *self._options(trial, device), "--run-dir", str(folder / "run")]

    def _options(self, trial: Trial, device: str) -> list[str]:
        options = ["--devices", "gpu:0" if "GPU" in device else "cpu:1"]  # its process sees this one alone
        options += ["--seed", str(trial.seed), "--json"]
        options += ["--epochs", str(self.epochs)] if self.epochs else []
        options += ["--batch-size", str(self.batch_size)] if self.batch_size else []
        for name, value in trial.params.items():
            plain = isinstance(value, str) and literal(value) == value
            options += ["--set", f"{name}={value if plain else repr(value)}"]
        return options

    def _job_file(self, directory: Path) -> str:
        job = str(self.job)
        return job if job in builtin_jobs() else str(directory / "job" / Path(job).name)


def fill(text: str, values: Mapping[str, Any]) -> str:
    """Put values in the place of {NAME}; braces around anything else stay."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), text)


def check_command(command: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a parameter that no part of the command takes, and a program that does not exist.

    Raises:
        JobError: with what is missing.
    """
    used = {name for part in command for name in re.findall(r"\{(\w+)\}", part)}
    for name in names:
        if name not in used:
            near = did_you_mean(name, used)
            raise JobError(
                f"parameter {name} is not in the command; write {{{name}}} where its value is to stand{near}"
            )
    program = command[0]
    if "{" not in program and not shutil.which(program):
        raise JobError(f"no program {program!r}; expected one that can be run from here")


def mode_of(metric: str) -> str:
    """Whether the smallest or the largest value of a metric is best, told by its name.

    Raises:
        JobError: the name does not tell.
    """
    words = re.split(r"[_\W]+", metric.lower())
    for mode, parts in (("min", _SMALLER), ("max", _LARGER)):
        if any(word.startswith(part) or word.endswith(part) for word in words for part in parts):
            return mode
    raise JobError(f"metric {metric!r}: its name does not tell whether small or large is good; give --mode min or max")


def free_directory(run_dir: str | Path | None, name: str) -> Path:
    """Where a new study goes, by default runs/trials-NAME-DATE-TIME; nothing is made yet.

    Raises:
        JobError: it is a file, or there is something in it.
    """
    directory = Path(run_dir or Path("runs") / f"trials-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if directory.exists() and not directory.is_dir():
        raise JobError(f"run directory {directory} is a file; give --run-dir a new or empty directory")
    if (directory / DATABASE).exists():
        raise JobError(f"run directory {directory} holds a study; give --resume to go on with it, or another --run-dir")
    if directory.exists() and any(entry.name not in _UNFINISHED for entry in directory.iterdir()):
        raise JobError(f"run directory {directory} is not empty and is not overwritten; give --run-dir another one")
    return directory


_UNFINISHED = ("runner.lock", "job", "study.part", "study.part-journal")  # of a beginning that was broken off


def begin(directory: Path, study: Study, settings: Sequence[Mapping[str, Any]], repeat: int, seed: int) -> None:
    """Take the snapshot, then make the database: where that exists, the study does."""
    if study.job:
        shutil.rmtree(directory / "job", ignore_errors=True)
        snapshot.take(find_job(study.job), directory / "job")
    facts = {**asdict(study), "repeat": repeat, "seed": seed, "python": sys.version.split()[0], "began": time.time()}
    store.create(directory / DATABASE, facts, settings, repeat, seed)


def load(facts: Mapping[str, Any]) -> Study:
    """The study of a database."""
    return Study(**{name: facts[name] for name in Study.__dataclass_fields__})


def check_same(study: Study, settings: Sequence[Mapping[str, Any]], repeat: int, seed: int, found: store.Store) -> None:
    """Refuse to resume a study that is another one than the arguments describe.

    Raises:
        JobError: with the first difference.
    """
    facts = found.study()
    for name, value in {**asdict(study), "repeat": repeat, "seed": seed}.items():
        if name != "cwd" and facts[name] != value:
            raise JobError(
                f"--resume: {name.replace('_', '-')} was {facts[name]!r} and is {value!r} now; give what the study was "
                "begun with, or nothing but --run-dir and --resume"
            )
    trials = found.trials()
    recorded = [trial.params for trial in trials if trial.repetition == 0]
    if recorded != list(settings):
        raise JobError(
            f"--resume: the study has {len(recorded)} settings, the arguments describe {len(settings)} that are not "
            "the same; give what it was begun with, or nothing but --run-dir and --resume"
        )


def environment(base: Mapping[str, str], trial: Trial, folder: Path, job: str | None) -> dict[str, str]:
    """What every trial's process finds in its environment, beside what its device adds; a job's finds multitower."""
    paths = [os.path.abspath(path) for path in base.get("PYTHONPATH", "").split(os.pathsep) if path]
    if job and _PACKAGES.name not in ("site-packages", "dist-packages"):  # those are found without, and last
        paths.append(str(_PACKAGES))
    own = {
        "PYTHONUNBUFFERED": "1",  # progress is seen when it is printed
        "MULTITOWER_TRIAL": str(trial.number),
        "MULTITOWER_SEED": str(trial.seed),
        "MULTITOWER_TRIAL_DIR": str(folder),
    }
    return {**base, **own, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
