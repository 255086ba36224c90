"""Where a runner's trials run on this machine: slots, which device is free, and how a process is started there."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..device_spec import Spec
from ..errors import DeviceError
from .lease import Leases
from .process import Attempt, LocalAttempt, Order
from .slots import Device, find_devices, foreign_users, memory_for_one_more


@dataclass(frozen=True)
class Slot:
    """A place for one trial at a time.

    Attributes:
        number: from 0.
        device: name of its device; other slots may be on the same.
        memory: slots with the same text share memory.
    """

    number: int
    device: str
    memory: str


class Place(Protocol):
    """Where trials run: this machine, or a cluster."""

    slots: list[Slot]
    lock: int | None  # open file of the study's lock, for every process that belongs to the study

    def obstacle(self, slot: Slot, running: int) -> str | None:
        """Why nothing can be started in a slot now, None if something can; `running` trials are on its device."""
        ...

    def environment(self, slot: Slot, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a trial there."""
        ...

    def start(self, slot: Slot, folder: Path, order: Order, environment: Mapping[str, str]) -> Attempt:
        """Start an attempt; its files appear in the folder."""
        ...

    def release(self, slot: Slot) -> None:
        """Nothing more will be started in a slot for now."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Machine:
    """This machine's devices, each held by one runner at a time."""

    def __init__(self, spec: Spec, per_device: int, share: bool, holder: str):
        """Find the devices.

        Args:
            spec: as `multitower.devices` takes them.
            per_device: slots on each.
            share: whether GPUs that others use are used too.
            holder: told to other runners that want the same devices.

        Raises:
            DeviceError: there are no such devices, or all are in use.
        """
        devices = find_devices(spec)
        self._devices = {device.name: device for device in devices}
        names = [device.name for _ in range(per_device) for device in devices]
        self.slots = [Slot(i, name, self._devices[name].memory) for i, name in enumerate(names)]
        self.lock: int | None = None
        self._per_device, self._share = per_device, share
        self._leases = Leases(holder)
        self._held: set[str] = set()
        if not share:
            self._check_free(spec)

    def _check_free(self, spec: Spec) -> None:
        """Refuse where others than runners, which end some time, use all devices."""
        users = {}
        for device in self._devices.values():
            if self._leases.take(device.keys) is None:
                users[device.name] = foreign_users(device)
            self._leases.release()
        if len(users) == len(self._devices) and all(users.values()):
            told = "; ".join(f"{name} by {who}" for name, who in users.items())
            fix = "wait, give others, or give --share to run beside them"
            raise DeviceError(f"devices={spec!r}: all are in use ({told}); {fix}")

    def obstacle(self, slot: Slot, running: int) -> str | None:
        device = self._devices[slot.device]
        if device.name not in self._held:
            holder = self._leases.take(device.keys)
            if holder:
                return f"{device.name} is used by {holder}"
            users = None if self._share else foreign_users(device)
            if users:
                self._give_back(device)
                return f"{device.name} is used by {users}"
            self._held.add(device.name)
        return None if memory_for_one_more(device, running) else f"{device.name} has no memory for one more trial"

    def _give_back(self, device: Device) -> None:
        still = {key for name in self._held - {device.name} for key in self._devices[name].keys}
        self._leases.release(set(device.keys) - still)

    def environment(self, slot: Slot, base: Mapping[str, str]) -> dict[str, str]:
        return self._devices[slot.device].environment(base, self._per_device)

    def start(self, slot: Slot, folder: Path, order: Order, environment: Mapping[str, str]) -> Attempt:
        device = self._devices[slot.device]
        order = Order(**{**vars(order), "cores": list(device.cores)})
        study = [] if self.lock is None else [self.lock]
        return LocalAttempt(folder, order, environment, [*self._leases.files(device.keys), *study])

    def release(self, slot: Slot) -> None:
        if slot.device in self._held:
            self._held.discard(slot.device)
            self._give_back(self._devices[slot.device])

    def close(self) -> None:
        self._leases.release()
        self._held.clear()


def holder_text(directory: Path) -> str:
    """Who a runner is, for others that wait for its devices."""
    return f"process {os.getpid()} ({directory})"
