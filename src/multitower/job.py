"""A job: the Python module that says what to train, `build_model(**params)`, and on what, `load_data(**params)`.

    build_model(**params) -> a compiled keras.Model
    load_data(**params)   -> (train, validation), each a tf.data.Dataset of batches or a tuple of arrays (x, y)
    make_callbacks(**params) -> Keras callbacks for `fit`; optional
    EPOCHS, BATCH_SIZE       optional: the defaults of `multitower train`
    BATCH_SIZE_PER_TOWER     optional, in place of BATCH_SIZE: the global batch is N times as large

A function with a parameter `batch_size` gets B, the rows of the global batch, where the command line or the job says
it: for the batches of a dataset, or a schedule that counts examples.

A job is a user's file, loaded under a module name of its own so that two files of one name do not meet, or a built-in:
any module of the package `multitower.jobs`, so that there is no list to keep. Loading stands here rather than in
`jobs/__init__.py`, which leaves that folder to the jobs alone. Nothing here imports TensorFlow before a job does.
"""

import importlib
import importlib.util
import itertools
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import jobs
from .errors import JobError, MultitowerError
from .parameters import accepts, check_params, did_you_mean

if TYPE_CHECKING:
    import keras

_BUILTIN = Path(str(jobs.__file__)).resolve().parent
_file_numbers = itertools.count(1)


@dataclass(frozen=True)
class Job:
    """What `load_job` found in a job's module.

    Attributes:
        name: the file's stem, which is a built-in's name.
        path: the module's file.
        build_model: the module's function; `make_model` calls it with checks.
        load_data: the module's function; `make_data` calls it with checks.
        epochs: the module's EPOCHS, else 1.
        batch_size: rows of the global batch: the module's BATCH_SIZE, else 32 as in Keras. With BATCH_SIZE_PER_TOWER
            those of one tower.
        make_callbacks: the module's function, None where it has none; `make_callbacks` calls it with checks.
        says_batch_size: whether the module has one of the two constants.
        per_tower: whether it is BATCH_SIZE_PER_TOWER.
    """

    name: str
    path: Path
    build_model: Callable[..., Any]
    load_data: Callable[..., Any]
    epochs: int = 1
    batch_size: int = 32
    make_callbacks: Callable[..., Any] | None = None
    says_batch_size: bool = False
    per_tower: bool = False

    def global_batch(self, towers: int) -> int:
        """B on N towers where the command line says nothing."""
        return self.batch_size * (towers if self.per_tower else 1)


def builtin_jobs() -> list[str]:
    """Names of the jobs that come with multitower."""
    return sorted(path.stem for path in _BUILTIN.glob("[!_]*.py"))


