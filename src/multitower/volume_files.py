"""Reader of volumes: NIfTI files, and a CSV that says of each its target and sex.

    DIR/table.csv    id,target,sex        a line for each volume; other columns are passed over
    DIR/ID.nii.gz    or DIR/ID.nii

Everything is checked before anything is trained: each file is there, whole, finite and of one shape with the others.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import JobError

SEXES = {"f": 0.0, "female": 0.0, "0": 0.0, "m": 1.0, "male": 1.0, "1": 1.0}
_COLUMNS = ("id", "target", "sex")


@dataclass(frozen=True)
class Volumes:
    """Volumes with target and sex, in memory or read one by one.

    Attributes:
        shape: (depth, height, width) of each.
        target: float32 (rows,).
        sex: float32 (rows,), 0 female, 1 male.
        read: gives the volume of a row number, float32 of that shape, mean 0 and variance 1.
    """

    shape: tuple[int, int, int]
    target: np.ndarray
    sex: np.ndarray
    read: Callable[[int], np.ndarray]


def read_folder(folder: Path, in_memory: bool) -> Volumes:
    """The volumes of a folder with one CSV.

    Args:
        folder: see the module.
        in_memory: keep the volumes in memory; else each is read again whenever it is needed.

    Raises:
        JobError: a file is missing, damaged, of another shape, or has numbers that are not finite; a wrong table.
    """
    files, target, sex = read_table(_table_in(folder))
    shape = _common_shape(files)
    with ThreadPoolExecutor() as threads:
        if in_memory:
            return Volumes(shape, target, sex, list(threads.map(read_volume, files)).__getitem__)
        for _ in threads.map(lambda file: bool(read_volume(file).size), files):
            pass  # the reading is the check
    return Volumes(shape, target, sex, lambda row: read_volume(files[row]))


def _table_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise JobError(
            f"data={str(folder)!r} is not a folder; give one with a CSV ({','.join(_COLUMNS)}) and NIfTI files"
        )
    tables = sorted(folder.glob("*.csv"))
    if len(tables) != 1:
        found = ", ".join(table.name for table in tables) or "none"
        raise JobError(
            f"{folder} holds as CSV files: {found}; expected exactly one, with the columns {','.join(_COLUMNS)}"
        )
    return tables[0]


def read_table(table: Path) -> tuple[list[Path], np.ndarray, np.ndarray]:
    """Files, targets and sexes of a CSV whose volumes stand beside it.

    Raises:
        JobError: a column, a number or a file is missing; a line is named by its number.
    """
    try:
        with open(table, newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise JobError(f"{table} has no column {', '.join(missing)}; its first line is {reader.fieldnames}")
            rows = [_row(table, reader.line_num, row) for row in reader]
    except UnicodeDecodeError as error:
        raise JobError(f"{table} is no text in UTF-8: {error}") from error
    if len(rows) < 2:
        raise JobError(f"{table} has {len(rows)} volumes; expected at least 2, one of them to be held out")
    files, target, sex = zip(*rows, strict=True)
    file, times = Counter(files).most_common(1)[0]
    if times > 1:
        raise JobError(f"{table} names {file.name} {times} times; expected one line for each volume")
    return list(files), np.array(target, np.float32), np.array(sex, np.float32)


def _row(table: Path, line: int, row: dict[str, Any]) -> tuple[Path, float, float]:
    name, target, sex = ((row[column] or "").strip() for column in _COLUMNS)
    try:
        number = float(target)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise JobError(f"{table}, line {line}: target {target!r}; expected a number")
    if sex.lower() not in SEXES:
        raise JobError(f"{table}, line {line}: sex {sex!r}; expected one of {', '.join(SEXES)}")
    files = [table.parent / f"{name}{suffix}" for suffix in (".nii.gz", ".nii")]
    found = [file for file in files if name and file.is_file()]
    if not found:
        raise JobError(f"{table}, line {line}: neither {files[0].name} nor {files[1].name} is in {table.parent}")
    return found[0], number, SEXES[sex.lower()]


def _common_shape(files: Sequence[Path]) -> tuple[int, int, int]:
    """The shape of all volumes, from their headers."""
    first = _open(files[0]).shape
    if len(first) != 3:
        raise JobError(f"{files[0]} has shape {first}; expected three dimensions")
    for file in files[1:]:
        shape = _open(file).shape
        if shape != first:
            raise JobError(f"{file} has shape {shape}, {files[0].name} has {first}; bring all volumes to one grid")
    return first


def read_volume(file: Path) -> np.ndarray:
    """A volume as float32, minus its mean, divided by its standard deviation.

    Raises:
        JobError: truncated, no NIfTI file, or with numbers that are not finite.
    """
    try:
        volume = np.asarray(_open(file).dataobj, np.float32)
    except JobError:
        raise
    except Exception as error:  # of nibabel, gzip or zlib
        raise _unreadable(file, error) from error
    if not np.isfinite(volume).all():
        raise JobError(f"{file} has voxels that are not finite numbers")
    return standardised(volume)


def standardised(volume: np.ndarray) -> np.ndarray:
    """(x − mean) / std, float32; zeros where all voxels are equal."""
    centred = volume - volume.mean(dtype=np.float64)
    return (centred / (centred.std() or 1.0)).astype(np.float32)


def _open(file: Path) -> Any:
    try:
        import nibabel
    except ImportError as error:
        raise JobError("NIfTI files need nibabel; python -m pip install 'multitower[volumes]'") from error
    try:
        return nibabel.load(file)  # type: ignore[attr-defined]
    except Exception as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> JobError:
    told = " ".join(str(error).split())[:200]
    return JobError(f"{file} is truncated or no NIfTI file ({type(error).__name__}: {told})")
