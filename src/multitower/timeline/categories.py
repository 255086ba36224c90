"""What each operation of a step is for, from facts of the graph: its type, its name scope, what it depends on.

    input ─▶ forward ─▶ (loss) ─▶ backward ─▶ reduce ─▶ update
               │ batch_norm          │ batch_norm           copy wherever two devices meet

Where the scope does not tell, dependence does: what depends on the gradients' reduction is the update, what depends on
backward operations is backward, everything else is forward.
"""

from collections.abc import Mapping

from .graph import Graph, Node, flow, reachable

CATEGORIES: tuple[str, ...] = ("input", "copy", "forward", "backward", "reduce", "batch_norm", "update")
NAMES = {
    "input": "input",
    "copy": "copies",
    "forward": "forward",
    "backward": "backward",
    "reduce": "reduction",
    "batch_norm": "batch-norm statistics",
    "update": "update",
}
_SCOPES = {  # put around these by the modules reduce, exchange, hooks, norm and towers
    "multitower_batch_norm": "batch_norm",
    "multitower_input": "input",
    "multitower_reduce": "reduce",
    "multitower_gather": "reduce",
    "multitower_sum": "reduce",
    "multitower_update": "update",
}
_COPIES = ("_Send", "_Recv", "_HostSend", "_HostRecv")
_INPUTS = ("IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional", "OptionalGetValue")


def is_collective(op: str) -> bool:
    """Whether operations of this type let devices meet."""
    return op.startswith(("Collective", "Nccl"))


def is_copy(op: str) -> bool:
    """Whether operations of this type send a tensor to another device, or receive it."""
    return op in _COPIES


def waits_for_input(op: str) -> bool:
    """Whether operations of this type take a batch from a dataset."""
    return op in _INPUTS


def categories_of(graph: Graph) -> dict[str, str]:
    """The category of each node."""
    sources, targets = flow(graph)
    told: dict[str, str | None] = {node.name: _told(node) for node in graph.values()}
    gradients = [name for name, category in told.items() if category == "backward"]
    after_backward = reachable(gradients, targets)
    before_backward = reachable(gradients, sources)
    changing = [graph[name] for name in after_backward - before_backward if _assigns(graph[name].op)]
    scopes = _outermost_scopes(changing)
    update = [*changing, *(node for node in graph.values() if _outermost(node) in scopes)]
    told |= {node.name: "update" for node in update if told[node.name] is None}
    sums = [n for n, category in told.items() if category == "reduce" and n in after_backward - before_backward]
    changes = [name for name, category in told.items() if category == "update"]
    after_sums = reachable([*sums, *changes], targets)

    def category(name: str) -> str:
        if name in after_sums - before_backward:
            return "update"
        return "backward" if name in after_backward else "forward"

    return {name: told[name] or category(name) for name in graph}


def _told(node: Node) -> str | None:
    """What type and scope say."""
    if is_copy(node.op):
        return "copy"
    if waits_for_input(node.op):
        return "input"
    parts = node.scope.split("/")
    for part in parts:
        scope = next((s for s in _SCOPES if part == s or part.startswith(f"{s}_")), None)
        if scope:
            return _SCOPES[scope]
    if is_collective(node.op):
        return "reduce"
    return "backward" if is_backward_scope(parts) else None


def is_backward_scope(parts: list[str]) -> bool:
    """Whether a name scope, as its parts, is one of tf.GradientTape or tf.gradients."""
    return any(p.startswith("gradient_tape") or p == "gradients" or p.endswith("_grad") for p in parts[:-1])


def _outermost(node: Node) -> tuple[str, str]:
    return node.call, node.scope.partition("/")[0] if "/" in node.scope else ""


def _outermost_scopes(nodes: list[Node]) -> set[tuple[str, str]]:
    """Of operations that change variables by gradients: the name of the optimizer."""
    return {_outermost(n) for n in nodes if _outermost(n)[1] and not is_backward_scope(n.scope.split("/"))}


def _assigns(op: str) -> bool:
    return op.startswith(("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply"))


def count_by_category(names: list[str], categories: Mapping[str, str]) -> dict[str, int]:
    """How many of `names` are of each category."""
    counts: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for name in names:
        counts[categories[name]] += 1
    return counts
