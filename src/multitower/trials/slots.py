"""Where trials run: a device each, and the environment in which a process sees that device alone.

    "gpu:0,2", per device 2 -> GPU:0, GPU:0, GPU:2, GPU:2     CUDA_VISIBLE_DEVICES = the card's UUID
    "cpu:2" on 8 cores      -> CPU:0 with cores 0–3, CPU:1 with cores 4–7; no GPU

Devices are written as for `multitower.devices`; there they are towers of one process, here a process for each.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..device_spec import Spec, parse, spec_error
from . import gpus
from .gpus import Card

_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
# What is recorded of the environment of a trial's process
RECORDED = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", _GROWTH, *_THREADS)


@dataclass(frozen=True)
class Device:
    """A device trials run on.

    Attributes:
        name: "GPU:0" or "CPU:1", counted among those this process may use.
        card: of a GPU; None for CPU cores.
        cores: of a CPU device; empty for a GPU.
    """

    name: str
    card: Card | None = None
    cores: tuple[int, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """What two runners must not share: the card, or each core."""
        if self.card:
            return (f"gpu-{self.card.uuid or self.card.token}",)
        return tuple(f"core-{core}" for core in self.cores)

    @property
    def memory(self) -> str:
        """Devices with the same text share memory: all CPU devices do."""
        return self.keys[0] if self.card else "host"

    def environment(self, base: Mapping[str, str], per_device: int = 1) -> dict[str, str]:
        """The environment of a process that is to see this device alone; the user's own thread counts stay."""
        if self.card:
            shares = {_GROWTH: "true"} if per_device > 1 else {}
            return {**shares, **base, "CUDA_VISIBLE_DEVICES": self.card.token}
        threads = dict.fromkeys(_THREADS, str(max(1, len(self.cores) // per_device)))
        return {**threads, **base, "CUDA_VISIBLE_DEVICES": "-1"}


def find_devices(spec: Spec = None) -> list[Device]:
    """The devices of a specification, those least in use first.

    Raises:
        DeviceError: there are no such devices.
    """
    wish = parse(spec)
    names = wish if isinstance(wish, tuple) else ()
    if names and names[0].startswith("CPU"):
        return _cpus(len(names), names)
    there = [] if not names and not isinstance(wish, tuple) and wish.gpus == 0 else gpus.cards()
    found = [Device(f"GPU:{i}", card) for i, card in enumerate(there)]
    if names:
        missing = [name for name in names if int(name[4:]) >= len(found)]
        if missing:
            raise spec_error(spec, f"GPUs of this machine, which has {len(found)}", "count from 0, or give cpu:2")
        return [found[int(name[4:])] for name in names]
    return _counted(wish.gpus, wish.cpus, found, spec)  # type: ignore[union-attr]


def _counted(gpu_count: int | str, cpu_count: int | str, found: list[Device], spec: Spec) -> list[Device]:
    if cpu_count == 0 and not found:
        raise spec_error(
            spec, "a GPU that NVML sees, and it sees none", 'give "cpu:2" for trials on the cores of the CPU'
        )
    if gpu_count == 0 or not found:
        cores = len(_cores())
        count = cores if cpu_count == "all" else int(cpu_count)
        return _cpus(count, tuple(f"CPU:{i}" for i in range(count)))
    ordered = sorted(found, key=_in_use)
    if gpu_count == "all":
        return ordered
    if int(gpu_count) > len(found):
        raise spec_error(spec, f"at most {len(found)}, the number of GPUs", 'give "gpu" for all')
    return ordered[: int(gpu_count)]


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpus(count: int, names: tuple[str, ...]) -> list[Device]:
    """The cores in equal shares; where there are more devices than cores, some have one together."""
    cores = _cores()
    if count >= len(cores):
        return [Device(name, cores=(cores[i % len(cores)],)) for i, name in enumerate(names)]
    bounds = [len(cores) * i // count for i in range(count + 1)]
    return [Device(name, cores=tuple(cores[bounds[i] : bounds[i + 1]])) for i, name in enumerate(names)]


def _in_use(device: Device) -> tuple[bool, int]:
    use = gpus.use(device.card) if device.card else None
    return (use.taken, use.used_bytes) if use else (False, 0)


def foreign_users(device: Device) -> str | None:
    """What says that others use a GPU, None if nobody does; asked before this runner has started anything on it."""
    use = gpus.use(device.card) if device.card else None
    if not use or not use.taken:
        return None
    who = f"processes {', '.join(map(str, use.pids))}" if use.pids else "other processes"
    return f"{who}, {use.used_bytes / 2**20:.0f} MiB"


def memory_for_one_more(device: Device, running: int) -> bool:
    """Whether a GPU has room for another trial of the size of those that run on it."""
    use = gpus.use(device.card) if device.card and running else None
    return use is None or use.free_bytes >= use.used_bytes / running
