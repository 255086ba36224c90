"""List, choose and split devices, and let GPU memory grow: the only user of tf.config.

    what the user wrote  ── parse() ──>  a count, or names  ── devices() ──>  ["GPU:0", "GPU:1", …]
     "all", 4, "cpu:4"       pure                              tf.config       one name per tower

Nothing here starts TensorFlow's runtime. Logical devices are counted from the configuration of the physical ones, as
tf.config.list_logical_devices() would start it, and a started runtime can no longer split the CPU or let memory grow.
"""

import importlib.metadata
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import tensorflow as tf

from .device_spec import Amount, Named, Spec, parse, short_name, spec_error
from .errors import DeviceError

__all__ = ["devices"]

_FORCE_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"

# How many logical devices multitower itself split the CPU into, 0 where it did not: a split of the user's stays.
_own_split = 0


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
    short = _existing(tuple(short_name(name, names) for name in names), names)
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
            raise spec_error(
                spec, expected, more if kind == "CPU" else f"give {there} for the first {there}, or count from 0"
            )
    return list(names)


def _no_gpu(spec: object) -> DeviceError:
    fix = 'give "cpu:2" for towers on the CPU, or look for the missing GPU with nvidia-smi and `multitower env`'
    return spec_error(spec, "a GPU that TensorFlow sees, and it sees none", fix)


def _first_gpus(n: Amount, spec: Spec) -> list[str]:
    there = len(_logical("GPU"))
    if not there:
        raise _no_gpu(spec)
    if n != "all" and n > there:
        raise spec_error(
            spec, f"at most {there}, the number of GPUs", f'give "gpu" for all, "cpu:{n}" for logical CPUs'
        )
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
        raise spec_error(spec, f"{at_most}, {why}", f"call it with {n}, or not at all")
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n)
    except RuntimeError as error:  # raised where the runtime has started, as the new configuration differs
        fix = f'call multitower.devices("cpu:{n}") before any tensor or model is created, or use the command line'
        raise spec_error(spec, f"{at_most}, as TensorFlow has already started with {there}", fix) from error
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


_configurations = itertools.count(1)


@contextmanager
def functions_instantiated_anew() -> Iterator[None]:
    """While this is open, tf.functions run as instances of their own, made when they are first called.

    TensorFlow shows the graphs of a function only while it instantiates it, and keeps instances by configuration. The
    instances from before are used again afterwards: nothing is made twice. The configuration that is varied is the
    number of nodes from which a graph is optimised, where every negative number means: always.
    """
    asked = tf.config.optimizer.get_experimental_options().get("min_graph_nodes")
    tf.config.optimizer.set_experimental_options({"min_graph_nodes": -next(_configurations)})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"min_graph_nodes": asked})
