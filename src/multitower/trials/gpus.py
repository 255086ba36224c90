"""The GPUs of this machine and who uses them, told by NVML: it starts no CUDA and takes no memory of a card.

    cards()            every GPU this process may use: CUDA_VISIBLE_DEVICES is respected, MIG instances count singly
    users(card)        other processes on it, and the memory in use

UUIDs name a card for good; indices mean one card to NVML, which orders by bus, and may mean another to CUDA, which puts
the fastest first unless CUDA_DEVICE_ORDER says otherwise.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml

_USED_BYTES = 1 << 30  # of memory in use by nobody NVML can name, as in a container, make a card taken


@dataclass(frozen=True)
class Card:
    """A GPU or a MIG instance.

    Attributes:
        token: what CUDA_VISIBLE_DEVICES has to be for a process to see this one alone: its UUID.
        uuid: of the card or the instance; None where NVML cannot tell which one the user's token means.
        name: of the model.
    """

    token: str
    uuid: str | None
    name: str


@contextmanager
def _nvml() -> Iterator[bool]:
    """NVML started, or False where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def cards() -> list[Card]:
    """The GPUs and MIG instances this process may use, in the order of their indices; empty without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with _nvml() as there:
        if not there:
            return []
        found = [_handle(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if visible is None:
            return [card for handle in found for card in _units(handle)]
        return _visible(visible, found)


def _handle(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _card(handle: Any) -> Card:
    uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    return Card(uuid, uuid, _text(pynvml.nvmlDeviceGetName(handle)))


def _instances(handle: Any) -> list[Card] | None:
    """The MIG instances of a card; None where MIG is off or unknown to it."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
    except pynvml.NVMLError:
        return None
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError):  # no instance in this place
            found.append(_card(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
    return found


def _units(handle: Any) -> list[Card]:
    instances = _instances(handle)
    return [_card(handle)] if instances is None else instances


def _visible(tokens: str, handles: list[Any]) -> list[Card]:
    """The cards a CUDA_VISIBLE_DEVICES names; as in CUDA, those before the first that does not exist."""
    every = [_card(handle) for handle in handles]
    units = [*every, *(card for handle in handles for card in _instances(handle) or [])]
    # Which card an index means is certain only where CUDA counts as NVML does, or all are alike
    certain = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({card.name for card in every}) <= 1
    found: list[Card] = []
    for token in (part.strip() for part in tokens.split(",")):
        if token.isdigit() and int(token) < len(every):
            card = every[int(token)] if certain else Card(token, None, every[int(token)].name)
            split = _instances(handles[int(token)]) if certain else None
            found += [card] if split is None else split
            continue
        named = [card for card in units if token and card.uuid and card.uuid.startswith(token)]
        if len(named) != 1:
            break
        found += named
    return found


@dataclass(frozen=True)
class Use:
    """How much of a card is in use.

    Attributes:
        pids: other processes that compute on it.
        used_bytes: memory in use.
        free_bytes: memory that is not.
    """

    pids: tuple[int, ...]
    used_bytes: int
    free_bytes: int

    @property
    def taken(self) -> bool:
        """Whether others use the card."""
        return bool(self.pids) or self.used_bytes > max(_USED_BYTES, (self.used_bytes + self.free_bytes) // 20)


def use(card: Card) -> Use | None:
    """Who uses a card now; None where NVML cannot tell."""
    with _nvml() as there:
        if not there or card.uuid is None:
            return None
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(card.uuid)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            pids = _pids(handle)
        except pynvml.NVMLError:
            return None
    return Use(pids, int(memory.used), int(memory.free))


def _pids(handle: Any) -> tuple[int, ...]:
    try:
        return tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except pynvml.NVMLError:  # not told for this kind of card, or to this user
        return ()
