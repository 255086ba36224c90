"""How towers talk: the tower context and the collectives inside a step. The only user of collective operations.

A step is traced once; while it is traced, `current()` is the `Tower` it is traced for: symbolic, the same graph for
all towers, so its index and its rows are tensors. The functions here are differentiable for the objective all towers
minimise together, the mean over the rows of the global batch:

    L = Σ_i w_i · L_i,    w_i = rows[i] / B

Where tower i's own backward pass starts from ∂L_i (`Weighting.GRADIENT`, a hand-written step) its gradient is weighted
by w_i when gradients are summed; where it starts from w_i · ∂L_i (`Weighting.LOSS`, Keras' own train_step, where the
weight is applied by `optimizer.scale_loss`) gradients are summed as they are. A collective's gradient has to speak the
same language: with p_i = w_i (GRADIENT) or 1 (LOSS), the gradient of a sum over towers is (1/p_i) Σ_j p_j · dy_j.

Every collective takes the token of its tower's device: automatic control dependencies then run the collectives of one
tower in the order of the trace, which is the same on every tower, and never order one tower after another, which would
hang the step.
"""

import enum
import threading
from contextlib import contextmanager
from functools import cache

import tensorflow as tf

from .errors import MultitowerError

__all__ = ["all_gather", "all_reduce", "rows", "tower_count", "tower_index"]



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
_tracing = threading.local()

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


class Weighting(enum.Enum):
    """Where the weight w_i = rows[i] / B enters the backward pass of a tower."""

    LOSS = "loss"
    GRADIENT = "gradient"


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
                self.tokens.append(tf.Variable(0.0, trainable=False, name="tower_token"))

    @property
    def count(self):
        """N, the number of towers."""
        return len(self.devices)


@cache
def group(devices):
    """The group of a tuple of device names; one for each tuple in the process."""
    return Group(devices)


def implementation(devices):
    """Which collectives run on these devices, and why.

    Args:
        devices: list of device names, as `multitower.devices` returns them.

    Returns:
        A pair of strings (name, reason); name is "none", "ring" or "nccl".
    """
    from .device import physical_gpu_count

    if len(devices) == 1:
        return "none", "one tower has nobody to talk to"
    if not all("GPU:" in d.upper() for d in devices):
        return "ring", "ring collectives run on CPU devices and on mixed ones; NCCL needs a GPU for every tower"
    if physical_gpu_count(list(devices)) < len(devices):
        return "ring", "several towers share a physical GPU, which NCCL does not allow"
    return "nccl", "every tower has a physical GPU of its own"


class Tower:
    """The tower a step is being traced for.

    Attributes:
        group: its `Group`.
        index: this tower's number, an int32 scalar tensor.
        rows: rows of every tower's shard, an int32 tensor of shape (N,).
        weighting: see `Weighting`.
        silenced: names of Keras methods that need no help now, because they are given the whole batch already.
        batch_moments: with batch_norm="tower", the mean and variance for the layer being called: see `hooks`.
    """

    def __init__(self, group, index, rows, weighting):
        self.group = group
        self.index = index
        self.rows = rows
        self.weighting = weighting
        self.silenced = frozenset()
        self.batch_moments = None
        self._inputs = {}
        self._gathered = {}

    @property
    def count(self):
        return self.group.count

    @property
    def own_rows(self):
        """Rows of this tower's shard, an int32 scalar."""
        return self.rows[0] if self.count == 1 else self.rows[self.index]

    @property
    def batch_rows(self):
        """B, the rows of the global batch, an int32 scalar."""
        return tf.reduce_sum(self.rows)

    def share(self, dtype):
        """w_i = rows[i] / B as a scalar of `dtype`."""
        return tf.cast(self.own_rows, dtype) / tf.cast(self.batch_rows, dtype)

    def inverse_share(self, dtype):
        """B / rows[i]; 0 for a tower without rows, which has no gradient to give."""
        return tf.math.divide_no_nan(tf.cast(self.batch_rows, dtype), tf.cast(self.own_rows, dtype))

    def weigh(self, x):
        """x · w_i, and 0 where the tower has no rows, whatever x is (the mean over no rows is NaN)."""
        return tf.math.multiply_no_nan(x, self.share(x.dtype))

    def know_whole(self, x, whole):
        """x is an input of the step and `whole` the same of the global batch: gathering x costs nothing."""
        self._inputs[id(x)] = (x, whole)

    def is_input(self, x):
        """Whether x is an input of the step itself."""
        return id(x) in self._inputs

    def remember(self, x, gathered):
        """Note that `gathered` is x of all towers, so that the next gather of x is free."""
        self._gathered[id(x)] = (x, gathered)

    def recall(self, x):
        """What is known to be x of all towers in the graph being built, or None."""
        if id(x) in self._inputs:
            return self._inputs[id(x)][1]
        _, gathered = self._gathered.get(id(x), (None, None))
        return gathered if getattr(gathered, "graph", None) is tf.compat.v1.get_default_graph() else None

    @contextmanager
    def silencing(self, names):
        """Calls named in `names` keep their single-device meaning in this block: they are given the whole batch."""
        before, self.silenced = self.silenced, self.silenced | set(names)
        try:
            yield
        finally:
            self.silenced = before


