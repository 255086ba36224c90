"""Parameters of a job: `NAME=VALUE` texts to Python values, and which function takes which."""

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import JobError

EVERYTHING = "**"  # stands among the accepted names of a function that has **kwargs


def parse_params(settings: Iterable[str]) -> dict[str, Any]:
    """Read settings: the value is a Python literal, else the text itself.

    Example:
        >>> parse_params(["lr=1e-3", "shape=(8, 8)", "kind=wide"])
        {'lr': 0.001, 'shape': (8, 8), 'kind': 'wide'}

    Raises:
        JobError: a setting that is not NAME=VALUE, or a name given twice.
    """
    params: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.isidentifier():
            raise JobError(f"parameter {setting!r}; expected NAME=VALUE, such as lr=0.01")
        if name in params:
            raise JobError(f"parameter {name} is given twice; give it once")
        params[name] = literal(text)
    return params


def literal(text: str) -> Any:
    """The value of a Python literal; any other text is its own value."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def accepted(function: Callable[..., Any]) -> dict[str, bool]:
    """Names of the parameters a function takes by name, each with whether it has to be given."""
    names: dict[str, bool] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            names[EVERYTHING] = False
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            names[name] = parameter.default is parameter.empty
    return names


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a parameter of this name."""
    return bool({name, EVERYTHING} & accepted(function).keys())


def check_params(functions: Iterable[Callable[..., Any]], params: Mapping[str, Any]) -> None:
    """Refuse a parameter that no function accepts, and the lack of one that a function requires.

    Raises:
        JobError: with the names that are accepted.
    """
    names: dict[str, None] = {}
    for function in functions:
        names |= dict.fromkeys(accepted(function))
        for name, required in accepted(function).items():
            if required and name not in params:
                raise JobError(f"{function.__name__} requires parameter {name!r}; give --set {name}=VALUE")
    for name in params:
        if name not in names and EVERYTHING not in names:
            known = f"{' and '.join(f.__name__ for f in functions)} accept: {', '.join(names) or 'none'}"
            raise JobError(f"no parameter {name!r}; {known}{did_you_mean(name, names)}")


def did_you_mean(received: str, candidates: Iterable[str]) -> str:
    """The end of a message that suggests the nearest candidate; empty if none is near."""
    near = difflib.get_close_matches(received, list(candidates), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
