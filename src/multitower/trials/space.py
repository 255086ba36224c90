"""The settings of a search: every one of a grid, or some drawn at random; each once.

    "0.1,0.01"          a choice of values           "log:1e-4..1e-1"    a number, evenly over its logarithm
    "int:16..128"       a whole number               "float:0..0.5"      a number, evenly
                                                     "logint:16..1024"   a whole number, evenly over its logarithm

A grid takes choices and `int` ranges, a random search all of them. Values are Python literals, else texts.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..errors import JobError
from ..parameters import literal

_KINDS = ("log", "float", "int", "logint")
_DRAWS = 1000  # tries to draw a setting that was not drawn yet


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]

    def draw(self, rng: random.Random) -> Any:
        """One value, each as likely as the others."""
        return rng.choice(self.values)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
        kind: "float" or "int", evenly; "log" or "logint", evenly over the logarithm.
    """

    kind: str
    low: float
    high: float

    def draw(self, rng: random.Random) -> float | int:
        """One number of the range."""
        if self.kind == "int":
            return rng.randint(int(self.low), int(self.high))
        if self.kind == "float":
            return rng.uniform(self.low, self.high)
        whole = self.kind == "logint"
        low, high = (
            (self.low - 0.5, self.high + 0.5) if whole else (self.low, self.high)
        )  # the ends as likely as others
        value = math.exp(rng.uniform(math.log(low), math.log(high)))
        value = round(value) if whole else value
        return min(max(value, int(self.low) if whole else self.low), int(self.high) if whole else self.high)


def parse_space(settings: Sequence[str]) -> dict[str, Choice | Range]:
    """Read what the command line's `--set` was given.

    Example:
        >>> parse_space(["lr=0.1,0.01", "width=int:16..64"])
        {'lr': Choice(values=(0.1, 0.01)), 'width': Range(kind='int', low=16.0, high=64.0)}

    Raises:
        JobError: not NAME=VALUES, a name given twice, or a range without numbers.
    """
    space: dict[str, Choice | Range] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.isidentifier():
            raise JobError(f"parameter {setting!r}; expected NAME=VALUES, such as lr=0.1,0.01 or lr=log:1e-4..1e-1")
        if name in space:
            raise JobError(f"parameter {name} is given twice; give its values once, with commas between them")
        space[name] = _axis(name, text)
    return space


def make_space(settings: Mapping[str, Any]) -> dict[str, Choice | Range]:
    """The same from Python: texts as on the command line, sequences of values, or single values."""
    space: dict[str, Choice | Range] = {}
    for name, values in settings.items():
        if isinstance(values, str):
            space[name] = _axis(name, values)
        elif isinstance(values, Range | Choice):
            space[name] = values
        else:
            space[name] = Choice(tuple(values) if isinstance(values, list | tuple) else (values,))
        _check(name, space[name])
    return space


def _check(name: str, axis: Choice | Range) -> None:
    values = axis.values if isinstance(axis, Choice) else ()
    if isinstance(axis, Choice) and not values:
        raise JobError(f"parameter {name} has no values; expected at least one")
    for value in values:
        if literal(repr(value)) != value:  # a setting is given to another process as text
            raise JobError(f"parameter {name} has the value {value!r}; expected numbers, texts, lists, tuples or dicts")


def _axis(name: str, text: str) -> Choice | Range:
    kind, colon, rest = text.partition(":")
    if colon and kind in _KINDS and ".." in rest:
        return _range(name, text, kind, rest)
    values = [part.strip() for part in _split(text)]
    if not all(values):
        raise JobError(f"parameter {name}={text!r} has an empty value; expected values with commas between them")
    return Choice(tuple(literal(value) for value in values))


def _range(name: str, text: str, kind: str, rest: str) -> Range:
    low, high = (literal(part) for part in rest.split("..", 1))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in (low, high))
    if not numbers or not low < high or (kind.startswith("log") and low <= 0):
        expected = "two numbers, the smaller one first" + (" and above 0" if kind.startswith("log") else "")
        raise JobError(f"parameter {name}={text!r}; expected {expected}, such as {kind}:1..100")
    if kind.endswith("int") and not (float(low).is_integer() and float(high).is_integer()):
        raise JobError(f"parameter {name}={text!r}; expected whole numbers, such as {kind}:1..100")
    return Range(kind, float(low), float(high))


def _split(text: str) -> Iterator[str]:
    """Parts between the commas that stand outside of brackets and quotes."""
    depth, quote, part = 0, "", ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        depth += (sign in "([{") - (sign in ")]}") if not quote else 0
        if sign == "," and not depth and not quote:
            yield part
            part = ""
        else:
            part += sign
    yield part


def grid(space: Mapping[str, Choice | Range]) -> list[dict[str, Any]]:
    """Every combination once, the last parameter changing fastest.

    Raises:
        JobError: a range of numbers without end.
    """
    axes = []
    for name, axis in space.items():
        if isinstance(axis, Range) and axis.kind != "int":
            raise JobError(f"parameter {name} is a range of {axis.kind}; give --random N to draw N settings from it")
        values = range(int(axis.low), int(axis.high) + 1) if isinstance(axis, Range) else axis.values
        axes.append(values)
    return _distinct(dict(zip(space, values, strict=True)) for values in product(*axes))


def draw(space: Mapping[str, Choice | Range], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` different settings at random; all of them where there are not that many.

    The same space, count and seed give the same settings; a larger count begins with those of a smaller one.
    """
    rng = random.Random(seed)
    drawn: dict[str, dict[str, Any]] = {}
    for _ in range(count):
        for _ in range(_DRAWS):
            setting = {name: axis.draw(rng) for name, axis in space.items()}
            if key(setting) not in drawn:
                drawn[key(setting)] = setting
                break
    missing = count - len(drawn)
    if missing and all(isinstance(axis, Choice) or axis.kind == "int" for axis in space.values()):
        rest = [setting for setting in grid(space) if key(setting) not in drawn]
        drawn |= {key(setting): setting for setting in rng.sample(rest, min(missing, len(rest)))}
    return list(drawn.values())


def key(setting: Mapping[str, Any]) -> str:
    """A text that is the same for equal settings, and for no others: 1, 1.0 and True are three values."""
    return json.dumps({name: repr(value) for name, value in setting.items()}, sort_keys=True)


def _distinct(settings: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({key(setting): setting for setting in settings}.values())
