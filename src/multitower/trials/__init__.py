"""Parameter searches that use every device: one job per device, each in a process of its own.

    import multitower as mt

    found = mt.trials.run("digits", {"lr": [0.1, 0.01], "width": [32, 64]}, devices="all", metric="val_accuracy")
    found.best["params"]

What a study is and where its files are: `study`; the settings: `space`; where trials run: `slots`, `machine`,
`ray_cluster`; how: `runner`, `process`, `guard`. Nothing here imports TensorFlow: a runner takes no GPU memory.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..device_spec import Spec
from ..errors import JobError
from .live import Silent
from .results import Results
from .search import Asked, How, search
from .space import Choice, Range, make_space

__all__ = ["Choice", "Range", "Results", "run"]


def run(
    job_or_command: str | Path | Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    devices: Spec = None,
    *,
    random: int | None = None,
    repeat: int = 1,
    metric: str | None = None,
    mode: str | None = None,
    run_dir: str | Path | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    halving: int | None = None,
    early_stop: bool = False,
    min_steps: int = 1,
    per_device: int = 1,
    share: bool = False,
    hang_seconds: float | None = 3600.0,
    resume: bool = False,
    retry_failed: bool = False,
    ray: str | None = None,
    watch: Silent | None = None,
) -> Results:
    """Run one trial for each setting, one per device at a time.

        settings ──> trial 0 on GPU:0 ──> trial 2 on GPU:0 ──> …
                 └─> trial 1 on GPU:1 ──> trial 3 on GPU:1 ──> …     best = the setting with the best metric

    Args:
        job_or_command: name of a built-in job or path of a job's file; or program and arguments, with {NAME} where the
            value of a parameter is to stand. None only with `resume`.
        settings: for each parameter its values: a list, or a text as after `--set NAME=`, such as "log:1e-4..1e-1".
        devices: as `multitower.devices` takes them; each is used by itself.
        random: number of settings to draw; None for every combination.
        repeat: trials of each setting, with seeds `seed`, `seed + 1`, …; its metric is their mean.
        metric: what settings are compared by: val_NAME on validation data or NAME on training data of a job; a name in
            the lines of JSON a command prints. None for val_loss, which a command need not print.
        mode: "min" or "max", which is best; None where the metric's name tells.
        run_dir: directory of the study, new or empty; None for runs/trials-NAME-DATE-TIME.
        epochs: passes over the training data of a job; None for the job's own number.
        batch_size: rows of a job's batch; None for the job's own number.
        seed: of the random settings, and of the trials.
        halving: η of successive halving: at 1, η, η² … times `min_steps` a trial goes on if among the best 1/η.
        early_stop: end trials that are worse than the median of the others.
        min_steps: epochs, or lines of JSON, before a trial can be ended early.
        per_device: trials at once on each device.
        share: use GPUs that others use, too.
        hang_seconds: a trial that writes nothing for so long is ended and has failed; None for no limit.
        resume: go on with the study in `run_dir`.
        retry_failed: with `resume`: start failed trials again.
        ray: address of a Ray cluster to run on, "auto" or "ray://HOST:PORT" or HOST:PORT.
        watch: told what happens; None for nobody.

    Returns:
        The trials, the best one, and where the files are. Failed trials are in it; they raise nothing.

    Raises:
        MultitowerError: an argument, the job, the devices or the directory are unusable; nothing was started.

    Example:
        >>> import sys, tempfile
        >>> from multitower import trials
        >>> program = "import json; print(json.dumps({'loss': ({x} - 2) ** 2}))"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = trials.run([sys.executable, "-c", program], {"x": [1, 2, 4]}, metric="loss", run_dir=folder)
        >>> found.best["params"], found.best["metric"]
        ({'x': 2}, 0.0)
    """
    _check(random=random, repeat=repeat, min_steps=min_steps, per_device=per_device, epochs=epochs)
    if halving is not None and halving < 2:
        raise JobError(f"halving={halving!r}: expected a whole number of at least 2, of which one trial goes on")
    if mode not in (None, "min", "max"):
        raise JobError(f"mode={mode!r}: expected 'min' or 'max', which metric is best")
    command = list(job_or_command) if isinstance(job_or_command, Sequence) and _is_command(job_or_command) else None
    asked = Asked(
        job=None if command or job_or_command is None else str(job_or_command),
        command=command,
        space=make_space(settings or {}),
        count=random,
        repeat=repeat,
        metric=metric,
        mode=mode,
        seed=seed,
        halving=halving,
        early_stop=early_stop,
        min_steps=min_steps,
        epochs=epochs,
        batch_size=batch_size,
    )
    how = How(devices, per_device, share, hang_seconds, retry_failed, ray)
    return search(asked, how, run_dir, resume, watch or Silent())


def _is_command(value: Any) -> bool:
    return not isinstance(value, str) and len(value) > 0


def _check(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise JobError(f"{name}={value!r}: expected a whole number of at least 1")
