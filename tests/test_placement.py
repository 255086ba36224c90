"""Placement and reduce: every combination is one device, writes to shared variables wait for all readers, choices."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import multitower as mt
from multitower import wiring
from multitower.ahead import Ahead
from multitower.collectives import choose_reduce
from multitower.errors import DeviceError, ModelError
from multitower.placement import choose_placement
from oracle import assert_close, check, devices, state, twins
from small_models import (
    Subclassed,
    classification,
    compiled,
    features,
    functional,
    linear,
    momentum,
    named,
    regression,
    sequential,
)
from test_exactness import Gan

PLACEMENTS = ("replicated", "shared")
REDUCE = ("host", "gather", "ring")
COMBINATIONS = [(p, r) for p in PLACEMENTS for r in REDUCE]
LOOSER = 1e-5  # batch normalisation of few rows: see test_trainer_equality.py


def words():
    """Sparse gradients, of which rows are touched by several towers."""
    members = [keras.Input((4,), dtype="int32"), layers.Embedding(7, 3), layers.Flatten(), layers.Dense(2)]
    return compiled(members, keras.optimizers.SGD(0.1, momentum=0.9))


def word_rows(rows):
    rng = np.random.default_rng(3)
    return {"x": rng.integers(0, 7, (rows, 4)), "y": rng.normal(size=(rows, 2)).astype("float32")}


def everything_in_the_optimizer():
    """Clipping, accumulation over two steps and a moving average: state that changes inside a conditional."""
    optimizer = keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=0.5, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.9
    )
    return linear(optimizer, metrics=["mae"])


def scaled():
    return linear(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=2)
    )


CASES = {
    "batch norm": (sequential, classification, LOOSER),
    "several outputs": (functional, named, 1e-6),
    "sparse": (words, word_rows, 1e-6),
    "optimizer": (everything_in_the_optimizer, regression, 1e-6),
    "loss scale": (scaled, regression, 1e-6),
}


def two_epochs(data, rows=17):
    return lambda either: either.fit(**data(rows), batch_size=5, epochs=2, shuffle=False, verbose=0)


@pytest.mark.parametrize(("placement", "reduce"), COMBINATIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_combination_is_one_device(case, placement, reduce):
    build, data, bound = CASES[case]
    _, trainer = check(build, two_epochs(data), 3, bound, placement=placement, reduce=reduce)
    assert (trainer.placement, trainer.reduce) == (placement, reduce)
    assert trainer.traces["train_step"] == 1


@pytest.mark.parametrize(("placement", "reduce"), COMBINATIONS)
def test_two_optimizers_that_take_turns(placement, reduce):
    """A GAN: the second update reads what the first one wrote."""
    data = {"x": features(14), "y": features(14, 3)[:, :3]}

    def build():
        model = Gan()
        model.compile(momentum(clipnorm=0.5), momentum())
        return model

    def train(either):
        return either.fit(**data, batch_size=5, epochs=2, shuffle=False, verbose=0)

    check(build, train, 3, 1e-5, placement=placement, reduce=reduce)


def test_shared_and_replicated_are_the_same_bits():
    """Dropout too: every tower reads the state of the random numbers before tower 0 writes the next one."""

    def build():
        return compiled([keras.Input((6,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(1)], momentum())

    shared, replicated = twins(build)
    for model, placement in ((shared, "shared"), (replicated, "replicated")):
        two_epochs(regression)(mt.Trainer(model, devices(4), placement=placement, reduce="host"))
    for (name, a), b in zip(state(shared).items(), state(replicated).values(), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes(), name


class SeesGradients(keras.optimizers.SGD):
    """Notes what kinds of gradients it is given."""

    def apply(self, grads, trainable_variables=None):
        self.kinds = [type(gradient) for gradient in grads]
        return super().apply(grads, trainable_variables)


@pytest.mark.parametrize(("placement", "reduce"), COMBINATIONS)
def test_sparse_gradients_stay_sparse(placement, reduce):
    optimizer = SeesGradients(0.1)
    model = compiled([keras.Input((4,), dtype="int32"), layers.Embedding(7, 3), layers.Flatten()], optimizer)
    trainer = mt.Trainer(model, devices(2), placement=placement, reduce=reduce)
    trainer.train_on_batch(np.arange(12).reshape(3, 4) % 7, np.zeros([3, 12], "float32"))
    assert optimizer.kinds == [tf.IndexedSlices]


def test_shared_variables_have_no_copies():
    model = linear()
    trainer = mt.Trainer(model, devices(3), placement="shared")
    two_epochs(regression)(trainer)
    for variable in (*model.variables, *model.optimizer.variables):
        assert all(copy is variable.value for copy in trainer.copies(variable))


def test_independent_towers_train_on_their_shards_alone():
    plain, model = twins(linear)
    trainer = mt.Trainer(model, devices(2), placement="independent")
    data = regression(8)
    trainer.fit(**data, batch_size=8, epochs=3, shuffle=False, verbose=0)
    plain.fit(data["x"][:4], data["y"][:4], batch_size=4, epochs=3, shuffle=False, verbose=0)
    assert_close([v.numpy() for v in model.weights], [v.numpy() for v in plain.weights])
    kernel = trainer.copies(model.weights[0])
    assert not np.array_equal(kernel[0], kernel[1])  # the control: nothing was reduced


# Writes to shared variables ------------------------------------------------------------------------------------------


def slow_on(tower, seconds, x):
    """x, later on one tower."""

    def wait(index):
        time.sleep(seconds if index == tower else 0)
        return np.float32(0)

    delay = tf.numpy_function(wait, [mt.tower_index()], tf.float32)
    return x + tf.reshape(delay, [])


@pytest.mark.parametrize("tower", [0, 1, 2])
def test_a_write_waits_until_every_tower_has_read(tower):
    v = tf.Variable(1.0)
    results = []

    def step(x):
        with tf.control_dependencies([slow_on(tower, 0.2, tf.reduce_sum(x))]):
            before = v.read_value()
        v.assign_add(1.0)
        after = v.read_value()
        return tf.fill(tf.shape(x), before), tf.fill(tf.shape(x), after)

    run = mt.replicate(step, devices(3), placement="shared")
    for _ in range(3):
        results.append([r.numpy().tolist() for r in run(tf.ones([3]))])
    assert results == [[[k] * 3, [k + 1] * 3] for k in (1.0, 2.0, 3.0)]


def test_control_the_order_of_writes_is_what_makes_it_right(monkeypatch):
    """Without the edges from readers to the write, the slow tower reads what tower 0 has written already."""
    monkeypatch.setattr(wiring._Towers, "_order_writes", lambda self: None)
    v = tf.Variable(1.0)

    def step(x):
        with tf.control_dependencies([slow_on(1, 0.2, tf.reduce_sum(x))]):
            before = v.read_value()
        v.assign_add(1.0)
        return tf.fill(tf.shape(x), before)

    seen = mt.replicate(step, devices(2), placement="shared")(tf.ones([2])).numpy()
    assert seen.tolist() == [1.0, 2.0]


def test_a_function_of_the_step_may_write():
    """A tf.function that writes is taken apart, so that towers can take turns at the write."""
    v, w = tf.Variable(1.0), tf.Variable([[2.0], [1.0]])

    @tf.function
    def inner(x):
        y = x @ w
        v.assign_add(1.0)
        return y * v

    @tf.function
    def outer(x):
        return inner(x) + v

    run = mt.replicate(lambda x: outer(x), devices(3), placement="shared")
    x = np.random.default_rng(0).normal(size=(7, 2)).astype("float32")
    for k in (2.0, 3.0):
        np.testing.assert_allclose(run(x), (x @ w.numpy()) * k + k, rtol=1e-6)
    assert float(v) == 3.0


class WritesInCond(Subclassed):
    """Counts batches whose mean is positive: a write that a conditional decides on."""

    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x, training=False):
        if training:
            positive = mt.all_reduce(tf.reduce_mean(x), "mean") > -10
            tf.cond(positive, lambda: self.seen.value.assign_add(1.0), lambda: self.seen.value + 0.0)
        return super().call(x)


def writes_in_cond():
    model = WritesInCond()
    model.compile(momentum(), "mse")
    model(np.zeros([1, 6], "float32"))
    return model


def test_auto_takes_replicated_where_towers_cannot_take_turns():
    _, trainer = check(writes_in_cond, two_epochs(regression), 2)
    assert trainer.placement == "replicated"
    assert "'shared' cannot serve this step" in trainer.reasons["placement"]


def test_shared_says_where_towers_cannot_take_turns():
    trainer = mt.Trainer(writes_in_cond(), devices(2), placement="shared")
    with pytest.raises(ModelError, match=r"placement='shared'.*conditional.*use placement='replicated'"):
        two_epochs(regression)(trainer)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_tower_that_fails_ends_the_step_with_its_own_error(placement):
    def fails(x):
        def check(index, value):
            if index == 1 and value < 0:
                raise ValueError("row of tower 1 is negative")
            return value

        return x + tf.reshape(tf.numpy_function(check, [mt.tower_index(), x[0]], tf.float32), []) + mt.all_reduce(x[0])

    run = mt.replicate(fails, devices(3), placement=placement)
    start = time.perf_counter()
    with pytest.raises(tf.errors.InvalidArgumentError, match="row of tower 1 is negative"):
        run(tf.constant([1.0, -1.0, 1.0]))
    assert time.perf_counter() - start < 10
    run(tf.constant([1.0, 1.0, 1.0]))


# Where operations run ------------------------------------------------------------------------------------------------


def wired_step(placement, build=functional, data=named, count=2, reduce="host"):
    trainer = mt.Trainer(build(), devices(count), placement=placement, reduce=reduce)
    wires = []
    original = wiring.upstream.register_function
    wiring.upstream.register_function = lambda function: (wires.append(function), original(function))
    try:
        trainer.train_on_batch(*data(6).values())
    finally:
        wiring.upstream.register_function = original
    return wires[-1]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_operation_is_on_the_device_of_its_tower(placement):
    for node in wired_step(placement).node_def:
        assert node.device, node.name
        place = int(node.device.rsplit(":", 1)[-1])
        if node.name.startswith("tower_1/"):
            on_variable = node.op in ("ReadVariableOp", "ResourceGather")
            assert place == 1 or (placement == "shared" and on_variable), (node.name, node.device)


def test_shared_writes_once():
    writes = [n.name for n in wired_step("shared").node_def if n.op.startswith("Assign")]
    assert writes
    assert all(name.startswith("tower_0/") for name in writes)
    replicated = [n.name for n in wired_step("replicated").node_def if n.op.startswith("Assign")]
    assert len(replicated) == 2 * len(writes)


def test_gradients_are_summed_while_backward_goes_on():
    """The sum of the last layer's gradient needs nothing of the first layer's backward pass."""
    for reduce, operation in (("host", "AddN"), ("ring", "CollectiveReduceV2")):
        function = wired_step("replicated", build=deep, data=regression, reduce=reduce)
        inputs = {n.name: [i.removeprefix("^").split(":")[0] for i in n.input] for n in function.node_def}
        sums = [n.name for n in function.node_def if n.op == operation and "multitower_reduce" in n.name]
        needs_first = [
            name for name in sums if any("gradient_tape" in a and "/first" in a for a in above(inputs, name))
        ]
        assert sums
        assert 0 < len(needs_first) < len(sums), (reduce, needs_first, sums)


@pytest.mark.parametrize(("size", "collectives"), [(None, 2), (100, 6), (2**30, 2)])
def test_buckets_are_as_large_as_asked(size, collectives):
    """The first one is at most a mebibyte; of six gradients, all but one are larger than 100 bytes."""
    trainer = mt.Trainer(deep(), devices(2), reduce="ring", bucket_bytes=size)
    trainer.train_on_batch(*regression(6).values())
    graph = trainer._trained._programs[0].concrete.graph
    sums = [o for o in graph.get_operations() if o.type == "CollectiveReduceV2" and "multitower_reduce" in o.name]
    assert len(sums) == collectives


def deep():
    members = [keras.Input((6,)), layers.Dense(600, name="first"), layers.Dense(600), layers.Dense(1, name="last")]
    return compiled(members, momentum())


def above(inputs, name):
    """Names of everything a node needs."""
    seen, queue = set(), [name]
    while queue:
        for i in inputs.get(queue.pop(), ()):
            if i not in seen:
                seen.add(i)
                queue.append(i)
    return seen


def with_xla():
    model = linear(metrics=["mae"])
    model.compile(momentum(), "mse", metrics=["mae"], jit_compile=True)
    return model


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_xla_inside_towers(placement):
    """XLA adds up in an order of its own, as it does on one device: hence the bound."""
    plain, model = linear(metrics=["mae"]), with_xla()
    model.set_weights(plain.get_weights())
    trainer = mt.Trainer(model, devices(3), placement=placement)
    assert_close(two_epochs(regression)(trainer).history, two_epochs(regression)(plain).history, 1e-5)
    assert_close(model.get_weights(), plain.get_weights(), 1e-5)


def test_xla_is_asked_to_compile_what_it_can():
    compiled_nodes = [
        n for n in wired_step("shared", build=with_xla, data=regression).node_def if "_XlaCompile" in n.attr
    ]
    assert any(n.op == "MatMul" for n in compiled_nodes)
    assert not any("_XlaCompile" in n.attr for n in wired_step("shared", build=linear, data=regression).node_def)


# The next batch, copied ahead ----------------------------------------------------------------------------------------


def ahead(trainer):
    """The Trainer as it is on GPUs: shards are copied while the step before runs."""
    towers = trainer._trained
    trainer._functions["train_function"]._run = Ahead(towers)
    return trainer


@pytest.mark.parametrize("count", [1, 3])
def test_batches_copied_ahead_are_the_same_batches(count):
    plain, model = twins(sequential)
    trainer = ahead(mt.Trainer(model, devices(count)))
    data = tf.data.Dataset.from_tensor_slices(tuple(classification(17).values())).batch(5)
    for either in (plain, trainer):
        for steps in (None, 2):  # steps_per_epoch leaves a batch on its way when an epoch ends
            either.fit(data.repeat() if steps else data, steps_per_epoch=steps, epochs=2, shuffle=False, verbose=0)
    for (name, a), b in zip(state(model).items(), state(plain).values(), strict=True):
        assert_close(a.numpy(), b.numpy(), LOOSER, name)


def test_an_error_in_the_data_is_raised_by_the_step_it_is_for():
    def rows():
        for k in range(5):
            if k == 3:
                raise ValueError("file 3 is damaged")
            yield tuple(regression(4).values())

    signature = (tf.TensorSpec([None, 6]), tf.TensorSpec([None, *regression(4)["y"].shape[1:]]))
    data = tf.data.Dataset.from_generator(rows, output_signature=signature)
    trainer = ahead(mt.Trainer(linear(), devices(2)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="file 3 is damaged"):
        trainer.fit(data, shuffle=False, verbose=0)
    assert int(trainer.model.optimizer.iterations) == 3
    two_epochs(regression)(trainer)


# Choices --------------------------------------------------------------------------------------------------------------


def test_what_auto_chooses():
    assert choose_placement(["CPU:0"])[0] == "replicated"
    assert choose_placement(["CPU:0", "CPU:1"])[0] == "shared"
    assert choose_placement(["GPU:0", "GPU:1"])[0] == "replicated"
    assert choose_reduce(["CPU:0"])[0] == "none"
    assert choose_reduce(["CPU:0", "CPU:1"])[0] == "host"
    for choose in (choose_placement, choose_reduce):
        assert choose(["CPU:0", "CPU:1"])[1]


def test_gpus_choose_nccl_where_each_tower_has_one(monkeypatch):
    monkeypatch.setattr("multitower.collectives.physical_gpu_count", len)
    assert choose_reduce(["GPU:0", "GPU:1"])[0] == "nccl"
    monkeypatch.setattr("multitower.collectives.physical_gpu_count", lambda names: 1)
    name, reason = choose_reduce(["GPU:0", "GPU:1"])
    assert name == "gather"
    assert "share a physical GPU" in reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "mirrored"}, r"placement='mirrored' is unknown; expected 'auto', 'replicated', 'shared'"),
        ({"placement": "replicated:cpu:0"}, r"'shared:DEVICE', as in 'shared:cpu:0'"),
        ({"placement": "shared:tpu:0"}, "expected"),
        ({"placement": 3}, "placement=3 is unknown"),
        ({"reduce": "tree"}, r"reduce='tree' is unknown; expected 'auto', 'host', 'gather', 'ring', 'nccl'"),
        ({"reduce": "nccl"}, r"reduce='nccl' on CPU:0, CPU:1: NCCL needs a GPU for every tower; use reduce='host'"),
    ],
)
def test_choices_there_are_not(options, message):
    with pytest.raises(DeviceError, match=message):
        mt.Trainer(linear(), devices(2), **options)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "25 MB"])
def test_bucket_bytes_are_a_number(size):
    with pytest.raises(ModelError, match="expected a whole number of bytes"):
        mt.Trainer(linear(), devices(2), bucket_bytes=size)


def test_shared_on_a_named_device():
    with tf.device("CPU:1"):
        model = linear()
    trainer = mt.Trainer(model, devices(3), placement="shared:cpu:1")
    two_epochs(regression)(trainer)
    assert trainer.placement == "shared"
    with pytest.raises(ModelError, match=r"placement='shared:CPU:2': 2 variables .* make the model under tf.device"):
        mt.Trainer(model, devices(3), placement="shared:cpu:2")
