"""Where variables live, and which one each tower is bound to.

    replicated    a copy per tower; every tower applies the same update
    shared        one copy for all towers, where the user made it; one update
    independent   a copy per tower; every tower applies the update of its own shard, and they drift apart

A traced step knows variables by the handles it captured. Tower 0 keeps these: they are the user's own variables, so
the plain model is always up to date. Replicated, every other tower is bound to copies on its device; as all towers
apply the same update to the same values, the copies stay equal to the bit. What changes a variable from outside a step
(a callback that sets the learning rate, weights that are loaded) is noticed and copied to every tower before the next
step.
"""

import functools
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import tensorflow as tf

from . import upstream
from .device_spec import parse
from .errors import DeviceError, ModelError
from .wiring import Binding

_WRITES = (
    "assign",
    "assign_add",
    "assign_sub",
    "batch_scatter_update",
    "scatter_add",
    "scatter_div",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_nd_add",
    "scatter_nd_sub",
    "scatter_nd_update",
    "scatter_sub",
    "scatter_update",
    upstream.restore_method_name(),
)


_PLACEMENTS = ("replicated", "shared", "independent")


def choose_placement(devices, placement="auto"):
    """Where variables live, and why.

    Args:
        devices: list of device names, as `multitower.devices` returns them.
        placement: "auto", or one of "replicated", "shared" and "independent"; "shared:cpu:0" names a device.

    Returns:
        A pair of strings (name, reason).

    Raises:
        DeviceError: an unknown name.
    """
    name, _, device = placement.partition(":") if isinstance(placement, str) else (placement, "", "")
    if name not in ("auto", *_PLACEMENTS) or (device and name != "shared"):
        raise DeviceError(
            f"placement={placement!r} is unknown; expected 'auto', {', '.join(map(repr, _PLACEMENTS))} or "
            f"'shared:DEVICE', as in 'shared:cpu:0'"
        )
    if name != "auto":
        return name, "asked for"
    if len(devices) == 1:
        return "replicated", "one tower, one copy"
    if any("GPU:" in d.upper() for d in devices):
        return "replicated", "GPUs read weights from their own memory; the update is computed where they are"
    return "shared", "CPU devices share memory and cores: one copy of the weights, and the update is computed once"


def variables_device(placement):
    """The device that "shared:DEVICE" names, as tf.device takes it, None where none is named.

    Raises:
        DeviceError: not the name of one device.
    """
    device = placement.partition(":")[2]
    if not device:
        return None
    names = parse([device])
    return f"/device:{names[0]}" if isinstance(names, tuple) else None


@cache
def variables_on(devices, placement):
    """The variables on a tuple of devices; all steps of the process with these devices and placement share them."""
    return Shared(devices) if placement == "shared" else Replicas(devices)


class Shared:
    """One copy of each variable for all towers, those apart that differ from tower to tower within a step."""

    def __init__(self, devices):
        self.devices = tuple(devices)
        self._apart = set()
        self._copies = Replicas(devices)

    def keep_apart(self, variables):
        """Give every tower a copy of these tf.Variables."""
        for variable in variables:
            if self.is_shared(variable):
                self._apart.add(id(variable))
                weakref.finalize(variable, self._apart.discard, id(variable))

    def is_shared(self, variable):
        """Whether all towers use the tf.Variable itself."""
        return id(variable) not in self._apart

    def of(self, variable):
        """The variable of each tower, in tower order; where it is shared, N times the same tf.Variable."""
        variable = variable if isinstance(variable, tf.Variable) else variable.value
        return [variable] * len(self.devices) if self.is_shared(variable) else self._copies.of(variable)

    def fresh(self, variable):
        """`of`, with what was assigned to `variable` since the last step already copied."""
        variables = self.of(variable)
        self.refresh()
        return variables

    def refresh(self):
        """Bring the copies there are up to date; a shared variable needs nothing."""
        self._copies.refresh()

    def refresh_all(self, variables):
        """See `Replicas.refresh_all`."""
        self._copies.refresh_all([v for v in variables if not self.is_shared(v)])


