"""Copies of variables, one per device, and which one each tower is bound to (placement "replicated").

A traced step knows variables by the handles it captured. Tower 0 keeps these: they are the user's own variables, so
the plain model is always up to date. Every other tower is bound to copies on its device; as all towers apply the same
update to the same values, the copies stay equal to the bit. What changes a variable from outside a step (a callback
that sets the learning rate, weights that are loaded) is noticed and copied to every tower before the next step.
"""

import functools
import weakref
from functools import cache

import tensorflow as tf

from . import upstream
from .errors import ModelError

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


@cache
def replicas(devices):
    """The copies on a tuple of devices; all steps of the process on these devices share them."""
    return Replicas(devices)


class Replicas:
    """For each variable its copies, one per tower; the copy of tower 0 is the variable itself."""

    def __init__(self, devices):
        self.devices = tuple(devices)
        self._copies = {}
        self._stale = {}
        self._refresh_all = None

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


def bind(concrete, group):
    """The captured inputs of a traced step for each tower: its token, its copies, everything else shared.

    Args:
        concrete: the ConcreteFunction of the step.
        group: the `collectives.Group` of the towers.

    Returns:
        (captured, variables): captured[i] lists, for tower i, functions that give the captured inputs in the graph
        being built; variables are the tf.Variables that the step uses, as the user knows them.
    """
    known = {id(v.handle): v for v in concrete.variables}
    copies = replicas(group.devices)
    tokens = {id(t.handle) for t in group.tokens}
    captured, variables = [[] for _ in group.devices], []
    for capture in concrete.captured_inputs:
        if id(capture) in tokens:
            per_tower = [_given(t.handle) for t in group.tokens]
        elif id(capture) in known:
            variables.append(known[id(capture)])
            per_tower = [_given(v.handle) for v in copies.of(known[id(capture)])]
        else:
            per_tower = [_renamed(capture) if capture.dtype == tf.resource else _given(capture)] * group.count
        for tower_captured, get in zip(captured, per_tower, strict=True):
            tower_captured.append(get)
    return captured, variables


def _given(tensor):
    return lambda: tensor


def _renamed(resource):
    """A resource all towers share (a lookup table), under a new name for each.

    Automatic control dependencies go by tensor: calls that take the same resource would run one after another, and a
    tower that waits for another one's turn waits for ever in its first collective. They see through Identity, not
    through IdentityN (tensorflow/python/framework/auto_control_deps.py).
    """

    def identity():
        with tf.device(resource.device):
            return tf.raw_ops.IdentityN(input=[resource])[0]

    return identity


def created_outside(next_creator, **kwargs):
    """Create a variable outside the trace, with its initial value, as if it had existed before.

    tf.function traces a function that creates variables twice, and on its own terms. An initial value that is a
    constant of the graph being traced (Keras converts numbers to tensors) is taken out of it.
    """
    value = kwargs.get("initial_value")
    if tf.is_tensor(value) and tf.get_static_value(value) is not None:
        kwargs["initial_value"] = tf.get_static_value(value)
    try:
        with tf.init_scope():
            return next_creator(**{**kwargs, "experimental_enable_variable_lifting": False})
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"variable {kwargs.get('name')!r} could not be created inside a step ({error}); "
            f"create it before the step, or with an initial value that does not depend on the batch"
        ) from error
