"""List, choose and split devices, and let GPU memory grow: the only user of tf.config.

    what the user wrote  ── parse() ──>  a count, or names  ── devices() ──>  ["GPU:0", "GPU:1", …]
     "all", 4, "cpu:4"       pure                              tf.config       one name per tower

Nothing here starts TensorFlow's runtime. Logical devices are counted from the configuration of the physical ones, as
tf.config.list_logical_devices() would start it, and a started runtime can no longer split the CPU or let memory grow.
"""

import difflib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol

import tensorflow as tf

from .errors import DeviceError

__all__ = ["devices"]

_NAME = re.compile(r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:device:)?([cg]pu):([0-9]{1,9})", re.IGNORECASE)
_FORMS = 'None, "all", a number, "gpu", "gpu:0,2", "cpu", "cpu:4" or a list of names such as ["GPU:0", "GPU:1"]'
_FORCE_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"

# How many logical devices multitower itself split the CPU into, 0 where it did not: a split of the user's stays.
_own_split = 0


class Named(Protocol):
    """Anything with a device's name, such as a tf.config.LogicalDevice."""

    @property
    def name(self) -> str: ...


Spec = str | int | Named | Sequence[str | Named] | None
Amount = int | Literal["all"]


@dataclass(frozen=True)
class Count:
    """How many devices: `gpus` GPUs if that is not 0 and there are any, or if `cpus` is 0; else `cpus` logical CPUs."""

    gpus: Amount
    cpus: Amount


def devices(spec: Spec = None) -> list[str]:
    """The devices of the towers, in tower order, as short names usable with tf.device.

    | spec                       | devices                                                       |
    |----------------------------|---------------------------------------------------------------|
    | None                       | all GPUs, where there is none CPU:0                           |
    | "all"                      | all GPUs, where there is none all logical CPU devices         |
    | 4                          | the first 4 GPUs, where there is none 4 logical CPU devices   |
    | "gpu", "gpu:0,2"           | all GPUs; the GPUs with these indices                         |
    | "cpu", "cpu:4"             | CPU:0; FOUR logical CPU devices, CPU:0 to CPU:3               |
    | ["CPU:1", "/device:CPU:2"] | these: in a list, and after a "/", the number is an index     |

    Logical CPU devices are made by splitting the CPU, which TensorFlow allows only before its runtime starts: before
    the first tensor, variable, optimizer or built model. GPU memory is set to grow on demand where the user did not
    choose otherwise and the runtime has not started.

    Args:
        spec: as in the table; a tf.config.LogicalDevice counts as its name. Case does not matter.

    Returns:
        Names of different devices, all of them GPUs or all of them CPUs.

    Raises:
        DeviceError: no such devices, a device twice, or more logical CPU devices than can still be made.

    Example:
        >>> import multitower as mt
        >>> mt.devices("cpu:2")
        ['CPU:0', 'CPU:1']
    """
    wish = parse(spec)
    _let_memory_grow()
    if isinstance(wish, tuple):
        return _existing(wish, spec)
    if wish.cpus == 0 or (wish.gpus != 0 and _logical("GPU")):
        return _first_gpus(wish.gpus, spec)
    return _first_cpus(wish.cpus, spec)


def physical_gpu_count(names: Sequence[str | Named]) -> int:
    """How many different physical GPUs the named devices lie on, 0 where none is a GPU: NCCL wants one device on each.

    Raises:
        DeviceError: a name that is none, or a device that does not exist.
    """
    gpus = _logical("GPU")
    short = _existing(tuple(_short_name(name, names) for name in names), names)
    return len({gpus[_index(name)][0] for name in short if name.startswith("GPU")})


def peak_memory_bytes(names: Sequence[str]) -> dict[str, int]:
    """The most memory TensorFlow has had allocated on each GPU among the devices; it tells nothing of CPUs."""
    gpus = [name for name in names if name.startswith("GPU")]
    return {name: int(tf.config.experimental.get_memory_info(name)["peak"]) for name in gpus}


