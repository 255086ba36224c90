"""The process between the runner and a trial: `python guard.py ORDER.json`, in a session of its own.

    runner ──pipe──> guard ──> the trial's process and all it starts

The guard starts the command, waits, and writes `result.json` in one piece. When the runner asks ("stop" on the pipe)
or is gone (the pipe ends, whatever killed the runner), it ends the command and every process that came from it: on
Linux it is their "subreaper", so none gets away; elsewhere the command's process group is ended. Where the guard itself
is killed, Linux ends the command (PR_SET_PDEATHSIG). Locks of devices are inherited: they stay taken until the guard
has gone.

A command that has written its result when the runner dies is given a few seconds to end by itself, so that no
trial runs to its end twice.

It runs as a file with the standard library alone (`python -I -S`), to start fast.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TAIL_BYTES = 65536  # of the output, searched for the result


def main():
    order = json.loads(Path(sys.argv[1]).read_bytes())
    folder = Path(sys.argv[1]).parent
    if order["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, order["cores"])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake = waker()
    if runner_gone(wait_seconds=0):
        return
    began = time.time()
    try:
        process = start(order, folder)
    except OSError as error:
        write(folder / "result.json", {"error": f"{order['command'][0]}: {error.strerror}", "exit_code": None})
        return
    ended_by = follow(process, wake, order, folder)
    ended = time.time()
    end_everything(process)
    result = {"exit_code": process.returncode, "ended_by": ended_by, "began": began, "ended": ended}
    write(folder / "result.json", {**result, "environment": seen(order["record"])})


def start(order, folder):
    """Start the command; where it is and when it began stand in `process.json`, for a runner that finds only that."""
    with open(folder / "stdout.log", "ab") as out, open(folder / "stderr.log", "ab") as err:
        process = subprocess.Popen(
            order["command"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=order["cwd"],
            start_new_session=True,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    pids = {"guard": [os.getpid(), start_time(os.getpid())], "command": [process.pid, start_time(process.pid)]}
    write(folder / "process.json", pids)
    return process


def seen(names):
    """What the command found in its environment, as it was inherited from here, and its cores."""
    cores = {"cores": sorted(os.sched_getaffinity(0))} if hasattr(os, "sched_getaffinity") else {}
    return {**{name: os.environ[name] for name in names if name in os.environ}, **cores}


def waker():
    """The reading end of a pipe that gets a byte whenever a child ends."""
    read, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read


def follow(process, wake, order, folder):
    """Wait until the command ends: by "itself", or here, as asked by the "runner" or as the "orphan" of a dead one."""
    while process.poll() is None:
        ready, _, _ = select.select([0, wake], [], [], 1.0)
        if wake in ready:
            os.read(wake, 4096)
        if 0 in ready:
            return end(process, order, folder, asked=bool(os.read(0, 4096)))
    return "itself"


def end(process, order, folder, asked):
    if not asked:
        seconds = order["finish_seconds"] if result_is_there(order, folder) else 0
        return "itself" if ends_within(process, seconds) else "orphan"
    signal_group(process, signal.SIGTERM)
    return "itself" if ends_within(process, order["stop_seconds"]) and process.returncode == 0 else "runner"


def ends_within(process, seconds):
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    return process.poll() is not None


def result_is_there(order, folder):
    """Whether the command has written its result: the report of a job, or as its last line the metric."""
    if order["report"]:
        return (folder / order["report"]).exists()
    with open(folder / "stdout.log", "rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        lines = file.read().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return False
    return isinstance(found, dict) and (order["metric"] is None or order["metric"] in found)


def end_everything(process):
    """End the command's group, then all that was left to this process to care for, until nothing is."""
    signal_group(process, signal.SIGKILL)
    process.wait()
    for _ in range(1000):
        left = children()
        for pid in left:
            quietly(os.kill, pid, signal.SIGKILL)
        while quietly(os.waitpid, -1, os.WNOHANG) not in (None, (0, 0)):
            pass
        if not left:
            return
        time.sleep(0.005)


def children():
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # not Linux
        return []


def signal_group(process, number):
    quietly(os.killpg, process.pid, number)


def quietly(call, *arguments):
    try:
        return call(*arguments)
    except OSError:
        return None


def runner_gone(wait_seconds):
    ready, _, _ = select.select([0], [], [], wait_seconds)
    return bool(ready) and not os.read(0, 4096)


def prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def start_time(pid):
    """When a living process started, in ticks since the machine did: with the number it names a process for good."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # not Linux, or it has gone
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def write(path, value):
    """The whole file or none of it, whatever happens while it is written."""
    part = path.with_suffix(".part")
    with open(part, "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


if __name__ == "__main__":
    main()
