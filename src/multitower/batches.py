"""Batches: what a step was given, the rows of each tower, and results put together again.

A batch is a nested structure. Its leaves are tensors of rows (dense, ragged, sparse), `Whole` tensors that every tower
gets undivided, and Python values that are constants of the trace.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .errors import BatchError

NO_ROWS = "multitower: the batch has no rows; expected at least one row: leave empty batches out of the data"
UNEQUAL_ROWS = (
    "multitower: tensors of one batch have different numbers of rows; expected one row of every tensor for each row of "
    "the batch"
)


class Whole:
    """A tensor, or its spec, that goes to every tower undivided."""

    def __init__(self, value):
        self.value = value


def whole(value):
    """A leaf of an argument that goes to every tower: a `Whole`, unless it is a Python constant."""
    plain = leaf(value)
    return plain if is_constant(plain) or isinstance(plain, Whole) else Whole(plain)


def leaf(value):
    """A value as a leaf of a batch: a tensor of rows, a `Whole` tensor or a Python constant."""
    if isinstance(value, Whole):
        return Whole(leaf_tensor(value.value))
    if value is None or isinstance(value, tf.experimental.Optional):  # Keras' adapters send None as an Optional
        return None
    if isinstance(value, (tf.Variable, keras.Variable)):
        return value
    if not tf.is_tensor(value) and not isinstance(value, (np.ndarray, np.generic)):
        return value
    tensor: Any = leaf_tensor(value)
    return Whole(tensor) if tensor.shape.rank == 0 else tensor


def leaf_tensor(value):
    return value if tf.is_tensor(value) else tf.convert_to_tensor(value)


def is_constant(value):
    """Whether a leaf is part of the trace: not a tensor."""
    return not isinstance(value, (Whole, tf.TypeSpec)) and (
        not tf.is_tensor(value) or isinstance(value, (tf.Variable, keras.Variable))
    )


def spec_of(value):
    """The spec of a leaf, its rows left open, so that batches of any size share a trace; constants as they are."""
    if is_constant(value):
        return value
    if isinstance(value, Whole):
        return Whole(tf.type_spec_from_value(value.value))
    spec = tf.type_spec_from_value(value)
    shape = tf.TensorShape(None) if spec.shape.rank is None else tf.TensorShape([None, *spec.shape[1:]])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype)


def tensor_of(value):
    """The tensor or spec in a leaf that is not a constant."""
    return value.value if isinstance(value, Whole) else value


def common(a, b):
    """The narrowest structure of specs that both structures of specs fit, or None if a trace cannot serve both."""
    try:
        tf.nest.assert_same_structure(a, b)
    except (TypeError, ValueError):
        return None
    merged = [_common_leaf(x, y) for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)]
    return None if any(m is _DIFFERENT for m in merged) else tf.nest.pack_sequence_as(a, merged)


_DIFFERENT = object()


def _common_leaf(x, y):
    if is_constant(x) or is_constant(y):
        same = x is y or (type(x) is type(y) and not isinstance(x, (tf.Variable, keras.Variable)) and x == y)
        return x if same else _DIFFERENT
    if isinstance(x, Whole) != isinstance(y, Whole):
        return _DIFFERENT
    spec = tensor_of(x).most_specific_common_supertype([tensor_of(y)])
    if spec is None:
        return _DIFFERENT
    return Whole(spec) if isinstance(x, Whole) else spec


def same_specs(a, b):
    """Whether two structures that have a common one are equal in every spec."""
    pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    return all(is_constant(x) or tensor_of(x) == tensor_of(y) for x, y in pairs)


def components(structure):
    """The dense tensors, or their specs, that make up the tensors of a batch, in order."""
    tensors = [tensor_of(v) for v in tf.nest.flatten(structure) if not is_constant(v)]
    return tf.nest.flatten(tensors, expand_composites=True)


def pack(structure, flat):
    """A batch of the given structure of specs from its components: what the step is called with."""
    leaves = tf.nest.flatten(structure)
    specs = [tensor_of(v) for v in leaves if not is_constant(v)]
    tensors = iter(tf.nest.pack_sequence_as(specs, flat, expand_composites=True))
    return tf.nest.pack_sequence_as(structure, [v if is_constant(v) else next(tensors) for v in leaves])


def unflatten(structure, tensors):
    """A batch of leaves, as the given structure of specs has them, from its tensors."""
    tensors = iter(tensors)

    def fill(spec):
        if is_constant(spec):
            return spec
        return Whole(next(tensors)) if isinstance(spec, Whole) else next(tensors)

    return tf.nest.map_structure(fill, structure)


def check(batch):
    """Refuse a batch that cannot be split, as far as its shapes are known before it runs.

    Raises:
        BatchError: nothing to split, no rows, or tensors with different numbers of rows.
    """
    tensors = [v for v in tf.nest.flatten(batch) if not is_constant(v) and not isinstance(v, Whole)]
    if not tensors:
        raise BatchError(
            "the batch has no tensor with rows to split over towers: received only scalars and Python values; "
            "pass at least one array or tensor of shape (rows, …)"
        )
    known = [v.shape[0] for v in tensors if v.shape.rank]
    counts = sorted({n for n in known if n is not None})
    if len(counts) > 1:
        raise BatchError(
            f"tensors of one batch have different numbers of rows: {', '.join(map(str, known))}; every array or tensor "
            f"of rank 1 or more needs one row for each row of the batch (name arguments that do not in whole=)"
        )
    if counts == [0]:
        raise BatchError("the batch has no rows: received tensors of shape (0, …), expected at least one row")


def split(batch, count):
    """Split the rows of a batch over towers: tower i gets B // N of them, one more if i < B mod N.

    Args:
        batch: structure of leaves.
        count: N.

    Returns:
        (rows, shards): an int32 tensor of shape (N,), and for each tower the list of components of its shard.
    """
    leaves = [v for v in tf.nest.flatten(batch) if not is_constant(v)]
    total = _rows(leaves)
    if count == 1:
        return total[tf.newaxis], [components(batch)]
    towers = tf.range(count)
    rows = total // count + tf.cast(towers < total % count, tf.int32)
    parts = [[v.value] * count if isinstance(v, Whole) else split_tensor(v, rows, count) for v in leaves]
    return rows, [tf.nest.flatten([part[i] for part in parts], expand_composites=True) for i in range(count)]


def _rows(leaves):
    """B, checked when the step runs; shapes known before were checked by `check`."""
    counts = [tf.cast(row_count(v), tf.int32) for v in leaves if not isinstance(v, Whole)]
    checks = [demand(counts[0] > 0, NO_ROWS)]
    checks += [demand(tf.equal(n, counts[0]), UNEQUAL_ROWS) for n in counts[1:]]
    with tf.control_dependencies(checks):
        return tf.identity(counts[0])


def demand(condition, message):
    """An operation that fails with `message` where `condition` is false; those of tf.debugging are conditionals."""
    return tf.raw_ops.Assert(condition=condition, data=[message])


def row_count(tensor):
    """Rows of a dense, ragged or sparse tensor, an integer scalar."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows()
    return tensor.dense_shape[0] if isinstance(tensor, tf.SparseTensor) else tf.shape(tensor)[0]


