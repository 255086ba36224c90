"""Small programs for trials, without TensorFlow, and what they leave: a line in a file for each thing they did."""

import os
import sys
from pathlib import Path

import multitower

# The package under test from any working directory
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(str(multitower.__file__)).parents[1]), "PYTHONUNBUFFERED": "1"}

_HEAD = """
import json, os, subprocess, sys, time
x = sys.argv[1]

def mark(kind):
    file = os.open({marks!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{{kind}} {{x}} {{os.getpid()}}\\n".encode())
    os.close(file)

"""


def program(text):
    """A function of a folder that writes the program there and gives the command; `{x}` in it is the parameter x."""

    def command(folder):
        path = folder / "program.py"
        head = _HEAD.format(marks=str(folder / "marks.txt"))
        path.write_text(head + text.replace("{x}", "json.loads(x)").replace("; ", "\n") + "\n")
        return [sys.executable, str(path), "{x}"]

    return command


def marks(folder):
    """(kind, x, pid) of each call of `mark`, in their order."""
    path = folder / "marks.txt"
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


def started(folder):
    """Numbers of the processes that left a mark."""
    return sorted({int(pid) for _, _, pid in marks(folder)})


def alive(pid):
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