@contextmanager
def full_precision() -> Iterator[None]:
    """While this is open, GPUs compute float32 in float32, not in TensorFloat-32, whose error depends on the kernel."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def describe(spec: Spec = None) -> dict[str, Any]:
    """What `multitower env` prints: the devices `devices(spec)` chooses, and the versions and settings around them.

    Returns:
        `devices`: a list of {`name`, `kind`: "GPU" or "CPU", `physical`: name of the card, or "CPU", `memory_bytes`:
        limit of a logical GPU, None where TensorFlow tells none}; `python`, `tensorflow`, `keras`, `multitower`:
        versions, None where not installed; `cuda`: version TensorFlow was built with, or None; `memory_growth`:
        {GPU: whether its memory really grows on demand}, for every GPU; `cpu_cores`: those this process may use.

    Raises:
        DeviceError: as `devices(spec)` does.
    """
    chosen = devices(spec)
    return {
        "devices": [_describe_device(name) for name in chosen],
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": _version("keras"),
        "multitower": _version("multitower"),
        "cuda": tf.sysconfig.get_build_info().get("cuda_version"),
        "memory_growth": {f"GPU:{i}": _memory_grows(gpu) for i, (gpu, _) in enumerate(_logical("GPU"))},
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


# What was asked for: functions of the specification alone


def parse(spec: Spec) -> Count | tuple[str, ...]:
    """How many devices, or the short names of certain ones, a specification asks for. Looks at no machine.

    Raises:
        DeviceError: not one of the forms `devices` documents, none at all, or a device twice.
    """
    if spec is None:
        return Count("all", 1)
    if isinstance(spec, str):
        return _parse_text(spec)
    if hasattr(spec, "name"):  # asked before tuple, as a LogicalDevice is one too
        return (_short_name(spec, spec),)
    if isinstance(spec, list | tuple):
        return _distinct([_short_name(item, spec) for item in spec], spec)
    if isinstance(spec, Integral) and not isinstance(spec, bool):  # numpy's integers too; True is a mistake, not 1
        return _number(int(spec), spec)
    raise _error(spec, _FORMS, "give one of these")


def _parse_text(text: str) -> Count | tuple[str, ...]:
    kind, colon, rest = text.strip().lower().partition(":")
    words = {"all": Count("all", "all"), "gpu": Count("all", 0), "cpu": Count(0, 1)}
    if not colon and kind in words:
        return words[kind]
    if not colon and re.fullmatch(r"-?[0-9]{1,9}", kind):  # the command line has text only
        return _number(int(kind), text)
    if colon and kind == "cpu":
        return Count(0, _cpu_count(rest, text))
    if colon and kind == "gpu":
        return _gpu_names(rest, text)
    if kind.startswith("/"):
        return (_short_name(text, text),)
    raise _error(text, _FORMS, _suggestion(text.lower()))


def _cpu_count(rest: str, text: str) -> Amount:
    if not re.fullmatch(r"\s*-?[0-9]{1,9}", rest):
        expected = 'the number of logical CPU devices after "cpu:"'
        raise _error(text, expected, 'name single ones in a list, such as ["CPU:0", "CPU:1"]')
    return _number(int(rest), text).cpus


def _gpu_names(rest: str, text: str) -> tuple[str, ...]:
    indices = [part.strip().removeprefix("gpu:") for part in rest.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", index) for index in indices):
        raise _error(text, 'indices of GPUs after "gpu:", such as "gpu:0,2"', 'all GPUs are "gpu"')
    return _distinct([f"GPU:{int(index)}" for index in indices], text)


def _number(n: int, spec: Spec) -> Count:
    if n < 1:
        raise _error(spec, "at least 1 device", 'the device with index 0 is ["GPU:0"] or ["CPU:0"], in a list')
    return Count(n, n)


def _distinct(names: list[str], spec: Spec) -> tuple[str, ...]:
    if not names:
        raise _error(spec, "at least 1 device", "give None to have the devices chosen")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise _error(spec, "a different device for each tower", f"name {twice[0]} once")
    if len({name[:3] for name in names}) > 1:  # TensorFlow's collectives take devices of one kind
        raise _error(spec, "devices of one kind", "name only GPUs or only CPUs")
    return tuple(names)


def _short_name(item: object, spec: object) -> str:
    name = item if isinstance(item, str) else getattr(item, "name", item)
    match = _NAME.fullmatch(name.strip()) if isinstance(name, str) else None
    if match:
        return f"{match[1].upper()}:{int(match[2])}"
    of_cluster = isinstance(name, str) and name.startswith("/job:")
    fault = "is not a device of this process" if of_cluster else "is no name of a device"
    raise _error(spec, 'names such as "GPU:0" or "/device:CPU:1"', f"{_shown(name)} {fault}")


def _suggestion(text: str) -> str:
    word, numbers = re.sub(r"[^a-z].*", "", text, flags=re.DOTALL), re.sub(r"^[^0-9]*|[^0-9,]", "", text)
    near = ["gpu"] if word == "cuda" else difflib.get_close_matches(word, ["gpu", "cpu", "all"], n=1)
    tail = f":{numbers}" if numbers and near != ["all"] else ""
    return f'did you mean "{near[0]}{tail}"?' if near else "give one of these"


def _error(spec: object, expected: str, fix: str) -> DeviceError:
    return DeviceError(f"devices={_shown(spec)}: expected {expected}; {fix}")


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


# What there is: tf.config


def _logical(kind: str) -> list[tuple[Any, Any]]:
    """The logical devices of a kind in the order of their indices, as (physical device, its configuration or None)."""
    every = []
    for physical in tf.config.get_visible_devices(kind):
        split = tf.config.get_logical_device_configuration(physical)
        every += [(physical, part) for part in ([None] if split is None else split)]
    # experimental_device_ordinal goes before the physical order (CreateDevices in gpu_device.cc)
    return sorted(every, key=lambda pair: getattr(pair[1], "experimental_device_ordinal", None) or 0)


def _index(name: str) -> int:
    return int(name.partition(":")[2])


def _existing(names: tuple[str, ...], spec: object) -> list[str]:
    for name in names:
        kind, there = name[:3], len(_logical(name[:3]))
        if kind == "GPU" and not there:
            raise _no_gpu(spec)
        if _index(name) >= there:
            expected = f"{kind} indices from 0 to {there - 1}" if there > 1 else f"{kind}:0, the only {kind} device"
            more = f'call multitower.devices("cpu:{_index(name) + 1}") before any tensor or model is created'
            raise _error(
                spec, expected, more if kind == "CPU" else f"give {there} for the first {there}, or count from 0"
            )
    return list(names)


def _no_gpu(spec: object) -> DeviceError:
    fix = 'give "cpu:2" for towers on the CPU, or look for the missing GPU with nvidia-smi and `multitower env`'
    return _error(spec, "a GPU that TensorFlow sees, and it sees none", fix)


def _first_gpus(n: Amount, spec: Spec) -> list[str]:
    there = len(_logical("GPU"))
    if not there:
        raise _no_gpu(spec)
    if n != "all" and n > there:
        raise _error(spec, f"at most {there}, the number of GPUs", f'give "gpu" for all, "cpu:{n}" for logical CPUs')
    return [f"GPU:{i}" for i in range(there if n == "all" else n)]


def _first_cpus(n: Amount, spec: Spec) -> list[str]:
    there = len(_logical("CPU"))
    n = there if n == "all" else n
    if n > there:
        _split_cpu(n, there, spec)
    return [f"CPU:{i}" for i in range(n)]


def _split_cpu(n: int, there: int, spec: Spec) -> None:
    global _own_split
    cpu = tf.config.list_physical_devices("CPU")[0]
    split = tf.config.get_logical_device_configuration(cpu)
    at_most = f"at most {there} logical CPU device{'s' if there > 1 else ''}"
    if split is not None and len(split) != _own_split:
        why = "the number tf.config.set_logical_device_configuration was called with"
        raise _error(spec, f"{at_most}, {why}", f"call it with {n}, or not at all")
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n)
    except RuntimeError as error:  # raised where the runtime has started, as the new configuration differs
        fix = f'call multitower.devices("cpu:{n}") before any tensor or model is created, or use the command line'
        raise _error(spec, f"{at_most}, as TensorFlow has already started with {there}", fix) from error
    _own_split = n
    _keep_memory_growth()


def _let_memory_grow() -> None:
    """Memory growth on for every visible GPU; what the user set stays, what can no longer be set is left as it is."""
    growth = {gpu: tf.config.experimental.get_memory_growth(gpu) for gpu in tf.config.get_visible_devices("GPU")}
    # TensorFlow does not start where growth differs between GPUs: follow the user who set some of them.
    wanted = next((grows for grows in growth.values() if grows is not None), True)
    for gpu in (gpu for gpu, grows in growth.items() if grows is None):
        with suppress(ValueError, RuntimeError):  # a GPU the user split; a runtime that has started
            tf.config.experimental.set_memory_growth(gpu, wanted)
            _keep_memory_growth()


def _keep_memory_growth() -> None:
    """Hold memory growth although the CPU is split. To be called only where the runtime has not started.

    As soon as any device is split, be it the CPU, TensorFlow drops the growth that was set (Context.
    _compute_device_options), and a GPU's memory is taken whole. The environment variable is read later and counts.
    """
    gpus = tf.config.get_visible_devices("GPU")
    grow = all(map(tf.config.experimental.get_memory_growth, gpus))
    if gpus and grow and _any_split() and not any(map(tf.config.get_logical_device_configuration, gpus)):
        os.environ.setdefault(_FORCE_GROWTH, "true")


def _memory_grows(gpu: Any) -> bool:
    forced = os.environ.get(_FORCE_GROWTH)
    if forced in ("true", "false"):
        return forced == "true"
    return bool(tf.config.experimental.get_memory_growth(gpu)) and not _any_split()


def _any_split() -> bool:
    return any(map(tf.config.get_logical_device_configuration, tf.config.list_physical_devices()))


def _describe_device(name: str) -> dict[str, Any]:
    physical, part = _logical(name[:3])[_index(name)]
    card = tf.config.experimental.get_device_details(physical).get("device_name", physical.name)
    limit_mib = getattr(part, "memory_limit", None)
    return {
        "name": name,
        "kind": name[:3],
        "physical": card if name.startswith("GPU") else "CPU",
        "memory_bytes": None if limit_mib is None else int(limit_mib * 2**20),
    }


def _version(distribution: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)


def load_drivers() -> None:
    """Have TensorFlow look for the devices of the machine. Its runtime does not start: the CPU can still be split."""
    tf.config.list_physical_devices()
