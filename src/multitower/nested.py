"""Functions inside the graph of a step: whether they write to a variable, and their bodies in place of their calls.

A step may call a tf.function of the user's. Where it writes to a variable that all towers share, the towers have to
take turns at that write, so it has to stand in the graph of the step itself.
"""

from . import upstream

READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp", "Identity"}
_CALLS = ("StatefulPartitionedCall", "PartitionedCall")
# operation -> (attributes that name functions, inputs of the operation before those of the functions)
_BRANCHES = {
    "If": (("then_branch", "else_branch"), 1),
    "StatelessIf": (("then_branch", "else_branch"), 1),
    "While": (("cond", "body"), 0),
    "StatelessWhile": (("cond", "body"), 0),
    "Case": (("branches",), 1),
    "StatelessCase": (("branches",), 1),
    **dict.fromkeys(_CALLS, (("f",), 0)),
}


def is_call(node):
    """Whether a node runs other functions."""
    return node.op in _BRANCHES


def can_inline(node):
    """Whether the body of the function can stand in place of the node."""
    return node.op in _CALLS


def writes_to(node, position):
    """Whether a node writes to the variable whose handle is its input at `position`."""
    if node.op in READS:
        return False
    if node.op not in _BRANCHES:
        return True
    attributes, before = _BRANCHES[node.op]
    return any(_writes_to_argument(f, position - before) for a in attributes for f in _functions(node.attr[a]))


def _functions(attribute):
    names = [attribute.func.name] if attribute.HasField("func") else [f.name for f in attribute.list.func]
    return [upstream.function_definition(name) for name in names]


def _writes_to_argument(function, position):
    known = {function.signature.input_arg[position].name}
    for node in function.node_def:  # a FunctionDef lists a node after its inputs
        given = [k for k, name in enumerate(node.input) if name in known]
        if given and node.op == "Identity":
            known.add(f"{node.name}:output:0")
        elif any(writes_to(node, k) for k in given):
            return True
    return False


def inlined(function, wanted):
    """A FunctionDef in which calls are replaced by the bodies of the functions they call.

    Args:
        function: FunctionDef.
        wanted: whether a node, which `can_inline`, is to be replaced; asked of the nodes of bodies too.

    Returns:
        A FunctionDef that computes the same; `function` itself where no node is wanted.
    """
    while calls := [n for n in function.node_def if can_inline(n) and wanted(n, function)]:
        function = _without_calls(function, {call.name: call for call in calls})
    return function


def _without_calls(function, calls):
    flat, outputs = type(function)(), {}
    flat.CopyFrom(function)
    del flat.node_def[:]
    for node in function.node_def:
        if node.name not in calls:
            flat.node_def.add().CopyFrom(node)
            continue
        (body,) = _functions(node.attr["f"])
        flat.node_def.extend(_body(node, body))
        for k, result in enumerate(body.signature.output_arg):
            outputs[f"{node.name}:output:{k}"] = _in_body(node, body, body.ret[result.name])
    for node in flat.node_def:
        renamed = [_follow(outputs, name) for name in node.input]
        del node.input[:]
        node.input.extend(renamed)
    for name, value in flat.ret.items():
        flat.ret[name] = _follow(outputs, value)
    return flat


def _follow(outputs, name):
    while name in outputs:
        name = outputs[name]
    return name


def _body(call, body):
    """The nodes of a body in place of its call, and one of the call's name that waits for its side effects."""
    before = [name for name in call.input if name.startswith("^")]
    for node in body.node_def:
        copied = type(node)()
        copied.CopyFrom(node)
        copied.name = f"{call.name}/{node.name}"
        copied.attr.pop("_class", None)
        del copied.input[:]
        copied.input.extend(_in_body(call, body, name) for name in node.input)
        copied.input.extend(before)
        copied.device = copied.device or call.device
        yield copied
    effects = [f"^{call.name}/{name}" for name in body.control_ret.values()]
    done = type(call)(name=call.name, op="NoOp", device=call.device)
    done.input.extend(dict.fromkeys([*before, *effects]))
    yield done


def _in_body(call, body, name):
    """What a name of the body is called where the body stands in place of the call."""
    arguments = {a.name: k for k, a in enumerate(body.signature.input_arg)}
    if name in arguments:
        return [i for i in call.input if not i.startswith("^")][arguments[name]]
    return f"^{call.name}/{name[1:]}" if name.startswith("^") else f"{call.name}/{name}"
