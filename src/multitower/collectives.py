"""How towers meet: by edges between their graphs, or by TensorFlow's collectives. The only user of collectives.

    reduce     where towers meet
    host       sums are computed once, on the host, and go to every tower         edges, see `wiring`
    gather     every tower gets the terms of all and adds them in the same order  edges
    ring       the ring of TensorFlow's collective runtime                        collectives
    nccl       NCCL                                                               collectives

Inside a conditional, a loop or a function of the step towers always meet by collectives.

Every collective takes the token of its tower's device: automatic control dependencies then run the collectives of one
tower in the order of the trace, which is the same on every tower, and never order one tower after another, which would
hang the step. Group and instance key are those of TensorFlow. Nothing here is differentiable; see `exchange`.
"""

import threading
from functools import cache

import tensorflow as tf

from .device import physical_gpu_count
from .errors import DeviceError, MultitowerError
from .tower import current, this_tower
from .wiring import gather_marker, sum_marker


class _Keys:
    """Keys that nobody else in the process has."""

    def __init__(self, first):
        self._next = first
        self._lock = threading.Lock()

    def take(self, count=1):
        """The first of `count` keys in a row."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return first


# Group and instance keys are shared by all users of collectives in a process. tf.distribute counts its own up from 1
# and 100 (tensorflow/python/distribute/cross_device_utils.py, CollectiveKeys): start far away from both.
_group_keys = _Keys(2_100_000_000)
_instance_keys = _Keys(1_000_000_000)

# Kernels of CollectiveGatherV2 and CollectiveReduceV2 exist for these; other numbers travel as the type named.
_NATIVE = {tf.float16, tf.float32, tf.float64, tf.int32, tf.int64}
_TRAVELS_AS = {
    tf.bfloat16: tf.float32,
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}


class Group:
    """The towers of one list of devices: what their collectives have in common.

    Attributes:
        devices: device names in tower order.
        reduce: "none", "host", "gather", "ring" or "nccl".
        key: group key, unique in the process.
        hint: implementation of collectives asked of TensorFlow, "ring" or "nccl".
        tokens: one scalar variable per device; its handle orders the collectives of that device.
    """

    def __init__(self, devices, reduce):
        self.devices = tuple(devices)
        self.reduce = reduce
        self.hint = "nccl" if reduce != "ring" and _nccl_problem(devices) is None else "ring"
        self.key = _group_keys.take()
        self.tokens = []
        for device in self.devices:
            with tf.init_scope(), tf.device(device):
                # A tf.function that lifts variables refuses to be called again when its first trace failed.
                lifting = {"experimental_enable_variable_lifting": False}
                self.tokens.append(tf.Variable(0.0, trainable=False, name="tower_token", **lifting))
        self._met = False

    @property
    def in_graph(self):
        """Whether towers meet by edges between their graphs."""
        return self.reduce in ("host", "gather")

    @property
    def packs(self):
        """Whether tensors travel better together than one by one."""
        return not self.in_graph or any("GPU:" in d.upper() for d in self.devices)

    def meet(self):
        """Let the towers meet once before their first collective, with nothing else to fail.

        TensorFlow resolves a group when its members first meet; broken off then by an error in one tower, the group
        stays broken for the life of the process (tensorflow/core/common_runtime/collective_param_resolver_local.cc).
        """
        if self._met or self.count == 1:
            return
        self._met, key = True, _instance_keys.take()

        def once():
            for device, token in zip(self.devices, self.tokens, strict=True):
                with tf.device(device):
                    tf.raw_ops.CollectiveReduceV2(
                        input=tf.zeros([1]), merge_op="Add", final_op="Id", **self.arguments(token, key)
                    )

        with tf.init_scope():
            tf.function(once, autograph=False)()

    def arguments(self, token, key):
        """What every collective of the group is given."""
        return {
            "group_size": self.count,
            "group_key": self.key,
            "instance_key": key,
            "ordering_token": [token.handle],
            "communication_hint": self.hint,
        }

    @property
    def count(self):
        """N, the number of towers."""
        return len(self.devices)


@cache
def group(devices, reduce):
    """The group of a tuple of device names; one for each tuple and way of reducing in the process."""
    return Group(devices, reduce)


def choose_reduce(devices, reduce="auto"):
    """How towers on these devices meet, and why.

    Args:
        devices: list of device names, as `multitower.devices` returns them.
        reduce: "auto", or one of "host", "gather", "ring" and "nccl".

    Returns:
        A pair of strings (name, reason); name is "none" where there is one tower.

    Raises:
        DeviceError: an unknown name; NCCL where not every tower has a physical GPU of its own.
    """
    if reduce not in ("auto", *_REDUCE):
        raise DeviceError(f"reduce={reduce!r} is unknown; expected 'auto', {', '.join(map(repr, _REDUCE))}")
    problem = _nccl_problem(devices)
    if reduce == "nccl" and problem:
        raise DeviceError(f"reduce='nccl' on {', '.join(devices)}: {problem}; use reduce='host', 'gather' or 'ring'")
    if len(devices) == 1:
        return "none", "one tower has nobody to talk to"
    if reduce != "auto":
        return reduce, "asked for"
    if problem is None:
        return "nccl", "every tower has a physical GPU of its own"
    if not any("GPU:" in d.upper() for d in devices):
        return "host", "CPU devices share the host's memory: a sum there is computed once and nothing is copied"
    return "gather", f"{problem}; copies between towers need nothing else"


_REDUCE = ("host", "gather", "ring", "nccl")


def _nccl_problem(devices):
    """Why NCCL cannot be used, None where it can."""
    if not all("GPU:" in d.upper() for d in devices):
        return "NCCL needs a GPU for every tower"
    if physical_gpu_count(list(devices)) < len(devices):
        return "several towers share a physical GPU, which NCCL does not allow"
    return None


def sum_over_towers(x):
    """Σ_i x_i, equal to the bit on all towers; towers meet here. Not differentiable."""
    tower = current()
    if tower is None or tower.count == 1:
        return x
    if tower.meets_in_graph():
        return _as_number(x, sum_marker)
    if x.shape.is_fully_defined():
        return _reduce(x, _instance_keys.take())
    flat = tf.reshape(x, [-1])
    room, key = _room(tf.size(flat))
    return tf.reshape(_reduce(_filled_up(flat, room), key)[: tf.size(flat)], tf.shape(x))


def gather_fixed(x):
    """x of all towers along a new first dimension; the shape of x is the same on every tower.

    Towers meet here. Not differentiable.
    """
    tower = current()
    if tower is None or tower.count == 1:
        return x[tf.newaxis]
    if tower.meets_in_graph():
        return tf.ensure_shape(gather_marker(x[tf.newaxis]), [tower.count, *x.shape])
    if x.shape.is_fully_defined():
        return tf.reshape(_gather(tf.reshape(x, [-1]), _instance_keys.take()), [tower.count, *x.shape])
    everyone = _gather_vectors(tf.reshape(x, [-1]), tf.size(x))[:, : tf.size(x)]
    return tf.reshape(everyone, tf.concat([[tower.count], tf.shape(x)], 0))


def concat_rows(x, counts):
    """The rows of x of all towers, in tower order. Towers meet here. Not differentiable.

    Args:
        x: dense tensor of shape (counts[i], …) on tower i.
        counts: int32 tensor of shape (N,).
    """
    tower = this_tower()
    if tower.meets_in_graph():
        return gather_marker(x)
    tail = tf.shape(x)[1:]
    sizes = counts * tf.reduce_prod(tail)
    everyone = _gather_vectors(tf.reshape(x, [-1]), tf.reduce_max(sizes))
    parts = [part[: sizes[i]] for i, part in enumerate(tf.unstack(everyone, tower.count))]
    everything = tf.reshape(tf.concat(parts, 0), tf.concat([[tf.reduce_sum(counts)], tail], 0))
    return tf.ensure_shape(everything, [None, *x.shape[1:]])


def _gather_vectors(flat, most):
    """Vectors of at most `most` elements of all towers, as the rows of a matrix, filled up with zeros."""
    room, key = _room(most)
    return tf.reshape(_gather(_filled_up(flat, room), key), [this_tower().count, room])


def _filled_up(flat, size):
    return tf.pad(flat, [[0, size - tf.size(flat)]])


_KEYS_PER_COLLECTIVE = 31 * 17


def _room(size):
    """A length of at least `size`, at most 1/8 longer, and the instance key for it.

    TensorFlow remembers the shape of a collective by its instance key for as long as the process lives and refuses
    another one (tensorflow/core/common_runtime/collective_param_resolver_local.cc), so sizes that change from step to
    step need a key each. Rounded up to 8 … 16 eighths of a power of two there are few.
    """
    powers = tf.constant([2**k for k in range(31)])
    octave = tf.maximum(tf.reduce_sum(tf.cast(powers <= size, tf.int32)) - 1, 0)
    unit = tf.gather(powers, tf.maximum(octave - 3, 0))
    units = -(-size // unit)
    return units * unit, _instance_keys.take(_KEYS_PER_COLLECTIVE) + octave * 17 + units


def _reduce(x, key):
    def collective(t):
        return tf.raw_ops.CollectiveReduceV2(input=t, merge_op="Add", final_op="Id", **_arguments(key))

    return _as_number(x, collective)


def _gather(x, key):
    def collective(t):
        return tf.raw_ops.CollectiveGatherV2(input=t, **_arguments(key))

    return _as_number(x, collective)


def _arguments(key):
    towers = this_tower().group
    return towers.arguments(towers.tokens[0], key)


def _as_number(x, collective):
    if x.dtype in _NATIVE:
        return collective(x)
    if x.dtype not in _TRAVELS_AS:
        raise MultitowerError(
            f"a tensor of dtype {x.dtype.name} cannot be sent between towers; expected a number or a boolean: "
            f"convert it (strings, for example, to integer ids) before the step"
        )
    return tf.cast(collective(tf.cast(x, _TRAVELS_AS[x.dtype])), x.dtype)
