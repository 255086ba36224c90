"""Reader of CIFAR-10 as it is distributed: the binary and the Python version.

    binary   data_batch_1.bin … data_batch_5.bin, test_batch.bin
             of records of 1 + 3072 bytes: label, then 32×32 of red, of green, of blue
    Python   data_batch_1 … data_batch_5, test_batch
             a pickled dict each: b"data" uint8 (rows, 3072) in the same order, b"labels" a list

Files are checked before anything is trained: what is missing, truncated or something else is named.

Source: https://www.cs.toronto.edu/~kriz/cifar.html
"""

import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np

from .errors import JobError

Pictures = tuple[np.ndarray, np.ndarray]  # uint8 (rows, 32, 32, 3), int32 (rows,)

WHERE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_BYTES = 32 * 32 * 3
_RECORD = 1 + _BYTES
_PARTS = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
_FOLDERS = (".", "cifar-10-batches-bin", "cifar-10-batches-py")  # the archives hold a folder
_SECONDS = 15.0  # without a byte from the server, then it counts as not reached


def read_folder(folder: Path) -> tuple[Pictures, Pictures]:
    """The training pictures, of five files, and the test pictures, of one.

    Args:
        folder: holds the files, or the folder of the unpacked archive.

    Raises:
        JobError: no such folder or files; a file that is truncated or something else.
    """
    if not folder.is_dir():
        raise JobError(f"data={str(folder)!r} is not a folder; give the one with the files of CIFAR-10, from {WHERE}")
    place, suffix, read = _version(folder)
    files = [place / f"{part}{suffix}" for part in _PARTS]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise JobError(f"{place} lacks {', '.join(missing)}; unpack the whole archive from {WHERE}")
    *train, test = [read(file) for file in files]
    _check_equal_rows(files, train)
    return _join(train), test


def _version(folder: Path) -> tuple[Path, str, Callable[[Path], Pictures]]:
    for place in (folder / name for name in _FOLDERS):
        for suffix, read in ((".bin", read_binary), ("", read_python)):
            if any((place / f"{part}{suffix}").is_file() for part in _PARTS):
                return place, suffix, read
    raise JobError(
        f"{folder} holds no file of CIFAR-10: neither data_batch_1.bin (binary version) nor data_batch_1 (Python "
        f"version); get and unpack one of them from {WHERE}"
    )


def _check_equal_rows(files: list[Path], parts: list[Pictures]) -> None:
    """A file cut off at the end of a record shows only beside the others."""
    rows = [len(labels) for _, labels in parts]
    if min(rows) != max(rows):
        file = files[rows.index(min(rows))]
        raise JobError(
            f"{file} has {min(rows)} pictures, others of its folder {max(rows)}: it is truncated; get it from {WHERE}"
        )


def read_binary(file: Path) -> Pictures:
    """The pictures of a file of the binary version.

    Raises:
        JobError: not a whole number of records, or labels above 9.
    """
    content = np.frombuffer(file.read_bytes(), np.uint8)
    if not len(content) or len(content) % _RECORD:
        raise JobError(
            f"{file} has {len(content)} bytes, not a whole number of records of {_RECORD}: it is truncated or no file "
            f"of CIFAR-10's binary version; get it from {WHERE}"
        )
    records = content.reshape(-1, _RECORD)
    return _pictures(file, records[:, 1:], records[:, 0])


def read_python(file: Path) -> Pictures:
    """The pictures of a file of the Python version; nothing but arrays is unpickled.

    Raises:
        JobError: not such a file, or truncated.
    """
    try:
        with open(file, "rb") as stream:
            content = _ArraysOnly(stream, encoding="bytes").load()
        data, labels = np.asarray(content[b"data"]), np.asarray(content[b"labels"])
    except Exception as error:  # a damaged pickle raises anything
        told = " ".join(str(error).split())
        raise JobError(
            f"{file} is truncated or no file of CIFAR-10's Python version ({type(error).__name__}: {told}); get it "
            f"from {WHERE}"
        ) from error
    if (
        data.dtype != np.uint8
        or data.shape != (len(labels), _BYTES)
        or labels.ndim != 1
        or labels.dtype.kind not in "iu"
    ):
        raise JobError(
            f"{file} holds data {data.dtype}{data.shape} and labels {labels.dtype}{labels.shape}; expected uint8 "
            f"(rows, {_BYTES}) and whole numbers (rows,)"
        )
    return _pictures(file, data, labels)


_ARRAY_PARTS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArraysOnly(pickle.Unpickler):
    """Refuses whatever is not part of a NumPy array: unpickling can run any code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _ARRAY_PARTS:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in a file of CIFAR-10")
        return super().find_class(module_name.replace("numpy.core", "numpy._core"), global_name)


def _pictures(file: Path, data: np.ndarray, labels: np.ndarray) -> Pictures:
    if not len(labels):
        raise JobError(f"{file} has no pictures; get it from {WHERE}")
    if labels.min() < 0 or labels.max() > 9:
        raise JobError(
            f"{file} has labels of {labels.min()} … {labels.max()}; expected 0 … 9: it is no file of CIFAR-10 "
            f"(CIFAR-100 has another format)"
        )
    images = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int32)


def _join(parts: list[Pictures]) -> Pictures:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def from_keras() -> tuple[Pictures, Pictures]:
    """CIFAR-10 by `keras.datasets`, which downloads it once and keeps it.

    Raises:
        JobError: it cannot be reached; says where to get the files.
    """
    try:
        with _patience(_SECONDS):
            (x, y), (x_test, y_test) = keras.datasets.cifar10.load_data()
    except Exception as error:  # of the network, the disk, the archive
        told = " ".join(str(error).split())[:200]
        raise JobError(
            f"CIFAR-10 is not here and could not be downloaded ({type(error).__name__}: {told}); get the binary or the "
            f"Python version from {WHERE}, unpack it, and give --set data=DIR"
        ) from error
    return (x, y.reshape(-1).astype(np.int32)), (x_test, y_test.reshape(-1).astype(np.int32))


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """A server that does not answer ends the wait; by default sockets wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