def split_tensor(tensor, rows, count):
    """The parts of a dense, ragged or sparse tensor, rows[i] rows in part i of `count`."""
    if isinstance(tensor, tf.Tensor):
        return tf.split(tensor, rows, num=count)
    ends = tf.cumsum(rows)
    if isinstance(tensor, tf.RaggedTensor):
        return [tensor[ends[i] - rows[i] : ends[i]] for i in range(count)]
    ends, rows = tf.cast(ends, tf.int64), tf.cast(rows, tf.int64)
    rest = tensor.dense_shape[1:]
    return [
        tf.sparse.slice(
            tensor, tf.concat([[ends[i] - rows[i]], tf.zeros_like(rest)], 0), tf.concat([[rows[i]], rest], 0)
        )
        for i in range(count)
    ]


class Result:
    """A tensor among the results of a step: its spec, and how those of N towers become that of the global batch."""

    def __init__(self, value):
        self.spec = tf.type_spec_from_value(value)
        self.size = len(tf.nest.flatten(value, expand_composites=True))

    def take(self, flat):
        """The tensor, from an iterator over components."""
        return tf.nest.pack_sequence_as(self.spec, [next(flat) for _ in range(self.size)], expand_composites=True)

    def merge(self, values, rows):
        """One result from those of all towers; see `multitower.replicate` for the rule."""
        if isinstance(self.spec, tf.SparseTensorSpec):
            return tf.sparse.concat(0, values, expand_nonconcat_dims=True)
        if len(values) == 1:
            return values[0]
        shape = self.spec.shape
        if shape.rank is None or (shape.rank > 0 and shape[0] is None):
            return tf.concat(values, 0)
        return _mean_over_rows(values, rows) if self.spec.dtype.is_floating else values[0]


def _mean_over_rows(values, rows):
    """Σ_i rows[i] · x_i / B, and exactly x where all x_i are x."""
    stacked = tf.stack(values)
    weights = tf.cast(rows, stacked.dtype) / tf.cast(tf.reduce_sum(rows), stacked.dtype)
    weights = tf.reshape(weights, [-1] + [1] * (stacked.shape.rank - 1))
    mean = tf.reduce_sum(tf.math.multiply_no_nan(stacked, tf.broadcast_to(weights, tf.shape(stacked))), 0)
    return tf.where(tf.reduce_all(stacked == stacked[:1], 0), stacked[0], mean)


def result(value):
    """A result of a step as it leaves the trace: variables and slices as tensors, Python values as they are."""
    if isinstance(value, (tf.Variable, keras.Variable, tf.IndexedSlices)):
        return tf.convert_to_tensor(value)
    return value
