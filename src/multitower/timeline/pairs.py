"""Backward operations and the devices of their forward operations.

tf.GradientTape names a backward operation after the scope of its forward operation:

    tower/dense/MatMul            forward
    tower/gradient_tape/dense/MatMul/MatMul_1     backward of it

What carries no such name (sums of gradients, gradients written by hand) belongs to the forward pass of its tower.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .graph import NOT_WORK, Graph, Node


@dataclass(frozen=True)
class Misplaced:
    """A backward operation that does not run where its forward operation runs.

    Attributes:
        name: of the backward operation.
        op: its type.
        device: where it runs.
        forward: the scope of its forward operation, or the call of its tower.
        forward_devices: where that runs.
    """

    name: str
    op: str
    device: str
    forward: str
    forward_devices: tuple[str, ...]


def misplaced(graph: Graph, categories: Mapping[str, str]) -> tuple[list[Misplaced], int]:
    """Backward operations on another device than their forward operations, and how many backward ones were compared."""
    work = [n for n in graph.values() if n.op not in NOT_WORK and not n.integers]
    forward = _devices_by_scope([n for n in work if categories[n.name] == "forward"])
    found, compared = [], 0
    for node in work:
        if categories[node.name] != "backward":
            continue
        scope = next((s for s in _forward_scopes(node) if s in forward), None)
        if scope is None:
            continue
        compared += 1
        if node.device not in forward[scope]:
            devices = tuple(device for device, _ in forward[scope].most_common())
            found.append(Misplaced(node.name, node.op, node.device, "/".join(scope).strip("/") or "the step", devices))
    return found, compared


def _devices_by_scope(nodes: list[Node]) -> dict[tuple[str, ...], Counter]:
    """For each scope, as (call, part, part, …), the devices of the operations in it."""
    devices: dict[tuple[str, ...], Counter] = defaultdict(Counter)
    for node in nodes:
        parts = node.scope.split("/")
        for depth in range(len(parts) + 1):
            devices[(node.call, *parts[:depth])][node.device] += 1
    return devices


def _forward_scopes(node: Node) -> Iterator[tuple[str, ...]]:
    """Where the forward operation may be, the most exact place first, the tower last where there is one.

    TensorFlow numbers equal scopes, so a forward scope may be that of the backward operation without its number.
    """
    parts = node.scope.split("/")[:-1]
    at = next((i for i, part in enumerate(parts) if part.startswith("gradient_tape")), None)
    if at is not None:
        scope = [*parts[:at], *parts[at + 1 :]]
        while scope:
            yield (node.call, *scope)
            shorter = re.sub(r"_\d+$", "", scope[-1])
            yield (node.call, *scope[:-1], shorter)
            scope = scope[:-1]
    else:
        yield from _of_graph_gradients(node.call, parts)
    if node.call:
        yield (node.call,)


def _of_graph_gradients(call: str, parts: list[str]) -> Iterator[tuple[str, ...]]:
    """tf.gradients: gradients/tower/dense/MatMul_grad/MatMul_1 is of tower/dense/MatMul."""
    at = next((i for i, part in enumerate(parts) if part.endswith("_grad")), None)
    if at is not None and "gradients" in parts[:at]:
        start = parts.index("gradients") + 1
        yield (call, *parts[start:at], parts[at].removesuffix("_grad"))
