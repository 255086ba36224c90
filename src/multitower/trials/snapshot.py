"""What a study runs, kept as it was when the study began: later edits do not reach trials that have not started.

    the folder of job.py                  STUDY/job/
      job.py, net.py (job imports it)       copies
      everything else (data, …)             links

The job's file and the modules beside it that it imports are copied; the rest of its folder is linked, so that files it
opens beside itself are found. A built-in job is copied for the record and runs from the package.
"""

import ast
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import JobError
from ..parameters import EVERYTHING, did_you_mean

_FUNCTIONS = ("build_model", "load_data")


def take(job: Path, folder: Path) -> Path:
    """Copy a job with its modules into a new folder, link what lies beside it; the copy of the job's file."""
    folder.mkdir(parents=True)
    copied = {job.name} | {path.name for path in _modules(job, {job})}
    for name in copied:
        source = job.parent / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    for beside in job.parent.iterdir():
        above = beside.resolve() in folder.resolve().parents
        if beside.name not in copied and not beside.name.startswith((".", "__pycache__")) and not above:
            os.symlink(beside.resolve(), folder / beside.name)
    return folder / job.name


def _modules(file: Path, known: set[Path]) -> Iterator[Path]:
    """Modules and packages beside a file that it imports, and those that they import."""
    for name in _imported(_parse(file)):
        for path in (file.parent / f"{name}.py", file.parent / name):
            if path in known or not (path.is_file() or (path.is_dir() and any(path.glob("**/*.py")))):
                continue
            known.add(path)
            yield path
            if path.is_file():
                yield from _modules(path, known)


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise JobError(f"job {file}{line} is no Python source: {error}") from error


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def check_names(job: Path, names: list[str]) -> None:
    """Refuse parameters that neither function of a job takes, without running the job.

    What the file does not define itself, such as a function it imports, is left for the trial to check.

    Raises:
        JobError: with the names that are taken; or the file is no Python source.
    """
    functions = [node for node in _parse(job).body if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS]
    if len({function.name for function in functions}) < len(_FUNCTIONS):
        return
    taken = {name for function in functions for name in _parameters(function)}
    for name in names:
        if not {name, EVERYTHING} & taken:
            known = f"build_model and load_data accept: {', '.join(sorted(taken)) or 'none'}"
            raise JobError(f"job {job.stem}: no parameter {name!r}; {known}{did_you_mean(name, taken)}")


def _parameters(function: ast.FunctionDef) -> list[str]:
    names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    return [*names, EVERYTHING] if function.args.kwarg else names
