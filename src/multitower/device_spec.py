"""What a user writes for devices, read: how many of a kind, or certain ones. Needs no machine and no TensorFlow.

    "all", 4, "cpu:4"          -> Count
    "gpu:0,2", ["CPU:1", …]    -> ("GPU:0", "GPU:2"), ("CPU:1", …)

Whether there are such devices, `device.devices` finds out for towers and `trials.slots` for trials.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, Protocol

from .errors import DeviceError

_NAME = re.compile(r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:device:)?([cg]pu):([0-9]{1,9})", re.IGNORECASE)
FORMS = 'None, "all", a number, "gpu", "gpu:0,2", "cpu", "cpu:4" or a list of names such as ["GPU:0", "GPU:1"]'


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
        return (short_name(spec, spec),)
    if isinstance(spec, list | tuple):
        return _distinct([short_name(item, spec) for item in spec], spec)
    if isinstance(spec, Integral) and not isinstance(spec, bool):  # numpy's integers too; True is a mistake, not 1
        return _number(int(spec), spec)
    raise spec_error(spec, FORMS, "give one of these")


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
        return (short_name(text, text),)
    raise spec_error(text, FORMS, _suggestion(text.lower()))


def _cpu_count(rest: str, text: str) -> Amount:
    if not re.fullmatch(r"\s*-?[0-9]{1,9}", rest):
        expected = 'the number of logical CPU devices after "cpu:"'
        raise spec_error(text, expected, 'name single ones in a list, such as ["CPU:0", "CPU:1"]')
    return _number(int(rest), text).cpus


def _gpu_names(rest: str, text: str) -> tuple[str, ...]:
    indices = [part.strip().removeprefix("gpu:") for part in rest.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", index) for index in indices):
        raise spec_error(text, 'indices of GPUs after "gpu:", such as "gpu:0,2"', 'all GPUs are "gpu"')
    return _distinct([f"GPU:{int(index)}" for index in indices], text)


def _number(n: int, spec: Spec) -> Count:
    if n < 1:
        raise spec_error(spec, "at least 1 device", 'the device with index 0 is ["GPU:0"] or ["CPU:0"], in a list')
    return Count(n, n)


def _distinct(names: list[str], spec: Spec) -> tuple[str, ...]:
    if not names:
        raise spec_error(spec, "at least 1 device", "give None to have the devices chosen")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise spec_error(spec, "a different device for each tower", f"name {twice[0]} once")
    if len({name[:3] for name in names}) > 1:  # TensorFlow's collectives take devices of one kind
        raise spec_error(spec, "devices of one kind", "name only GPUs or only CPUs")
    return tuple(names)


def short_name(item: object, spec: object) -> str:
    name = item if isinstance(item, str) else getattr(item, "name", item)
    match = _NAME.fullmatch(name.strip()) if isinstance(name, str) else None
    if match:
        return f"{match[1].upper()}:{int(match[2])}"
    of_cluster = isinstance(name, str) and name.startswith("/job:")
    fault = "is not a device of this process" if of_cluster else "is no name of a device"
    raise spec_error(spec, 'names such as "GPU:0" or "/device:CPU:1"', f"{_shown(name)} {fault}")


def _suggestion(text: str) -> str:
    word, numbers = re.sub(r"[^a-z].*", "", text, flags=re.DOTALL), re.sub(r"^[^0-9]*|[^0-9,]", "", text)
    near = ["gpu"] if word == "cuda" else difflib.get_close_matches(word, ["gpu", "cpu", "all"], n=1)
    tail = f":{numbers}" if numbers and near != ["all"] else ""
    return f'did you mean "{near[0]}{tail}"?' if near else "give one of these"


def spec_error(spec: object, expected: str, fix: str) -> DeviceError:
    return DeviceError(f"devices={_shown(spec)}: expected {expected}; {fix}")


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