def current():
    """The `Tower` whose step this thread is tracing, or None."""
    return getattr(_tracing, "tower", None)


@contextmanager
def traced_for(tower):
    """Make `tower` the current one while its step is traced."""
    before, _tracing.tower = current(), tower
    try:
        yield tower
    finally:
        _tracing.tower = before


def tower_index():
    """Number of the tower that runs this: an int32 scalar, 0 … N−1; 0 outside towers."""
    tower = current()
    return tf.constant(0) if tower is None else tf.convert_to_tensor(tower.index)


def tower_count():
    """N, the number of towers, a Python int; 1 outside towers."""
    tower = current()
    return 1 if tower is None else tower.count


def rows(batch=None):
    """Rows of the shard this tower was given, an int32 scalar.

    Args:
        batch: needed outside towers only: a tensor or array of the batch, whose first dimension is then returned.
    """
    tower = current()
    if tower is not None:
        return tf.convert_to_tensor(tower.own_rows)
    if batch is None:
        raise MultitowerError(
            "rows() was called outside a replicated step, where no shard is known; "
            "call it inside a step given to multitower.replicate, or pass a tensor of the batch: rows(x)"
        )
    return tf.shape(batch)[0]


def all_reduce(x, op="sum"):
    """Combine a tensor of every tower; all towers get the same result.

        "sum":  y = Σ_i x_i          "mean":  y = Σ_i (rows[i] / B) · x_i

    The mean is that over the rows of the global batch: with uneven shards a tower counts by its rows, and a tower
    without rows does not count. Both are differentiable.

    Args:
        x: a number or boolean tensor of the same shape and dtype on every tower, or a nested structure of them.
        op: "sum" or "mean".

    Returns:
        The combined tensor, of x's shape and dtype (a mean of whole numbers is float32). Outside towers and with one
        tower: x.

    Raises:
        ValueError: `op` is neither "sum" nor "mean".
    """
    if op not in ("sum", "mean"):
        raise ValueError(f"all_reduce got op={op!r}; expected 'sum' or 'mean'")
    return tf.nest.map_structure(lambda t: _all_reduce(tf.convert_to_tensor(t), op), x)


def _all_reduce(x, op):
    tower = current()
    if op == "mean" and not (x.dtype.is_floating or x.dtype.is_complex):
        x = tf.cast(x, tf.float32)
    if tower is None or tower.count == 1:
        return tf.identity(x)
    if not x.dtype.is_floating:
        return sum_over_towers(x)
    return _differentiable_sum(tower.weigh(x) if op == "mean" else x)


@tf.custom_gradient
def _differentiable_sum(x):
    return sum_over_towers(x), shared_gradient


def shared_gradient(dy):
    """(1/p_i) Σ_j p_j · dy_j: the gradient, for this tower, of something all towers use."""
    tower = current()
    if tower.weighting is Weighting.LOSS:
        return sum_over_towers(dy)
    return sum_over_towers(tower.weigh(dy)) * tower.inverse_share(dy.dtype)


def all_gather(x):
    """The rows of every tower, in tower order: what x is for the global batch. Differentiable.

    Args:
        x: tensor of shape (b, …), RaggedTensor or SparseTensor whose first dimension is rows; b may differ from tower
            to tower, the other dimensions may not. Or a nested structure of them.

    Returns:
        x of the global batch, of shape (Σ b, …). Outside towers and with one tower: x.
    """
    return tf.nest.map_structure(_all_gather, x)


