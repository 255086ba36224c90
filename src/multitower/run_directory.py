"""The directory of a training run: what is in it, and that a run which goes on is the one that began.

run.json            what was asked for: job, parameters, batch size, seed, epochs
checkpoints/        see `checkpoint`
logs/               history.csv, tensorboard/, curves.png, report.json
model.keras         when training is done
.lock               held while a run writes here
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import __version__, storage
from .errors import JobError, StoppedError
from .job import builtin_jobs, find_job
from .parameters import parse_params


@dataclass(frozen=True)
class Settings:
    """What a run was asked to do, as `run.json` keeps it.

    Attributes:
        job: name of a built-in job or absolute path of a Python file.
        params: parameters of the job.
        batch_size: rows of the global batch; None where the job says.
        seed: of random numbers.
        epochs: passes over the training data; None where the job says.
        scale_lr: the rule by which the learning rate follows the batch; None where nothing was said.
    """

    job: str
    params: Mapping[str, Any]
    batch_size: int | None
    seed: int
    epochs: int | None
    scale_lr: str | None = None

    @property
    def source(self) -> str:
        """SHA-256 of the job's file."""
        return hashlib.sha256(find_job(self.job).read_bytes()).hexdigest()


class RunDirectory:
    """The paths of a run's directory, and what is written to it that is neither a log nor a checkpoint."""

    def __init__(self, path: Path):
        self.path = path
        self.logs, self.checkpoints, self.model = path / "logs", path / "checkpoints", path / "model.keras"
        self.history, self.report = self.logs / "history.csv", self.logs / "report.json"
        self._settings = path / "run.json"

    @classmethod
    def new(cls, run_dir: str | Path | None, job: str) -> "RunDirectory":
        """One that does not exist or is empty; nothing is created yet, so that a bad job leaves nothing behind.

        Raises:
            JobError: it is a file, or not empty.
        """
        if run_dir is None:
            run_dir = Path("runs") / f"{job}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = Path(run_dir)
        if path.exists() and not path.is_dir():
            raise JobError(f"run directory {path} is a file; give --run-dir a new or empty directory")
        if path.exists() and any(path.iterdir()):
            raise JobError(
                f"run directory {path} is not empty and is not overwritten; give --run-dir another one, "
                "or --resume this one to go on with its run"
            )
        return cls(path)

    @classmethod
    def of_a_run(cls, path: str | Path) -> "RunDirectory":
        """One in which a run has begun.

        Raises:
            JobError: there is no such run.
        """
        directory = cls(Path(path))
        if not directory._settings.is_file():
            raise JobError(f"--resume {path}: no run has begun there (no {directory._settings.name})")
        return directory

    def make(self) -> None:
        """Create the directory for a new run.

        Raises:
            JobError: it cannot be made, for lack of permission or because another run of the same second was faster.
        """
        try:
            self.logs.mkdir(parents=True)
        except OSError as error:
            raise JobError(
                f"run directory: {self.logs} cannot be made ({error.strerror}); give --run-dir another one"
            ) from error

    def keep(self, settings: Settings) -> None:
        """Write `run.json`, whole or not at all."""
        text = {name: repr(value) for name, value in settings.params.items()}
        kept = {**asdict(settings), "params": text, "source": settings.source, "multitower": __version__}
        kept["job"] = settings.job if settings.job in builtin_jobs() else str(find_job(settings.job))
        unfinished = self._settings.with_suffix(".tmp")
        unfinished.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self._settings)

    def kept(self) -> tuple[Settings, str]:
        """What `keep` wrote: the settings, and the SHA-256 of the job's file then."""
        try:
            kept = json.loads(self._settings.read_text(encoding="utf-8"))
            params = parse_params([f"{name}={text}" for name, text in kept["params"].items()])
            settings = Settings(kept["job"], params, kept["batch_size"], kept["seed"], kept["epochs"], kept["scale_lr"])
            return settings, kept["source"]
        except (ValueError, KeyError, TypeError) as error:
            raise JobError(f"{self._settings} is damaged ({error!r}); the run cannot go on") from error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the directory's lock, and make an error, Ctrl-C too, tell what the directory holds."""
        lock = storage.Lock(self.path)
        try:
            yield
        except StoppedError as stopped:
            stopped.add_note(f"go on with: multitower train --resume {self.path}")
            raise
        except BaseException as error:
            error.add_note(f"{self.path} holds {', '.join(self._files()) or 'no file'}")
            raise
        finally:
            lock.release()

    def _files(self) -> list[str]:
        """What is worth telling: a checkpoint counts as one."""
        files = [file.relative_to(self.path) for file in self.path.rglob("*") if file.is_file()]
        shown = {str(Path(*file.parts[:2])) for file in files if not file.name.startswith(".")}
        return sorted(shown - {self._settings.name})


def resumed(kept: Settings, given: Settings, given_seed: int | None) -> Settings:
    """The settings of a run that goes on: what it began with, and another number of epochs where one is given.

    Args:
        kept: those the run began with.
        given: those asked for now; None and {} where nothing was said.
        given_seed: likewise.

    Raises:
        JobError: they differ; names each difference.
    """
    different = []
    if given.job and find_job(given.job) != find_job(kept.job) and given.source != kept.source:
        different.append(f"job {kept.job}, now {given.job}")
    for name, was, now in (
        ("batch size", kept.batch_size, given.batch_size),
        ("seed", kept.seed, given_seed),
        ("scale-lr", kept.scale_lr or "none", given.scale_lr),
        *((f"parameter {name}", kept.params.get(name), value) for name, value in given.params.items()),
    ):
        if now is not None and now != was:
            different.append(f"{name} {'of the job' if was is None else was}, now {now}")
    if different:
        raise JobError(
            f"the run began with {'; '.join(different)}: a run goes on with what it began with; leave these out, "
            "or start a new run"
        )
    return replace(kept, epochs=given.epochs or kept.epochs)
