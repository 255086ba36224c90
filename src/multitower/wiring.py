"""The graph of one tower, N times in one function, wired together where towers meet.

The trace of a step is the graph of one tower. `wire` writes it down once per tower, every operation with the device it
runs on, and draws the edges between the copies:

    sum     x_0 … x_{N−1} → AddN → every tower               where the trace says `sum_marker`
    gather  x_0 … x_{N−1} → Concat → every tower             where it says `gather_marker`
    write   every tower has read v → tower 0 writes v → every tower reads on      for variables that towers share

So shared variables need no locks and sums on the host no collectives: the executor runs an operation when its inputs
are there, and a failure on one tower ends the step. Collectives inside the graph are left as they are.
"""

import itertools
from dataclasses import dataclass

import tensorflow as tf

from . import nested, upstream
from .errors import ModelError

_SUM, _GATHER = "multitower_sum", "multitower_gather"
_MARKER = "PlaceholderWithDefault"  # stateless, one input, one output, and never folded away while tracing
UPDATE, METRICS = "multitower_update", "multitower_metrics"  # labels of what all towers compute alike

_numbers = itertools.count()


def sum_marker(x):
    """A tensor that stands for Σ_i x_i in the trace."""
    return _marked(x, x.shape, _SUM)


def gather_marker(x):
    """A tensor that stands for the rows of x of all towers in the trace."""
    return _marked(x, [None, *x.shape[1:]], _GATHER)


def _marked(x, shape, name):
    @tf.custom_gradient
    def marked(x):
        return tf.compat.v1.placeholder_with_default(x, shape, name), _no_gradient

    return marked(x)


def _no_gradient(*_):
    """The marker's own gradient would be that of one tower, silently."""
    raise ModelError(
        "a gradient was asked of what towers tell each other that has none: batch statistics and all_reduce can be "
        "differentiated once; leave the layer out of the gradient of a gradient, or train on one device"
    )


def is_marker(kind, name):
    """Whether an operation of this type and name in the trace is one of the two markers."""
    return kind == _MARKER and name.rsplit("/", 1)[-1].startswith((_SUM, _GATHER))


@dataclass(frozen=True)
class Binding:
    """What is different from tower to tower.

    Attributes:
        device: of the tower.
        handle_devices: device of each variable the trace captures, by the name of its argument of the function.
    """

    device: str
    handle_devices: dict


def wire(function, bindings, *, labels=None, shared=(), meeting_device=None, agree=False):
    """The function of all towers.

    Args:
        function: FunctionDef of the trace.
        bindings: for each tower a `Binding`.
        labels: labels of nodes by name, see `tower.Tower.labelling`; a node's label stands before its name.
        shared: names of the arguments that are variables all towers share.
        meeting_device: where sums and gathers are computed, once for all; None: on every tower for itself.
        agree: the results of all towers are equal and those of tower 0 are enough.

    Returns:
        The name of a function, registered with TensorFlow. Its arguments are those of the trace for tower 0, then for
        tower 1 and so on; so are its results, unless the towers agree.

    Raises:
        TurnsError: a conditional or a loop outside of optimizer and metrics writes to a variable that is shared.
    """
    results = 1 if agree else len(bindings)
    shared = set(shared) if len(bindings) > 1 else set()
    if shared:
        function = nested.inlined(function, lambda node, caller: _writes(node, caller, shared))
    towers = _Towers(function, bindings, labels or {}, shared, meeting_device, results)
    towers.build()
    upstream.register_function(towers.wired)
    return towers.wired.signature.name


class TurnsError(ModelError):
    """Towers cannot take turns at a write to a variable they share."""


def _writes(node, caller, shared):
    """Whether a node writes to an argument of the function it stands in, of those in `shared`."""
    aliases = _handle_aliases(caller)
    return any(aliases.get(i) in shared and nested.writes_to(node, k) for k, i in enumerate(node.input))


def _handle_aliases(function):
    """For every argument of a function, and every Identity that passes it on, the name of the argument."""
    known = {a.name: a.name for a in function.signature.input_arg}
    for node in function.node_def:
        if node.op == "Identity" and node.input[0] in known:
            known[f"{node.name}:output:0"] = known[node.input[0]]
    return known


