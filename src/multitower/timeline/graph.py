"""What runs where: the operations of the partitioned graphs, after placement and optimisation.

A step of multitower is one graph, so names are unique: "…Call/tower_1/dense/MatMul" is what tower 1 does, and what
towers do once for all is named "…Call/towers/…" (see `wiring`). TensorFlow cuts the graph by device and joins the parts
by pairs of _Send and _Recv.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_TOWER = re.compile(r"(?:^|/)(?:Stateful)?PartitionedCall(?:_\d+)?/(?:tower_\d+|(towers))(?=/)")
NOT_WORK = (
    "Const",
    "_Arg",
    "_Retval",
    "_DeviceRetval",
    "_DeviceArg",
    "NoOp",
    "Identity",
    "IdentityN",
    "ReadVariableOp",
)
_INTEGERS = {3, 4, 5, 6, 9, 17, 22, 23}  # int32, uint8, int16, int8, int64, uint16, uint32, uint64 of types.proto


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Attributes:
        name: unique in the step.
        op: its type, "MatMul".
        device: "CPU:1".
        inputs: names of the nodes it waits for, data and control; a _Recv waits for its _Send.
        values: those of the inputs whose values it uses.
        call: the beginning of its name that tells its tower; "" outside towers.
        scope: its name without that.
        integers: whether it works on whole numbers: shapes and counts, which TensorFlow keeps on the host for GPUs.
    """

    name: str
    op: str
    device: str
    inputs: tuple[str, ...]
    values: tuple[str, ...]
    call: str
    scope: str
    integers: bool


Graph = dict[str, Node]


def short_device(name: str) -> str:
    """ "CPU:1" for "/job:localhost/replica:0/task:0/device:CPU:1"; of another machine's, the task too."""
    match = re.search(r"(?:/job:(\w+))?(?:/replica:\d+)?(?:/task:(\d+))?/device:(\w+:\d+)$", name)
    if not match:
        return name
    job, task, device = match.groups()
    return device if job in (None, "localhost") else f"{device} of {job} {task}"


def read_graphs(functions: Iterable[Iterable[Any]]) -> Graph:
    """The nodes of all graphs by name.

    Args:
        functions: for each function, for each device, a GraphDef.
    """
    graph: Graph = {}
    for function in functions:
        graph = read_function(function) | graph
    return graph


def graph_that_ran(functions: Iterable[Iterable[Any]], ran: set[str]) -> Graph:
    """The nodes of the functions of which something ran.

    A name that several functions have says nothing about which of them ran.

    Args:
        functions: as for `read_graphs`.
        ran: names of operations that ran.
    """
    graphs = [read_function(function) for function in functions]
    known = Counter(name for graph in graphs for name in graph)
    only = [graph for graph in graphs if any(name in ran and known[name] == 1 for name in graph)]
    merged: Graph = {}
    for graph in only or graphs:
        merged = graph | merged
    return merged


def read_function(graphs: Iterable[Any]) -> Graph:
    """The nodes of one function, whose parts on several devices are joined where one sends to another."""
    definitions = [node for graph in graphs for node in graph.node]
    senders = {n.attr["tensor_name"].s: n.name for n in definitions if n.op in ("_Send", "_HostSend")}
    return {n.name: _node(n, senders) for n in definitions}


def _node(definition: Any, senders: Mapping[bytes, str]) -> Node:
    values = [name.partition(":")[0] for name in definition.input if not name.startswith("^")]
    if definition.op in ("_Recv", "_HostRecv"):
        values += [senders[key] for key in [definition.attr["tensor_name"].s] if key in senders]
    inputs = values + [name[1:] for name in definition.input if name.startswith("^")]
    match = _TOWER.search(definition.name)
    call = definition.name[: match.end()] if match and not match.group(1) else ""
    scope = without_call(definition.name)
    device = short_device(definition.device)
    integers = _on_integers(definition)
    return Node(definition.name, definition.op, device, tuple(inputs), tuple(values), call, scope, integers)


def _on_integers(definition: Any) -> bool:
    if definition.op in ("Shape", "ShapeN", "Size", "BroadcastGradientArgs", "ConcatOffset"):
        return True
    kinds = {definition.attr[name].type for name in ("T", "dtype", "DstT") if name in definition.attr}
    return bool(kinds) and kinds <= _INTEGERS


def without_call(name: str) -> str:
    """The name of an operation without the call of its tower: equal for the same operation of all towers."""
    match = _TOWER.search(name)
    return name[match.end() + 1 :] if match else name


def tower_devices(graph: Graph) -> dict[str, str]:
    """The device of each tower by its call, in tower order: where most of what it does runs."""
    devices: dict[str, Counter] = defaultdict(Counter)
    for node in graph.values():
        if node.call and node.op not in NOT_WORK and not node.integers:
            devices[node.call][node.device] += 1
    return {call: devices[call].most_common(1)[0][0] for call in sorted(devices, key=in_order)}


def in_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts GPU:2 before GPU:10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def flow(graph: Graph) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Where values come from and go to: for each node the nodes it uses the values of, and those that use its own.

    Constants and whole numbers are left out: TensorFlow merges equal ones, whatever they were made for.
    """
    real = {n.name for n in graph.values() if n.op != "Const" and not n.integers}
    sources: dict[str, list[str]] = {name: [] for name in graph}
    targets: dict[str, list[str]] = {name: [] for name in graph}
    for name in real:
        sources[name] = [source for source in graph[name].values if source in real]
        for source in sources[name]:
            targets[source].append(name)
    return sources, targets


def reachable(start: Iterable[str], edges: Mapping[str, Iterable[str]]) -> set[str]:
    """What can be reached from `start` along `edges`, `start` itself left out unless it lies on a way."""
    found: set[str] = set()
    queue = [name for node in start for name in edges.get(node, ())]
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue.extend(edges.get(name, ()))
    return found
