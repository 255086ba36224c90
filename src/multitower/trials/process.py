"""A trial's process as the runner sees it: started behind a guard, watched, ended.

    folder of the attempt:  order.json -> guard.py -> process.json, stdout.log, stderr.log, run/, result.json

The folder tells all there is to know, so that a later runner can read what became of an attempt it did not start.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .guard import start_time

_GUARD = Path(__file__).with_name("guard.py")
_STOP_SECONDS = 5.0  # between SIGTERM and SIGKILL
_FINISH_SECONDS = 5.0  # for a trial that has written its result when its runner dies


@dataclass(frozen=True)
class Order:
    """What a guard is to run.

    Attributes:
        command: program and arguments.
        cwd: working directory.
        cores: the CPU cores it may use; empty for those of the runner.
        report: file below the attempt's folder that is the result of a job; None for a command.
        metric: name in the line of JSON that is the result of a command; None where none was asked for.
        record: names of the environment whose values are written down with the result.
    """

    command: list[str]
    cwd: str
    cores: list[int]
    report: str | None
    metric: str | None
    record: tuple[str, ...] = ()
    stop_seconds: float = _STOP_SECONDS
    finish_seconds: float = _FINISH_SECONDS


class Attempt(Protocol):
    """A running attempt, on this machine or on another one; what it writes appears in its folder."""

    def begun(self) -> bool:
        """Whether it runs, rather than waits for a place on a cluster."""
        ...

    def ended(self) -> bool:
        """Whether it has ended; its folder is complete then."""
        ...

    def stop(self) -> None:
        """Ask it to end, and everything it started with it; returns at once."""
        ...

    def close(self) -> None:
        """End it without delay, if it has not ended."""
        ...


class LocalAttempt:
    """An attempt on this machine."""

    def __init__(self, folder: Path, order: Order, environment: Mapping[str, str], locks: Sequence[int] = ()):
        """Start it. `locks`: file descriptors of locks to hold until the last of its processes has ended."""
        (folder / "order.json").write_text(json.dumps(asdict(order)), encoding="utf-8")
        self._folder = folder
        with open(folder / "guard.log", "ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(folder / "order.json")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in a terminal is for the runner alone
                pass_fds=locks,
            )

    def begun(self) -> bool:
        return True

    def ended(self) -> bool:
        if self._guard.poll() is None:
            return False
        self._close_pipe()
        if read_result(self._folder) is None:  # the guard was killed
            end_left_over(self._folder)
        return True

    def stop(self) -> None:
        pipe = self._guard.stdin
        if pipe and not pipe.closed:
            with suppress(OSError):
                pipe.write(b"stop\n")
                pipe.flush()

    def close(self) -> None:
        self._close_pipe()
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(_STOP_SECONDS + _FINISH_SECONDS + 1)

    def _close_pipe(self) -> None:
        if self._guard.stdin:
            with suppress(OSError):
                self._guard.stdin.close()


def read_result(folder: Path) -> dict[str, Any] | None:
    """What the guard wrote at the end; None where it has not ended or was killed."""
    return _read(folder / "result.json")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def end_left_over(folder: Path) -> list[int]:
    """Kill the processes of an attempt that are still there, known by number and start time; their numbers."""
    killed = []
    for pid, began in (_read(folder / "process.json") or {}).values():
        if began is not None and start_time(pid) == began:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)  # guard and command both lead a group of their own
                killed.append(pid)
    return killed