def _all_gather(x):
    tower = current()
    if not tf.is_tensor(x):
        x = tf.convert_to_tensor(x)
    if tower is None or tower.count == 1:
        return x
    known = tower.recall(x)
    if known is not None:
        return known
    if isinstance(x, tf.RaggedTensor):
        return _gather_ragged(x)
    if isinstance(x, tf.SparseTensor):
        return _gather_sparse(tower, x)
    if x.shape.rank == 0:
        raise ValueError("all_gather got a scalar; expected a tensor whose first dimension is rows")
    counts = gather_fixed(tf.shape(x)[0])
    gathered = gather_rows(x, counts, lambda dy: _own_part(shared_gradient(dy), counts, tower))
    tower.remember(x, gathered)
    return gathered


def _gather_ragged(x):
    values = _all_gather(x.values)
    lengths = _all_gather(x.row_lengths())
    return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)


def _gather_sparse(tower, x):
    """Rows of tower i move down by the rows of the towers before it."""
    before = tf.cast(_start(tower.rows, tower.index), tf.int64)
    shift = tf.concat([[before], tf.zeros_like(x.dense_shape[1:])], 0)
    indices = _all_gather(x.indices + shift)
    values = _all_gather(x.values)
    widest = tf.reduce_max(gather_fixed(x.dense_shape), axis=0)
    shape = tf.concat([[tf.cast(tower.batch_rows, tf.int64)], widest[1:]], 0)
    return tf.SparseTensor(indices, values, shape)


def gather_outputs(x):
    """Model outputs of all towers, for code that every tower runs alike on the whole batch: its gradient is free.

    As every tower computes the same function of the result, ∂L/∂x needs no collective: it is this tower's own part of
    dy, the other towers' parts being their business.

    Args:
        x: tensor whose first dimension is exactly this tower's rows.
    """
    tower = current()
    if tower is None or tower.count == 1:
        return x
    if not isinstance(x, tf.Tensor):
        return _all_gather(x)
    known = tower.recall(x)
    if known is not None:
        return known
    check = tf.debugging.assert_equal(
        tf.shape(x)[0],
        tower.own_rows,
        message="multitower: an output of the model does not have one row for each row of the batch",
    )
    with tf.control_dependencies([check]):
        counts = tf.identity(tower.rows)
    gathered = gather_rows(x, counts, lambda dy: _own_part(dy, counts, tower) * tower.inverse_share(dy.dtype))
    tower.remember(x, gathered)
    return gathered


def gather_rows(x, counts, gradient):
    """All towers' rows of x, in tower order; `gradient` maps dy of the result to dx.

    Args:
        x: dense tensor of shape (counts[i], …) on tower i.
        counts: int32 tensor of shape (N,).
    """

    @tf.custom_gradient
    def gather(x):
        tail = tf.shape(x)[1:]
        sizes = counts * tf.reduce_prod(tail)
        everyone = _gather_flat(tf.reshape(x, [-1]), tf.reduce_max(sizes))
        parts = [part[: sizes[i]] for i, part in enumerate(tf.unstack(everyone, current().count))]
        everything = tf.reshape(tf.concat(parts, 0), tf.concat([[tf.reduce_sum(counts)], tail], 0))
        return tf.ensure_shape(everything, [None, *x.shape[1:]]), gradient

    return gather(x)


def _start(counts, index):
    """Rows before tower `index`."""
    return tf.reduce_sum(tf.where(tf.range(tf.size(counts)) < index, counts, 0))


def _own_part(dy, counts, tower):
    dy = tf.convert_to_tensor(dy)  # IndexedSlices where the whole batch was indexed
    start = _start(counts, tower.index)
    return dy[start : start + counts[tower.index]]


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
    everyone = _gather_flat(tf.reshape(x, [-1]), tf.size(x))[:, : tf.size(x)]
    return tf.reshape(everyone, tf.concat([[tower.count], tf.shape(x)], 0))


def _gather_flat(flat, most):
    """Vectors of at most `most` elements of all towers, as the rows of a matrix, filled up with zeros."""
    room, key = _room(most)
    return tf.reshape(_gather(_filled_up(flat, room), key), [current().count, room])


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
    towers = current().group
    return {
        "group_size": towers.count,
        "group_key": towers.key,
        "instance_key": key,
        "ordering_token": [towers.tokens[0].handle],
        "communication_hint": towers.hint,
    }


def _cast_around(x, collective):
    if x.dtype in _NATIVE:
        return collective(x)
    if x.dtype not in _TRAVELS_AS:
        raise MultitowerError(
            f"a tensor of dtype {x.dtype.name} cannot be sent between towers; expected a number or a boolean: "
            f"convert it (strings, for example, to integer ids) before the step"
        )
    return tf.cast(collective(tf.cast(x, _TRAVELS_AS[x.dtype])), x.dtype)