class Replicas:
    """For each variable its copies, one per tower; the copy of tower 0 is the variable itself."""

    def __init__(self, devices):
        self.devices = tuple(devices)
        self._copies = {}
        self._stale = {}
        self._refresh_all = None

    def keep_apart(self, variables):
        """Nothing to do: every tower has its own copy of all."""

    def is_shared(self, variable):
        """Whether all towers use the tf.Variable itself: no."""
        return False

    def of(self, variable):
        """The copies of a tf.Variable or keras.Variable, in tower order; made on first use.

        A list of N tf.Variables on N devices.
        """
        variable = variable if isinstance(variable, tf.Variable) else variable.value
        copies = self._copies.get(id(variable))
        if copies is None:
            copies = self._copies[id(variable)] = self._make(variable)
            weakref.finalize(variable, self._forget, id(variable))
            if len(self.devices) > 1:
                _watch(variable, self)
        return [variable, *copies]

    def fresh(self, variable):
        """`of`, with what was assigned to `variable` since the last step already copied."""
        copies = self.of(variable)
        self.refresh()
        return copies

    def _make(self, variable):
        copies = []
        for i, device in enumerate(self.devices[1:], start=1):
            with tf.init_scope(), tf.device(device):
                name = f"{variable.name.split(':')[0]}_tower_{i}"
                lifting = {"experimental_enable_variable_lifting": False}  # see collectives.Group
                copies.append(tf.Variable(variable, trainable=False, name=name, shape=variable.shape, **lifting))
        return copies

    def _forget(self, key):
        self._copies.pop(key, None)
        self._stale.pop(key, None)
        self._refresh_all = None  # it goes by ids too, and another variable may get this one

    def mark_stale(self, variable):
        """The variable was changed from outside a step: towers 1 … N−1 have an old value."""
        self._stale[id(variable)] = weakref.ref(variable)

    def refresh(self):
        """Bring the copies of changed variables up to date. Cheap where nothing changed."""
        if not self._stale:
            return
        stale, self._stale = self._stale, {}
        for reference in stale.values():
            variable = reference()
            if variable is not None:
                self._copy_from(variable)

    def refresh_all(self, variables):
        """Bring every copy of `variables` up to date, whoever changed them: for changes made inside other graphs.

        Args:
            variables: tf.Variables that steps on these devices are bound to.
        """
        variables = [v for v in variables if self._copies.get(id(v))]
        for variable in variables:  # others that changed stay noted: the model may have been compiled anew since
            self._stale.pop(id(variable), None)
        if not variables:
            return
        key = tuple(id(v) for v in variables)
        if self._refresh_all is None or self._refresh_all[0] != key:
            pairs = [(v.handle, [c.handle for c in self._copies[id(v)]], v.dtype) for v in variables]
            self._refresh_all = key, tf.function(functools.partial(_copy_all, pairs), autograph=False)
        self._refresh_all[1]()

    def _copy_from(self, variable):
        for copy in self._copies.get(id(variable), ()):
            copy.assign(variable)


def _copy_all(pairs):
    for source, targets, dtype in pairs:
        value = tf.raw_ops.ReadVariableOp(resource=source, dtype=dtype)
        for target in targets:
            tf.raw_ops.AssignVariableOp(resource=target, value=value)


def _watch(variable, owner):
    """Tell `owner` of every write to `variable` that Python makes outside a graph.

    Writes inside a graph are those of steps, which every tower makes for itself.
    """
    for name in _WRITES:
        write = getattr(variable, name, None)
        if write is not None:
            setattr(variable, name, _watched(write, weakref.ref(variable), owner))


def _watched(write, reference, owner):
    @functools.wraps(write)
    def watched(*args, **kwargs):
        if tf.executing_eagerly():
            owner.mark_stale(reference())
        return write(*args, **kwargs)

    return watched


@dataclass(frozen=True)
class Bound:
    """What a traced step is bound to on each tower.

    Attributes:
        captured: for each tower, its captured inputs in the order of the trace.
        bindings: for each tower, its `wiring.Binding`.
        shared: names of the function's arguments that are variables all towers share.
        variables: tf.Variables that the step uses, as the user knows them.
        has_collectives: whether the step has captured the token that collectives take.
    """

    captured: list
    bindings: list
    shared: list
    variables: list
    has_collectives: bool


def bind(concrete, group, towers, store):
    """Bind a traced step to the towers: its token, its variables, everything else as it was captured.

    Args:
        concrete: the ConcreteFunction of the step.
        group: the `collectives.Group` it was traced for.
        towers: device names in tower order.
        store: the variables of these towers, a `Replicas` or `Shared`.

    Returns:
        A `Bound`.
    """
    known = {id(v.handle): v for v in concrete.variables}
    tokens = {id(t.handle) for t in group.tokens}
    names = [a.name for a in concrete.function_def.signature.input_arg]
    names = names[len(names) - len(concrete.captured_inputs) :]
    bound = Bound([[] for _ in towers], [Binding(d, {}) for d in map(_full_name, towers)], [], [], False)
    has_collectives = False
    for name, capture in zip(names, concrete.captured_inputs, strict=True):
        per_tower = [capture] * len(towers)
        if id(capture) in tokens:
            has_collectives = True
            per_tower = [t.handle for t in group.tokens]
        elif id(capture) in known:
            copies = store.of(known[id(capture)])
            per_tower = [v.handle for v in copies]
            bound.variables.append(known[id(capture)])
            for binding, copy in zip(bound.bindings, copies, strict=True):
                binding.handle_devices[name] = copy.device
            if store.is_shared(known[id(capture)]):
                bound.shared.append(name)
        for captured, own in zip(bound.captured, per_tower, strict=True):
            captured.append(own)
    return replace(bound, has_collectives=has_collectives)


def _full_name(device):
    """A device as operations name it: /device:CPU:1 for CPU:1."""
    return device if device.startswith("/") else f"/device:{device}"


def created_outside(next_creator, device=None, **kwargs):
    """Create a variable outside the trace, with its initial value, as if it had existed before; on `device` if given.

    tf.function traces a function that creates variables twice, and on its own terms. An initial value that is a
    constant of the graph being traced (Keras converts numbers to tensors) is taken out of it.
    """
    value = kwargs.get("initial_value")
    if tf.is_tensor(value) and tf.get_static_value(value) is not None:
        kwargs["initial_value"] = tf.get_static_value(value)
    try:
        with tf.init_scope(), tf.device(device) if device else nullcontext():
            return next_creator(**{**kwargs, "experimental_enable_variable_lifting": False})
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"variable {kwargs.get('name')!r} could not be created inside a step ({error}); "
            f"create it before the step, or with an initial value that does not depend on the batch"
        ) from error