class _Towers:
    """The function being built: of each tower the nodes that are needed, wired to those of the others."""

    def __init__(self, function, bindings, labels, shared, meeting_device, results):
        self._bindings = bindings
        self._labels = labels
        self._shared = shared
        self._meeting_device = meeting_device
        self._results = results
        self._signature = function.signature
        self._returned, self._effects = function.ret, list(function.control_ret.values())
        self._arguments = {a.name for a in function.signature.input_arg}
        self._trace = {n.name: n for n in function.node_def}
        self._aliases = _handle_aliases(function)
        self._writes = {n.name for n in function.node_def if shared and self._writes_shared(n)}
        self._plain = {}
        self._built = {}
        self.wired = type(function)()

    def _handles(self, node):
        """(position, argument) of every argument of the function among the inputs of a node."""
        return [(k, self._aliases[i]) for k, i in enumerate(node.input) if i in self._aliases]

    def _shared_handles(self, node):
        return [(k, a) for k, a in self._handles(node) if a in self._shared]

    def _writes_shared(self, node):
        if not any(nested.writes_to(node, k) for k, _ in self._shared_handles(node)):
            return False
        if nested.is_call(node) and node.name not in self._labels:
            raise TurnsError(
                f"placement='shared': operation {node.name!r} ({node.op}) writes to a variable inside a conditional or "
                f"a loop, where towers cannot take turns; write to it outside, or use placement='replicated'"
            )
        return True

    def build(self):
        """Copy what the results and the side effects need; a read of a variable is no side effect."""
        effects = [n for n in self._effects if self._trace[n].op != "ReadVariableOp"]
        needed = [(tower, name) for tower in range(len(self._bindings)) for name in effects]
        for tower in range(self._results):
            needed += [(tower, _node_of(self._returned[a.name])) for a in self._signature.output_arg]
        while needed:
            tower, name = needed.pop()
            built = self._name(name, tower)
            if name in self._trace and built not in self._built:
                needed += self._copy(self._trace[name], 0 if name in self._writes else tower)
        self._order_writes()
        self._sign(effects)

    def _copy(self, node, tower):
        """Add a tower's copy of a node; what the copy needs, as (tower, name of a node or an argument)."""
        if is_marker(node.op, node.name):
            return self._copy_marker(node, tower)
        copied = self.wired.node_def.add()
        copied.CopyFrom(self._without_names(node))
        copied.name = self._name(node.name, tower)
        copied.input.extend([self._renamed(name, tower) for name in node.input])
        copied.device = copied.device or self._device(node, self._bindings[tower])
        if "frame_name" in copied.attr:
            copied.attr["frame_name"].s = f"tower_{tower}/".encode() + copied.attr["frame_name"].s
        self._built[copied.name] = copied
        return [(tower, _node_of(name)) for name in node.input]

    def _without_names(self, node):
        """A node without its name and inputs, and without colocation by name: every node has a device of its own."""
        plain = self._plain.get(node.name)
        if plain is None:
            plain = self._plain[node.name] = type(node)()
            plain.CopyFrom(node)
            plain.attr.pop("_class", None)
            plain.ClearField("input")
            plain.ClearField("name")
        return plain

    def _device(self, node, binding):
        """That of the tower; an operation on a variable runs where the variable is."""
        if not nested.is_call(node):
            for _, argument in self._handles(node):
                if argument in binding.handle_devices:
                    return binding.handle_devices[argument]
        return binding.device

    def _name(self, name, tower):
        """The name of a tower's copy of a node; of a write to a shared variable, that of tower 0."""
        label = f"{self._labels[name]}/" if name in self._labels else ""
        return f"tower_{0 if name in self._writes else tower}/{label}{name}"

    def _renamed(self, name, tower):
        """What an input of the trace is called in the function of all towers."""
        control, name = ("^", name[1:]) if name.startswith("^") else ("", name)
        if name in self._arguments:
            return f"{control}tower_{tower}_{name}"
        node, _, output = name.partition(":")
        return f"{control}{self._name(node, tower)}{':' if output else ''}{output}"

    def _copy_marker(self, marker, tower):
        """Add a node that passes on to a tower what the towers have together.

        Where every tower goes on computing from what is there once, it is no Identity: Grappler drops that on the tower
        whose device has it, and then orders and merges that tower's operations otherwise than those of the others (it
        sorts the inputs of commutative operations by name), so that copies of variables differ in the last bit.
        """
        once = self._meeting_device is not None
        device = self._meeting_device if once else self._bindings[tower].device
        together = f"{'towers' if once else f'tower_{tower}'}/{marker.name}/all"
        is_sum = marker.name.rsplit("/", 1)[-1].startswith(_SUM)
        dtype = marker.attr["dtype"].type
        if together not in self._built:
            parts = [self._renamed(marker.input[0], i) for i in range(len(self._bindings))]
            self._add((_add_n if is_sum else _concat)(together, parts, dtype, device))
        inputs = [f"{together}:{'sum' if is_sum else 'output'}:0"]
        inputs += [self._renamed(name, tower) for name in marker.input[1:]]
        device = self._bindings[tower].device
        operation = "Snapshot" if once and not self._shared and dtype != tf.string.as_datatype_enum else "Identity"
        passed = tf.compat.v1.NodeDef(name=self._name(marker.name, tower), op=operation, input=inputs, device=device)
        passed.attr["T"].type = dtype
        self._add([passed])
        source = _node_of(marker.input[0])
        needed = [(i, source) for i in range(len(self._bindings))]
        return needed + [(tower, _node_of(name)) for name in marker.input[1:]]

    def _add(self, nodes):
        for node in nodes:
            self.wired.node_def.append(node)
            self._built[node.name] = node

    def _order_writes(self):
        """Tower 0 writes to a shared variable when all towers have read what the trace reads before that write."""
        if not self._writes:
            return
        reads = [n.name for n in self._trace.values() if n.name not in self._writes and self._shared_handles(n)]
        before = _ancestors({name: node.input for name, node in self._trace.items()}, reads)
        names = {(r, i): self._name(r, i) for r in reads for i in range(1, len(self._bindings))}
        built = {key: name for key, name in names.items() if name in self._built}
        waits = _ancestors({name: node.input for name, node in self._built.items()}, built.values())
        for name in sorted(self._writes):
            write = self._built.get(self._name(name, 0))
            if write is None:  # nothing needs it
                continue
            variables = {a for _, a in self._shared_handles(self._trace[name])}
            same = [r for r in before(name) if variables & {a for _, a in self._shared_handles(self._trace[r])}]
            wanted = {built[r, i] for r in same for i in range(1, len(self._bindings)) if (r, i) in built}
            write.input.extend(f"^{read}" for read in sorted(wanted - set(waits(write.name))))

    def _sign(self, effects):
        """The arguments, results and side effects of the function."""
        signature = self.wired.signature
        signature.name, signature.is_stateful = f"multitower_step_{next(_numbers)}", True
        for i in range(len(self._bindings)):
            for argument in self._signature.input_arg:
                signature.input_arg.add(name=f"tower_{i}_{argument.name}", type=argument.type)
        for i in range(self._results):
            for result in self._signature.output_arg:
                signature.output_arg.add(name=f"tower_{i}_{result.name}", type=result.type)
                self.wired.ret[f"tower_{i}_{result.name}"] = self._renamed(self._returned[result.name], i)
        done = dict.fromkeys(self._name(name, i) for i in range(len(self._bindings)) for name in effects)
        for k, name in enumerate(done):
            signature.control_output.append(f"effect_{k}")
            self.wired.control_ret[f"effect_{k}"] = name


