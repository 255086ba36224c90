"""How often towers meet in a step, and with how many bytes, read from the graph of one tower."""

import math
from collections.abc import Iterator
from typing import Any

from ..wiring import is_marker

_COLLECTIVES = ("CollectiveReduceV2", "CollectiveGatherV2")
_SAME_NUMBERS = ("Reshape", "Pad", "PadV2", "Cast", "Identity", "ExpandDims", "EnsureShape")


def meetings(graph: Any, shard_rows: int) -> tuple[int, int]:
    """Count what a traced step has of collectives and other meetings.

    Args:
        graph: the tf.Graph of one tower.
        shard_rows: rows of the tower, what a dimension left open stands for.

    Returns:
        (meetings, bytes): how many there are, one in a loop counted once; and the bytes that one tower gives to those
        outside of loops and conditionals, without what a ring or a host sends on.
    """
    operations = graph.get_operations()
    sizes = [_bytes(op.inputs[0], shard_rows) for op in operations if _is_meeting(op.type, op.name)]
    return len(sizes) + sum(_is_meeting(node.op, node.name) for node in _nested(graph)), sum(sizes)


def _nested(graph: Any) -> Iterator[Any]:
    """The nodes of the functions that a graph calls: loops, conditionals and their like."""
    for function in graph.as_graph_def().library.function:
        yield from function.node_def


def _is_meeting(kind: str, name: str) -> bool:
    return is_marker(kind, name) or kind in _COLLECTIVES


def _bytes(tensor: Any, shard_rows: int) -> int:
    """Size of a tensor; where its shape was lost in filling it up, that of what it was made from."""
    source = tensor
    while not source.shape.is_fully_defined() and _flat(source) and source.op.type in _SAME_NUMBERS:
        source = source.op.inputs[0]
    dimensions = [shard_rows if d is None else d for d in (source.shape if source.shape.rank is not None else [None])]
    return math.prod(dimensions) * tensor.dtype.size


def _flat(tensor: Any) -> bool:
    return tensor.shape.rank is None or tensor.shape.rank == 1
