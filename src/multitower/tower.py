"""The tower context: which tower a step is being traced for, and what it knows of the others.

A step is traced once; while it is traced, `current()` is the `Tower` it is traced for: symbolic, the same graph for
all towers, so its index and its rows are tensors.
"""

import enum
import threading
from contextlib import contextmanager

import tensorflow as tf

from .errors import MultitowerError

_tracing = threading.local()


class Weighting(enum.Enum):
    """Where the weight w_i = rows[i] / B enters the backward pass of a tower."""

    LOSS = "loss"
    GRADIENT = "gradient"


class Tower:
    """The tower a step is being traced for.

    Attributes:
        group: its `Group`.
        index: this tower's number, an int32 scalar tensor.
        rows: rows of every tower's shard, an int32 tensor of shape (N,).
        weighting: see `Weighting`.
        trace_again: the trace is not that of later steps, as an optimizer was not built yet; make another one.
        shares_variables: all towers use the same variables, to which tower 0 writes.
        loss_over_shard: the loss and the metrics of a model are computed on the shard's outputs, not on those of all.
        graph: the graph of the step itself, in which towers can be wired together; see `wiring`.
        bucket_bytes: size of the buckets in which gradients travel; None for the usual one.
        labels: what operations of `graph` are for, by name, where `labelling` has told.
        apart: variables, keyed by id, that differ from tower to tower within a step, though towers share the others.
        silenced: names of Keras methods that need no help now, because they are given the whole batch already.
        batch_moments: with batch_norm="tower", the mean and variance for the layer being called: see `hooks`.
    """

    def __init__(
        self, group, index, rows, weighting, *, loss_over_shard=False, shares_variables=False, bucket_bytes=None
    ):
        self.group = group
        self.index = index
        self.rows = rows
        self.weighting = weighting
        self.loss_over_shard = loss_over_shard
        self.shares_variables = shares_variables
        self.bucket_bytes = bucket_bytes
        self.graph = tf.compat.v1.get_default_graph()
        self.labels = {}
        self.apart = {}
        self.silenced = frozenset()
        self.trace_again = False
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

    def meets_in_graph(self):
        """Whether towers meet here by edges between their graphs, not by a collective."""
        return self.group.in_graph and tf.compat.v1.get_default_graph() is self.graph

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
    def labelling(self, label):
        """Operations made in this block are for `label`; Keras leaves name scopes, so names do not tell."""
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        if graph is self.graph:
            self.labels.update((operation.name, label) for operation in graph.get_operations()[before:])

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


def this_tower():
    """The `Tower` whose step this thread is tracing, for code that runs in towers only."""
    tower = current()
    if tower is None:
        raise MultitowerError("this runs inside a replicated step only; give the step to multitower.replicate")
    return tower


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