def find_job(name_or_path: str) -> Path:
    """The file of a job, built-in or a user's; costs no import.

    Raises:
        JobError: neither a built-in's name nor a Python file.
    """
    if name_or_path in builtin_jobs():
        return _BUILTIN / f"{name_or_path}.py"
    path = Path(name_or_path)
    if path.suffix == ".py" and path.is_file():
        return path.resolve()
    files = [str(file) for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
    problem = f"no job file {name_or_path!r}" if path.suffix == ".py" else f"no job {name_or_path!r}"
    expected = f"expected a built-in job ({', '.join(builtin_jobs())}) or the path of a Python file (.py)"
    raise JobError(f"{problem}; {expected}{did_you_mean(name_or_path, [*builtin_jobs(), *files])}")


def load_job(name_or_path: str) -> Job:
    """Import a built-in job by name or a user's job by the path of its Python file.

    Example:
        >>> load_job("digits").batch_size
        64

    Raises:
        JobError: not found, raises on import, or lacks one of the two functions.
    """
    path = find_job(name_or_path)
    module = _import(path)
    missing = [name for name in ("build_model", "load_data") if not callable(getattr(module, name, None))]
    if missing:
        raise JobError(
            f"job {path} has no function {' and no '.join(missing)}; a job defines build_model(**params) "
            "-> compiled keras.Model and load_data(**params) -> (train, validation)"
        )
    callbacks = getattr(module, "make_callbacks", None)
    if callbacks is not None and not callable(callbacks):
        raise JobError(f"job {path}: make_callbacks = {callbacks!r}; expected a function")
    given: dict[str, Any] = {"make_callbacks": callbacks, **_batch_size(module)}
    epochs = _count(module, "EPOCHS")
    if epochs:
        given["epochs"] = epochs
    return Job(path.stem, path, module.build_model, module.load_data, **given)


def _batch_size(module: ModuleType) -> dict[str, Any]:
    of_all, of_one = (_count(module, name) for name in ("BATCH_SIZE", "BATCH_SIZE_PER_TOWER"))
    if of_all and of_one:
        raise JobError(f"job {module.__file__} has BATCH_SIZE and BATCH_SIZE_PER_TOWER; expected one of them")
    rows = of_all or of_one
    return {"batch_size": rows, "says_batch_size": True, "per_tower": bool(of_one)} if rows else {}


def _count(module: ModuleType, constant: str) -> int | None:
    value = getattr(module, constant, None)
    if value is not None and (type(value) is not int or value < 1):
        raise JobError(f"job {module.__file__}: {constant} = {value!r}; expected an integer of at least 1")
    return value


def _import(path: Path) -> ModuleType:
    try:
        return importlib.import_module(f"{jobs.__name__}.{path.stem}") if path.parent == _BUILTIN else _run_file(path)
    except (Exception, SystemExit) as error:
        raise JobError(f"job {path.stem}: its import raised {_told(error, path)}") from error


def _run_file(path: Path) -> ModuleType:
    """Run a job file as a module of a unique name; modules beside it can be imported, as for a script."""
    name = f"multitower_job_{path.stem}_{next(_file_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python source file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _told(error: BaseException, path: Path) -> str:
    """`Type: message (file:line)`, the line being the last one of the job's file on the way to the error."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{type(error).__name__}: {error.msg} ({path}:{error.lineno})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message} ({path}{f':{lines[-1]}' if lines else ''})"


def check_job_params(job: Job, params: Mapping[str, Any]) -> None:
    """Refuse parameters that no function accepts, and the lack of a required one.

    Raises:
        JobError: with the names that are accepted.
    """
    try:
        check_params([f for f in (job.build_model, job.load_data, job.make_callbacks) if f], params)
    except JobError as error:
        raise JobError(f"job {job.name}: {error}") from None


def with_batch_size(job: Job, params: Mapping[str, Any], towers: int, batch_size: int | None) -> dict[str, Any]:
    """The parameters, with B as `batch_size` where the command line, the user or the job says how many rows it has.

    Args:
        job: the job.
        params: those of the user.
        towers: N.
        batch_size: of the command line, or None.
    """
    if batch_size:
        return {**params, "batch_size": batch_size}
    return {"batch_size": job.global_batch(towers), **params} if job.says_batch_size else dict(params)


def _call(job: Job, function: Callable[..., Any], params: Mapping[str, Any]) -> Any:
    """Call a function of the job with those of the parameters that it accepts."""
    try:
        return function(**{name: value for name, value in params.items() if accepts(function, name)})
    except MultitowerError:
        raise
    except Exception as error:
        raise JobError(f"job {job.name}: {function.__name__} raised {_told(error, job.path)}") from error


def make_model(job: Job, params: Mapping[str, Any]) -> "keras.Model":
    """Call `build_model` with those of the parameters that it accepts.

    Raises:
        JobError: it raises, or returns something other than a compiled keras.Model.
    """
    import keras

    model = _call(job, job.build_model, params)
    if not isinstance(model, keras.Model):
        problem = f"{_kind(model)}; expected a compiled keras.Model; end build_model with `return model`"
    elif not model.compiled:
        problem = "a keras.Model that is not compiled; call model.compile(optimizer, loss) in build_model"
    else:
        return model
    raise JobError(f"job {job.name}: build_model returned {problem}")


def make_callbacks(job: Job, params: Mapping[str, Any]) -> "list[keras.callbacks.Callback]":
    """Call `make_callbacks` with those of the parameters that it accepts; no callbacks where the job has none.

    Raises:
        JobError: it raises, or returns something other than a list of Keras callbacks.
    """
    import keras

    made = _call(job, job.make_callbacks, params) if job.make_callbacks else []
    if not isinstance(made, list | tuple) or not all(isinstance(c, keras.callbacks.Callback) for c in made):
        raise JobError(
            f"job {job.name}: make_callbacks returned {_kind(made)}; expected a list of keras.callbacks.Callback"
        )
    return list(made)


def make_data(job: Job, params: Mapping[str, Any]) -> tuple[Any, Any]:
    """Call `load_data` with those of the parameters that it accepts: (train, validation).

    Raises:
        JobError: it raises, or returns something other than a pair of datasets or tuples of arrays, or one without
            rows, without end, or with arrays of different lengths.
    """
    data = _call(job, job.load_data, params)
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise JobError(f"job {job.name}: load_data returned {_kind(data)}; expected the pair (train, validation)")
    for name, part in zip(("train", "validation"), data, strict=True):
        problem = _problem(part)
        if problem:
            raise JobError(f"job {job.name}: load_data returned as {name} {problem}")
    return data[0], data[1]


def _kind(value: Any) -> str:
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


def _problem(part: Any) -> str | None:
    """What is wrong with the train or the validation part, None if nothing is."""
    import tensorflow as tf

    if isinstance(part, tf.data.Dataset):
        batches = int(part.cardinality())
        if batches == tf.data.INFINITE_CARDINALITY:
            return "a dataset without end; bound it, with .take(steps) after .repeat()"
        return "a dataset without batches; expected at least one row" if batches == 0 else None
    if not isinstance(part, tuple | list) or len(part) not in (2, 3):
        return f"{_kind(part)}; expected a tf.data.Dataset of batches or a tuple of arrays (x, y)"
    return _array_problem(part)


def _array_problem(arrays: Any) -> str | None:
    import keras

    leaves = [leaf for leaf in keras.tree.flatten(arrays) if leaf is not None]
    if not all(len(getattr(leaf, "shape", ())) for leaf in leaves):
        return "a tuple with something that is not an array; expected arrays (x, y), rows first"
    lengths = [int(leaf.shape[0]) for leaf in leaves]
    if len(set(lengths)) > 1:
        return f"arrays of different lengths {lengths}; expected one label for each row"
    return "arrays without rows; expected at least one row" if 0 in lengths else None
