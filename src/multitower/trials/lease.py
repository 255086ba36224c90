"""Devices that two runners on one machine do not share: a lock for each, which ends with the processes that hold it.

The files lie in a folder of the user's, in XDG_RUNTIME_DIR or the temporary directory. A lock is an open file: guards
inherit it, so a device stays taken until the last process of a runner that was killed has gone.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ..errors import JobError


def lease_folder() -> Path:
    """Where this user's locks are, made if need be, for this user alone."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"multitower-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise JobError(f"{folder} belongs to another user; set XDG_RUNTIME_DIR to a folder of your own")
    return folder


class Lock:
    """An exclusive lock on a file, with a text in it that says who holds it."""

    def __init__(self, path: Path):
        self.path = path
        self._file: int | None = None

    @property
    def fileno(self) -> int | None:
        """The open file, to hand to child processes; None where the lock is not held."""
        return self._file

    def take(self, holder: str) -> bool:
        """Take the lock if it is free."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        os.ftruncate(file, 0)
        os.pwrite(file, holder.encode(), 0)
        self._file = file
        return True

    def holder(self) -> str:
        """What the one who took it last wrote into it."""
        try:
            return self.path.read_text(errors="replace")
        except OSError:
            return ""

    def release(self) -> None:
        """Give it back; child processes that inherited it keep it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Leases:
    """The devices a runner holds: each once, however many of its slots lie on it."""

    def __init__(self, holder: str):
        self._holder = holder
        self._held: dict[str, Lock] = {}

    def take(self, keys: Iterable[str]) -> str | None:
        """Take all of these devices or none; None, or who has the first that is not free."""
        new: list[Lock] = []
        folder = lease_folder()
        for key in keys:
            if key in self._held:
                continue
            lock = Lock(folder / f"{key}.lock")
            if not lock.take(self._holder):
                for taken in new:
                    taken.release()
                return lock.holder() or "another process"
            new.append(lock)
        self._held |= {lock.path.stem: lock for lock in new}
        return None

    def files(self, keys: Iterable[str]) -> list[int]:
        """Open files of the locks of these devices."""
        return [file for key in keys if (file := self._held[key].fileno) is not None]

    def release(self, keys: Iterable[str] | None = None) -> None:
        """Give devices back, by default all."""
        for key in list(self._held) if keys is None else list(keys):
            with contextlib.suppress(KeyError):
                self._held.pop(key).release()
