"""Trials on a Ray cluster: the same runner, each process started by an actor wherever Ray has room.

    runner ── Host, an actor on some node: guard ──> the trial's process     one GPU, or one CPU, reserved by Ray
       └───── a few times a second: what its logs have grown by ──> the attempt's folder here

Files come to the study's folder as if the trial ran here, so metrics, hangs and early ends are found alike. The
snapshot of a job goes along; multitower, or the command's program, has to be on the nodes. Ray ends the actors of a
runner that dies, and their guards end the trials.
"""

import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from ..device_spec import Spec, parse, spec_error
from ..errors import DeviceError
from .machine import Slot
from .process import LocalAttempt, Order
from .readout import HISTORY

_LOGS = ("stdout.log", "stderr.log", HISTORY)  # they only grow
_CHUNK_BYTES = 1 << 24
_LOOK_SECONDS = 0.2
_STOP_SECONDS = 30.0
_KNOCK_SECONDS = 10.0


class Host:
    """An actor on a node that runs one attempt, in a folder of its own there."""

    def __init__(
        self, order: dict[str, Any], environment: dict[str, str], files: dict[str, bytes], here: dict[str, str]
    ):
        """Start the attempt.

        Args:
            order: an Order as a dict.
            environment: beside that of the node.
            files: of the study, by their path in its folder.
            here: paths of "study", "attempt" and "python" where the runner is; those of the node take their place.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="multitower-trial-"))
        self._attempt_folder = self._folder / "attempt"
        self._attempt_folder.mkdir()
        for name, content in files.items():
            path = self._folder / "study" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        there = {"attempt": str(self._attempt_folder), "study": str(self._folder / "study"), "python": sys.executable}

        def moved(text: str) -> str:
            for name, path in there.items():  # the attempt first: it lies in the study
                text = text.replace(here[name], path) if name in here else text
            return text

        cwd = order["cwd"] if Path(order["cwd"]).is_dir() else str(self._folder)
        order = {**order, "command": [moved(part) for part in order["command"]], "cwd": cwd}
        seen = {**os.environ, **{name: moved(value) for name, value in environment.items()}}
        if not ray.get_gpu_ids():  # where there are some, Ray has set CUDA_VISIBLE_DEVICES to them
            seen["CUDA_VISIBLE_DEVICES"] = "-1"
        self._attempt = LocalAttempt(self._attempt_folder, Order(**order), seen)

    def look(self, sizes: dict[str, int]) -> tuple[dict[str, bytes], bool]:
        """What the logs have grown by since they had these sizes, and whether the attempt has ended."""
        ended = self._attempt.ended()
        return {name: self.read(name, sizes.get(name, 0)) for name in _LOGS}, ended

    def read(self, name: str, offset: int) -> bytes:
        """A part of a file; empty at its end."""
        try:
            with open(self._attempt_folder / name, "rb") as file:
                file.seek(offset)
                return file.read(_CHUNK_BYTES)
        except OSError:
            return b""

    def names(self) -> list[str]:
        """All files of the attempt, the result last."""
        files = [p.relative_to(self._attempt_folder) for p in self._attempt_folder.rglob("*") if p.is_file()]
        return sorted(map(str, files), key=lambda name: name == "result.json")

    def device(self) -> str:
        """The node, and which of its GPUs."""
        gpus = ray.get_gpu_ids()
        return f"{ray.util.get_node_ip_address()} {'GPU:' + ','.join(map(str, gpus)) if gpus else 'CPU'}"

    def stop(self) -> None:
        """Ask the attempt to end."""
        self._attempt.stop()

    def remove(self) -> None:
        """End the attempt and leave nothing on the node."""
        self._attempt.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class RemoteAttempt:
    """An attempt on a node; its files are copied here."""

    def __init__(self, host: Any, folder: Path):
        self._host, self._folder = host, folder
        self._sizes: dict[str, int] = {}
        self._looked = time.monotonic()
        self._look = host.look.remote({})
        self._begun = self._done = False

    def begun(self) -> bool:
        return self._begun

    def ended(self) -> bool:
        if self._done or not self._look:
            self._look_again()
            return self._done
        if not ray.wait([self._look], timeout=0)[0]:
            return False
        try:
            chunks, ended = ray.get(self._look)
            self._look, self._begun = None, True
            grown = [self._append(name, chunk) for name, chunk in chunks.items()]
            if ended and not any(grown):
                self._fetch()
        except (ray.exceptions.RayError, OSError) as error:
            self._lost(error)
        return self._done

    def _look_again(self) -> None:
        if not self._done and time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._look = self._host.look.remote(self._sizes)

    def _append(self, name: str, chunk: bytes) -> bool:
        path = self._folder / name
        if chunk:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.write(chunk)
        self._sizes[name] = self._sizes.get(name, 0) + len(chunk)
        return bool(chunk)

    def _fetch(self) -> None:
        """Copy what is not here yet, the result last and in one piece, with the device it was on."""
        device = ray.get(self._host.device.remote())
        for name in ray.get(self._host.names.remote()):
            while self._append(name, ray.get(self._host.read.remote(name, self._sizes.get(name, 0)))):
                pass
        path = self._folder / "result.json"
        if path.exists():
            self._write({**json.loads(path.read_bytes()), "device": device})
        self._done = True
        self._leave()

    def _lost(self, error: Exception) -> None:
        """The node or the actor has gone."""
        lines = str(error).splitlines() or [type(error).__name__]
        self._write({"error": f"lost on the cluster ({lines[0]})", "exit_code": None})
        self._done = True
        self._leave()

    def _write(self, result: Mapping[str, Any]) -> None:
        part = self._folder / "result.part"
        part.write_text(json.dumps(result), encoding="utf-8")
        part.replace(self._folder / "result.json")

    def stop(self) -> None:
        if self._begun:
            self._host.stop.remote()
        else:
            self._lost(RuntimeError("stopped before it was started"))

    def close(self) -> None:
        if not self._done:
            self._leave()

    def _leave(self) -> None:
        with suppress(ray.exceptions.RayError):
            if self._begun:
                ray.get(self._host.remove.remote(), timeout=_STOP_SECONDS)
        ray.kill(self._host)


class Cluster:
    """The resources of a Ray cluster; Ray chooses node and device of each trial."""

    def __init__(self, address: str, spec: Spec, per_device: int, directory: Path):
        """Connect to the cluster.

        Args:
            address: as `ray.init` takes it.
            spec: how many GPUs or CPUs to use at once, as `multitower.devices` takes them; no single ones.
            per_device: trials on each.
            directory: of the study.

        Raises:
            DeviceError: no cluster there, or it has no such devices.
        """
        self._directory = directory.resolve()
        self.lock: int | None = None
        _knock(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise DeviceError(
                f"--ray {address}: no Ray cluster there ({lines[0]}); start one with `ray start`"
            ) from error
        kind, count = _resources(spec, ray.cluster_resources())
        self._needs = {"num_gpus": 1 / per_device} if kind == "GPU" else {"num_cpus": 1 / per_device}
        self.slots = [Slot(i, f"ray {kind}", f"ray {i // per_device}") for i in range(count * per_device)]

    def obstacle(self, slot: Slot, running: int) -> str | None:
        return None  # Ray keeps what it cannot start yet

    def environment(self, slot: Slot, base: Mapping[str, str]) -> dict[str, str]:
        """What is added to the environment of the node."""
        return {name: value for name, value in base.items() if name.startswith(("MULTITOWER_", "PYTHONUNBUFFERED"))}

    def start(self, slot: Slot, folder: Path, order: Order, environment: Mapping[str, str]) -> RemoteAttempt:
        job = self._directory / "job"
        sent = [path for path in job.rglob("*") if path.is_file() and not path.is_symlink()]
        files = {str(path.relative_to(self._directory)): path.read_bytes() for path in sent}
        here = {
            "attempt": str(folder),
            "study": str(self._directory),
            **({"python": sys.executable} if order.report else {}),
        }
        host = ray.remote(Host).options(**self._needs).remote(asdict(order), dict(environment), files, here)
        return RemoteAttempt(host, folder)

    def release(self, slot: Slot) -> None:
        """Ray has it back when the actor ends."""

    def close(self) -> None:
        ray.shutdown()


def _knock(address: str) -> None:
    """Refuse an address where nobody listens: ray.init would try it for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # "auto", "local" or a name that ray.init looks up
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise DeviceError(f"--ray {address}: no Ray cluster there ({error}); start one with `ray start`") from error


def _resources(spec: Spec, there: Mapping[str, float]) -> tuple[str, int]:
    """Kind and number of the devices to use at once."""
    wish = parse(spec)
    if isinstance(wish, tuple):
        raise spec_error(spec, "how many devices of the cluster, such as gpu, cpu:8 or 4", "Ray chooses which")
    gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
    use_gpus = wish.gpus != 0 and (gpus > 0 or wish.cpus == 0)
    kind, have, count = ("GPU", gpus, wish.gpus) if use_gpus else ("CPU", cpus, "all" if spec is None else wish.cpus)
    count = have if count == "all" else int(count)
    if not 1 <= count <= have:
        raise spec_error(spec, f"at most {have}, the {kind}s of the cluster", f"give {have or 'cpu'}")
    return kind, count
