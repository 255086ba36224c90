"""Collectives of TensorFlow between towers, by group and instance key. The only user of collective operations.

Every collective takes the token of its tower's device: automatic control dependencies then run the collectives of one
tower in the order of the trace, which is the same on every tower, and never order one tower after another, which would
hang the step. Nothing here is differentiable; see `exchange`.
"""

import threading
from functools import cache

import tensorflow as tf

from .device import physical_gpu_count
from .errors import MultitowerError
from .tower import current, this_tower


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
        key: group key, unique in the process.
        hint: implementation asked of TensorFlow, "ring" or "nccl".
        tokens: one scalar variable per device; its handle orders the collectives of that device.
    """

    def __init__(self, devices):
        self.devices = tuple(devices)
        self.hint, self.reason = implementation(devices)
        self.key = _group_keys.take()
        self.tokens = []
        for device in self.devices:
            with tf.init_scope(), tf.device(device):
                # A tf.function that lifts variables refuses to be called again when its first trace failed.
                lifting = {"experimental_enable_variable_lifting": False}
                self.tokens.append(tf.Variable(0.0, trainable=False, name="tower_token", **lifting))

    def meet(self):
        """Let the towers meet once, with nothing else to fail.

        TensorFlow resolves a group when its members first meet; broken off then by an error in one tower, the group
        stays broken for the life of the process (tensorflow/core/common_runtime/collective_param_resolver_local.cc).
        """
        key = _instance_keys.take()

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
def group(devices):
    """The group of a tuple of device names, which has met; one for each tuple in the process."""
    towers = Group(devices)
    if towers.count > 1:
        towers.meet()
    return towers


def implementation(devices):
    """Which collectives run on these devices, and why.

    Args:
        devices: list of device names, as `multitower.devices` returns them.

    Returns:
        A pair of strings (name, reason); name is "none", "ring" or "nccl".
    """
    if len(devices) == 1:
        return "none", "one tower has nobody to talk to"
    if not all("GPU:" in d.upper() for d in devices):
        return "ring", "TensorFlow's ring runs on CPU devices; NCCL needs a GPU for every tower"
    if physical_gpu_count(list(devices)) < len(devices):
        return "ring", "several towers share a physical GPU, which NCCL does not allow"
    return "nccl", "every tower has a physical GPU of its own"


def sum_over_towers(x):
    """Σ_i x_i, equal to the bit on all towers; towers meet here. Not differentiable."""
    tower = current()
    if tower is None or tower.count == 1:
        return x
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
    if x.shape.is_fully_defined():
        return tf.reshape(_gather(tf.reshape(x, [-1]), _instance_keys.take()), [tower.count, *x.shape])
    everyone = gather_vectors(tf.reshape(x, [-1]), tf.size(x))[:, : tf.size(x)]
    return tf.reshape(everyone, tf.concat([[tower.count], tf.shape(x)], 0))


def gather_vectors(flat, most):
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

    return _cast_around(x, collective)


def _gather(x, key):
    def collective(t):
        return tf.raw_ops.CollectiveGatherV2(input=t, **_arguments(key))

    return _cast_around(x, collective)


def _arguments(key):
    towers = this_tower().group
    return towers.arguments(towers.tokens[0], key)


def _cast_around(x, collective):
    if x.dtype in _NATIVE:
        return collective(x)
    if x.dtype not in _TRAVELS_AS:
        raise MultitowerError(
            f"a tensor of dtype {x.dtype.name} cannot be sent between towers; expected a number or a boolean: "
            f"convert it (strings, for example, to integer ids) before the step"
        )
    return tf.cast(collective(tf.cast(x, _TRAVELS_AS[x.dtype])), x.dtype)
