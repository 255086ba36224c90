"""Checkpoints as directories on disk: written whole or not at all, checked when read, the last few kept.

    directory/
      000007-epoch-3-batch-0/     a checkpoint; the number in front counts them, the rest is for people to read
        manifest.json             what it holds, and size and SHA-256 of every other file
        variables.index …         tf.train.Checkpoint's files
      .writing-…/                 one being written: it gets its name when all of it has reached the disk
      .lock                       held by the run that writes here

A rename is atomic, so a process that is killed leaves a `.writing-…` behind and every checkpoint as it was.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import CheckpointError

FORMAT = "multitower checkpoint 1"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"(\d{6,})-.+")
_UNFINISHED = (".writing-", ".deleting-")


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a directory, oldest first, whether they can be used or not."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.split("-")[0])


@contextmanager
def written(directory: Path, label: str, manifest: Mapping[str, Any]) -> Iterator[tuple[Path, Path]]:
    """A new checkpoint: the block puts its files in the first path; it is the second one when all went well.

    Args:
        directory: where the checkpoints are; made if it does not exist.
        label: what its name says behind the number.
        manifest: what is noted in it beside the files.

    Raises:
        OSError: it could not be written; nothing of it is left, and those before it are as they were.
    """
    directory.mkdir(parents=True, exist_ok=True)
    before = checkpoints(directory)
    final = directory / f"{_number(before[-1]) + 1 if before else 1:06}-{label}"
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED[0], dir=directory))
    try:
        yield unfinished, final
        noted = {"format": FORMAT, **manifest, "files": {f.name: _digest(f) for f in sorted(unfinished.iterdir())}}
        (unfinished / _MANIFEST).write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        unfinished.rename(final)
        _sync(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _digest(file: Path) -> dict[str, Any]:
    with open(file, "rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or a directory's list of files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_last(directory: Path, count: int) -> None:
    """Delete all but the newest `count`. One half deleted is no checkpoint any more: it loses its name first."""
    for path in checkpoints(directory)[:-count]:
        doomed = path.with_name(f"{_UNFINISHED[1]}{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what a killed process left half written or half deleted; only for who holds the lock."""
    for path in directory.iterdir():
        if path.name.startswith(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)


def checked(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there, to the bit.

    Raises:
        CheckpointError: it is not ours, of another version, or damaged; says which file and how.
    """
    manifest = _manifest(path)
    for name, noted in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        found = _digest(file)
        if found["bytes"] != noted["bytes"]:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {found['bytes']} bytes, expected {noted['bytes']}"
            )
        if found != noted:
            raise CheckpointError(f"checkpoint {path} is damaged: the content of {name} is not what was written")
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} is no checkpoint of multitower: {_MANIFEST}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {_MANIFEST} is not JSON ({error})") from error
    known = manifest.get("format") if isinstance(manifest, dict) else None
    if known != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint that can be read here: format {known!r}, expected {FORMAT!r}")
    return manifest


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is one checkpoint, not a directory of them."""
    return (path / _MANIFEST).is_file()


class Lock:
    """The right to write to a directory, held by one process at a time and given back when it ends, however it ends.

    Raises:
        CheckpointError: another process, or another lock of this one, holds it.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self._file = open(directory / ".lock", "a+", encoding="utf-8")  # noqa: SIM115, held open while locked
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise CheckpointError(
                f"{directory} is being written by another run (process {holder or 'unknown'}); "
                "wait for it to end, or use another directory"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        """Give the right back; more than once is once."""
        self._file.close()