def _ancestors(inputs, marked):
    """A function that lists, for the name of a node, the marked nodes that run before it.

    Args:
        inputs: for each node, the names of its inputs as in a FunctionDef.
        marked: names of nodes.
    """
    bits = {name: k for k, name in enumerate(marked)}
    names = list(bits)
    masks = {}

    def mask(name):
        stack = [name]
        while stack:
            missing = [n for n in map(_node_of, inputs[stack[-1]]) if n in inputs and n not in masks]
            if missing:
                stack += missing
                continue
            top = stack.pop()
            masks[top] = 0
            for n in map(_node_of, inputs[top]):
                if n in inputs:
                    masks[top] |= masks[n] | (1 << bits[n] if n in bits else 0)
        return masks[name]

    return lambda name: [n for k, n in enumerate(names) if mask(name) >> k & 1]


def _node_of(name):
    return name.removeprefix("^").partition(":")[0]


def _add_n(name, parts, dtype, device):
    node = tf.compat.v1.NodeDef(name=name, op="AddN", input=parts, device=device)
    node.attr["N"].i = len(parts)
    node.attr["T"].type = dtype
    return [node]


def _concat(name, parts, dtype, device):
    axis = tf.compat.v1.NodeDef(name=f"{name}/axis", op="Const", device=device)
    axis.attr["dtype"].type = tf.int32.as_datatype_enum
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0))
    node = tf.compat.v1.NodeDef(name=name, op="ConcatV2", input=[*parts, f"{axis.name}:output:0"], device=device)
    node.attr["N"].i = len(parts)
    node.attr["T"].type = dtype
    node.attr["Tidx"].type = tf.int32.as_datatype_enum
    return [axis, node]
