"""What a training step can change: every variable of a model, its optimizers and its metrics, in layer order.

Keras lists the weights of a model, the slots of `model.optimizer` and the state of `model.metrics`. A model may hold
more: a second optimizer, a tf.Variable in a layer, a layer in a list. This looks at the attributes of the model and of
everything in it instead, so that nothing a step writes is left out of a comparison because Keras does not list it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

KINDS = ("weight", "state", "optimizer", "metric", "seed")  # the order of a list of entries
_EPSILON = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-23, "float64": 2**-52}


@dataclass(frozen=True)
class Entry:
    """A variable and what it is.

    Attributes:
        kind: "weight" (trained), "state" (of a layer, not trained), "optimizer", "metric" or "seed" (random numbers).
        layer: name of the layer, optimizer or metric that holds the variable; None for one that stands alone.
        path: of the variable.
        variable: a keras.Variable or tf.Variable.
        compute_epsilon: spacing of numbers next to 1 in the dtype in which its layer computes; 0 for whole numbers.
    """

    kind: str
    layer: str | None
    path: str
    variable: Any
    compute_epsilon: float

    @property
    def epsilon(self) -> float:
        """Spacing of numbers next to 1 in the variable's own dtype; 0 for whole numbers."""
        return epsilon_of(self.variable.dtype)


def epsilon_of(dtype: Any) -> float:
    """Spacing of numbers next to 1, relative to them; 0 for whole numbers, booleans and strings."""
    name = dtype.name if isinstance(dtype, tf.DType) else str(dtype)
    return _EPSILON.get(name, 0.0)


def inventory(*roots: Any) -> list[Entry]:
    """Every variable that a step can change, each once: by kind, and within a kind in layer order.

    Args:
        *roots: a keras.Model; for a hand-written step what it uses: variables, models, layers, optimizers, metrics.
    """
    found: list[Entry] = []
    known: set[int] = set()
    for kind, holder, variable in _variables(roots):
        key = id(variable.value) if isinstance(variable, keras.Variable) else id(variable)
        if key not in known and variable.dtype not in ("string", tf.string):
            known.add(key)
            found.append(_entry(kind, holder, variable))
    return sorted(found, key=lambda entry: KINDS.index(entry.kind))


def layers_of(*roots: Any) -> list[keras.Layer]:
    """Every layer among the roots and in them, at any depth, in the order of definition: outer ones first."""
    return [part for part in _parts(roots) if isinstance(part, keras.Layer)]


def optimizers_of(*roots: Any) -> list[tuple[Any, str, keras.Optimizer]]:
    """(owner, attribute, optimizer) of every optimizer that is an attribute of a model or layer."""
    return [
        (part, name, value)
        for part in layers_of(*roots)
        for name, value in vars(part).items()
        if isinstance(value, keras.Optimizer)
    ]


def _entry(kind: str, holder: Any, variable: Any) -> Entry:
    own = epsilon_of(variable.dtype)
    compute = epsilon_of(getattr(holder, "compute_dtype", None)) if own else 0.0
    path = getattr(variable, "path", None) or variable.name.split(":")[0]
    layer = None if holder is variable else getattr(holder, "name", type(holder).__name__)
    return Entry(kind, layer, path, variable, max(own, compute))


def _variables(roots: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """(kind, holder, variable); a variable may come more than once."""
    for part in _parts(roots):
        if isinstance(part, keras.Optimizer):
            yield from (("optimizer", part, v) for v in part.variables)
        elif isinstance(part, keras.Metric):
            yield from (("metric", part, v) for v in part.variables)
        else:
            values = [part] if isinstance(part, _VARIABLES) else list(_flat(vars(part)))
            yield from (("seed", part, v.state) for v in values if isinstance(v, keras.random.SeedGenerator))
            own = [v for v in values if isinstance(v, _VARIABLES)]
            yield from (("weight" if v.trainable and epsilon_of(v.dtype) else "state", part, v) for v in own)


_VARIABLES = (keras.Variable, tf.Variable)
_HOLDERS = (keras.Layer, keras.Optimizer, keras.Metric, tf.Module)


def _parts(roots: Sequence[Any]) -> Iterator[Any]:
    """The roots and every object in them that can hold variables, depth first, each once."""
    seen = set()
    queue = list(reversed(list(_flat(roots))))
    while queue:
        part = queue.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, (keras.Layer, tf.Module)):
            queue += [v for v in reversed(list(_flat(vars(part)))) if isinstance(v, _HOLDERS)]


def _flat(container: Any) -> Iterator[Any]:
    """The values in dicts, lists, tuples and sets, at any depth."""
    for value in container.values() if isinstance(container, dict) else container:
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            yield from _flat(value)
        else:
            yield value
