"""The process of one configuration, seen from the process that measures; `child` is what runs in it."""

import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 1800  # for one answer: a first step can take minutes
_PACKAGES = str(Path(__file__).parents[2])  # where the child finds multitower


class ChildError(Exception):
    """A configuration that failed: the name of the error in its process, and its message."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}")
        self.name, self.message = name, message


class Child:
    """The process of a configuration, see `child`; ended by `with`.

    Attributes:
        ready: its first answer.
    """

    def __init__(self, wanted: dict[str, Any]):
        self.ready: dict[str, Any] = {}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by __exit__
        path = os.pathsep.join(filter(None, [_PACKAGES, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "multitower.scaling.child", json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def start(self) -> None:
        """Wait until it is ready."""
        self.ready = self.answer()

    def go_on(self) -> None:
        """Let it run a round."""
        with suppress(BrokenPipeError):  # it has ended: its answer says why
            print(file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Its next answer. Synchronises with the process.

        Raises:
            ChildError: the answer is an error, or there is none.
        """
        answers: Any = self._process.stdout  # a pipe, as asked for
        ready, _, _ = select.select([answers], [], [], _PATIENCE_SECONDS)
        line = answers.readline() if ready else ""
        if not line:
            raise ChildError(*self._last_words(bool(ready)))
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"], answer["message"])
        return answer

    def _last_words(self, ended: bool) -> tuple[str, str]:
        if not ended:
            return "TimeoutError", f"no answer within {_PATIENCE_SECONDS} s"
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or [""]
        return "ended", f"the process ended with code {code}; {lines[-1][:300]}"
