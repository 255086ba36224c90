"""What a trial's files say: its metric, its progress, and why it failed.

A job's metric is in its report, `val_NAME` of the validation data and `NAME` of the training data as in Keras'
History, epoch by epoch in its history. A command's is in lines of JSON on standard output, `{"val_loss": 0.2}`: each
such line is a step, the last one the result.
"""

import csv
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPORT = "run/logs/report.json"
HISTORY = "run/logs/history.csv"
_TAIL_BYTES = 1 << 20
_REASON = 300  # characters
_NO_MEMORY = re.compile(
    r"ResourceExhaustedError|RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|CUDNN_STATUS_ALLOC_FAILED|out of memory|"
    r"MemoryError|bad_alloc|Cannot allocate memory",
    re.IGNORECASE,
)


class UnreadableError(Exception):
    """A trial ended well and left no usable metric; the message is the reason."""


def final_metric(folder: Path, metric: str | None, is_job: bool) -> float | None:
    """The result of a trial that has ended; None for a command that was asked for no metric and printed none.

    Raises:
        UnreadableError: there is none, or it is no finite number.
    """
    value = _of_report(folder, metric or "val_loss") if is_job else _of_lines(folder, metric)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnreadableError(f"{metric or 'val_loss'} is {value!r}; expected a finite number")
    return float(value)


def _of_report(folder: Path, metric: str) -> Any:
    try:
        report = json.loads((folder / REPORT).read_bytes())
        values = {f"val_{name}": value for name, value in report["metrics"]["validation"].items()}
        values = {**report, **report["metrics"]["train"], **values}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"no usable report in {folder / REPORT} ({type(error).__name__})") from error
    if metric not in values:
        names = [name for name, value in values.items() if isinstance(value, int | float)]
        raise UnreadableError(f"no metric {metric!r}; the job reports {', '.join(names)}")
    return math.nan if values[metric] is None else values[metric]  # the report has null for nan and infinity


def _of_lines(folder: Path, metric: str | None) -> Any:
    found = list(_json_lines(tail(folder / "stdout.log")))
    values = [line[metric or "val_loss"] for line in found if (metric or "val_loss") in line]
    if values:
        return values[-1]
    if metric is None:
        return None
    names = sorted({name for line in found for name in line})
    told = f"lines of JSON with {', '.join(names)}" if names else "no line of JSON"
    raise UnreadableError(f'no metric {metric!r} on stdout, which has {told}; expected {{"{metric}": NUMBER}}')


def _json_lines(text: str):
    for line in text.splitlines():
        if line.lstrip().startswith("{"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def steps(folder: Path, metric: str, is_job: bool) -> list[float]:
    """The metric after each epoch of a job, or at each line of a command, so far; what is no number is nan."""
    if not is_job:
        return [_number(line[metric]) for line in _json_lines(tail(folder / "stdout.log")) if metric in line]
    try:
        with open(folder / HISTORY, newline="", encoding="utf-8", errors="replace") as file:
            rows = list(csv.DictReader(line for line in file if line.endswith("\n")))
    except (OSError, csv.Error):
        return []
    return [_number(row.get(metric)) for row in rows]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def tail(path: Path, size: int = _TAIL_BYTES) -> str:
    """The last bytes of a file as text; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def growth(folder: Path) -> tuple[int, ...]:
    """Sizes of the files a trial writes while it makes progress; they stay the same where it hangs."""
    files = [folder / name for name in ("stdout.log", "stderr.log", HISTORY)]
    return tuple(file.stat().st_size if file.exists() else 0 for file in files)


def out_of_memory(folder: Path, result: Mapping[str, Any]) -> bool:
    """Whether a failed trial ran out of memory: it says so, or the system killed it as it does then."""
    text = tail(folder / "stderr.log", 1 << 16) + tail(folder / "stdout.log", 1 << 14)
    return result.get("exit_code") in (-9, 137) or bool(_NO_MEMORY.search(text))


def failure(folder: Path, result: Mapping[str, Any] | None) -> str:
    """Why a trial that ended badly did: exit code or signal, and the last line it wrote to standard error."""
    if result is None:
        return "its guard was killed"
    if result.get("error"):
        return f"could not be started: {result['error']}"
    code = result["exit_code"]
    lines = [line.strip() for line in tail(folder / "stderr.log", 1 << 14).splitlines() if line.strip()]
    said = f": {lines[-1][:_REASON]}" if lines else ""
    return f"killed by signal {-code}{said}" if code < 0 else f"exit code {code}{said}"
