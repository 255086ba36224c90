"""replicate(): any single-device step gives on N towers what it gives on one device."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import multitower as mt
from multitower.errors import BatchError, MultitowerError

TOWERS = [1, 2, 3, 4, 8]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # float32 sums of this size, added in another order


def cpus(n):
    return [f"CPU:{i}" for i in range(n)]


def data(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]] + 0.1).astype("float32")


def linear_step(w, reduce=lambda g: mt.all_reduce(g, "mean")):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - y) ** 2)
        w.assign_sub(0.1 * reduce(tape.gradient(loss, w)))
        return loss

    return step


def trained(n, rows, reduce=None):
    """Weights and losses after three steps, and the replicated step."""
    w = tf.Variable(tf.ones([3, 1]))
    step = linear_step(w, reduce) if reduce else linear_step(w)
    step = mt.replicate(step, cpus(n))
    losses = [float(step(*data(rows, seed))) for seed in range(3)]
    return w, losses, step


def reference(rows):
    w = tf.Variable(tf.ones([3, 1]))
    step = linear_step(w)  # outside towers all_reduce is that of one tower
    return w, [float(step(*data(rows, seed))) for seed in range(3)]


@pytest.mark.parametrize("n", TOWERS)
@pytest.mark.parametrize("extra", ["n-1", "n", "n+1", "5n+1"])
def test_plain_variables_equal_one_device(n, extra):
    rows = {"n-1": max(n - 1, 1), "n": n, "n+1": n + 1, "5n+1": 5 * n + 1}[extra]
    w, losses, step = trained(n, rows)
    expected, expected_losses = reference(rows)
    np.testing.assert_allclose(w, expected, **CLOSE)
    np.testing.assert_allclose(losses, expected_losses, **CLOSE)
    assert step.traces == 1
    assert all(np.array_equal(c, w) for c in step.copies(w))


def test_a_wrong_reduction_is_seen():
    """The control: plain averages with uneven shards, and no reduction at all, are not one device."""
    expected, _ = reference(7)
    summed, _, _ = trained(2, 7, lambda g: mt.all_reduce(g, "sum") / 2)
    assert np.abs(summed - expected).max() > 1e-4
    alone, _, step = trained(2, 7, lambda g: g)
    assert np.abs(alone - expected).max() > 1e-4
    assert not np.array_equal(*step.copies(alone))


def test_other_sizes_do_not_retrace():
    _, _, step = trained(2, 7)
    for rows in (1, 2, 3, 64, 65, 1000):
        step(*data(rows))
    assert step.traces == 1


def test_a_dimension_that_varies_is_traced_once_more():
    step = mt.replicate(lambda x: tf.reduce_sum(x, 1), cpus(2))
    for length in (3, 4, 5, 6):
        np.testing.assert_allclose(step(tf.ones([4, length])), [length] * 4)
    assert step.traces == 2


def test_module():
    class Line(tf.Module):
        def __init__(self):
            self.w = tf.Variable(tf.ones([3, 1]))

        def __call__(self, x, y):
            return linear_step(self.w)(x, y)

    line = Line()
    step = mt.replicate(line, cpus(3))
    for seed in range(3):
        step(*data(10, seed))
    np.testing.assert_allclose(line.w, reference(10)[0], **CLOSE)


def keras_loop(n):
    """A custom loop as anyone writes it: nothing in it knows of towers."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)
    metric = keras.metrics.MeanAbsoluteError()

    def step(x, y):
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, prediction))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        metric.update_state(y, prediction)
        return loss

    run = mt.replicate(step, cpus(n)) if n else tf.function(step, reduce_retracing=True)
    losses = [float(run(*map(tf.constant, data(rows, rows)))) for rows in (7, 3, 8)]
    return model, optimizer, metric, losses, run


@pytest.mark.parametrize("n", [1, 2, 4])
def test_keras_in_a_custom_loop(n):
    model, optimizer, metric, losses, step = keras_loop(n)
    expected, expected_optimizer, expected_metric, expected_losses, _ = keras_loop(0)
    for a, b in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)
    for a, b in zip(optimizer.variables, expected_optimizer.variables, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)
    np.testing.assert_allclose(losses, expected_losses, **CLOSE)
    np.testing.assert_allclose(metric.result(), expected_metric.result(), **CLOSE)
    assert step.traces == 1
    variables = [*model.variables, *optimizer.variables, *metric.variables]
    assert all(np.array_equal(c, v) for v in variables for c in step.copies(v))


def test_nested_batches_and_results():
    def step(batch, scale):
        return {"rows": batch["a"][0] * scale, "pair": (batch["b"], None), "count": tf.shape(batch["b"])[0]}

    a, b = tf.reshape(tf.range(10.0), [5, 2]), tf.range(5)
    out = mt.replicate(step, cpus(3))({"a": (a,), "b": b}, scale=tf.constant(2.0))
    np.testing.assert_array_equal(out["rows"], 2 * a)
    np.testing.assert_array_equal(out["pair"][0], b)
    assert out["pair"][1] is None
    assert int(out["count"]) == 2  # whole numbers are tower 0's


def test_ragged_rows():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0], [7.0]])
    step = mt.replicate(lambda r: (tf.reduce_sum(r, 1), r * 2.0, mt.all_gather(r * 1.0), mt.all_gather(r)), cpus(2))
    for batch in (ragged, ragged[:1]):
        sums, doubled, gathered, known = step(batch)
        np.testing.assert_allclose(sums, tf.reduce_sum(batch, 1))
        assert doubled.to_list() == (batch * 2.0).to_list()
        assert known.to_list()[: batch.nrows()] == gathered.to_list()[: batch.nrows()] == batch.to_list()
    assert step.traces == 1


def test_sparse_rows():
    sparse = tf.sparse.from_dense(tf.constant([[0, 1.0, 0], [2, 0, 3], [0, 0, 0], [4, 0, 5], [0, 6, 0]]))
    step = mt.replicate(lambda s: (tf.sparse.reduce_sum(s, 1), s), cpus(3))
    sums, back = step(sparse)
    np.testing.assert_allclose(sums, [1, 5, 0, 9, 6])
    np.testing.assert_array_equal(tf.sparse.to_dense(back), tf.sparse.to_dense(sparse))

    gather = mt.replicate(lambda s: tf.sparse.to_dense(mt.all_gather(s.with_values(s.values * 2))), cpus(3))
    assert gather(sparse).shape == (15, 3)  # every tower has them all
    np.testing.assert_array_equal(gather(sparse)[:5], 2 * tf.sparse.to_dense(sparse))


def test_python_values_are_constants_of_the_trace():
    seen = []

    def step(x, training, name=None):
        seen.append((training, name))
        return x + 1 if training else x

    step = mt.replicate(step, cpus(2))
    assert float(step(tf.zeros([2]), True)[0]) == 1
    assert float(step(tf.zeros([2]), False)[0]) == 0
    assert float(step(tf.zeros([3]), True)[0]) == 1
    step(tf.zeros([3]), True, name="a")
    assert seen == [(True, None), (False, None), (True, "a")]


def test_a_step_may_return_nothing():
    w = tf.Variable(1.0)

    def step(x):
        w.assign_add(mt.all_reduce(tf.reduce_sum(x)))

    assert mt.replicate(step, cpus(2))(tf.ones([3])) is None
    assert float(w) == 4


def test_whole_arguments_are_not_split():
    table = tf.constant([10.0, 20.0, 30.0, 40.0])
    step = mt.replicate(lambda x, table: tf.gather(table, x), cpus(2), whole="table")
    np.testing.assert_array_equal(step(tf.constant([3, 0, 1]), table), [40, 10, 20])


def test_python_control_flow_on_tensors():
    def step(x):
        if tf.reduce_sum(x) > 10:
            x = -x
        for _ in tf.range(2):
            x = x + 1
        return x

    step = mt.replicate(step, cpus(2))
    np.testing.assert_array_equal(step(tf.constant([1.0, 2.0, 30.0, 40.0])), [3, 4, -28, -38])  # each tower its own way


def test_a_step_that_is_a_tf_function_and_calls_one():
    w = tf.Variable(1.0)

    @tf.function
    def inner(x):
        w.assign_add(mt.all_reduce(tf.reduce_sum(x)))
        return mt.all_gather(x)

    @tf.function
    def step(x):
        return tf.reduce_sum(inner(x))

    step = mt.replicate(step, cpus(2))
    assert float(step(tf.range(5.0))) == 10
    assert float(w) == 11 == float(step.copies(w)[1])


def test_variables_may_be_created_in_the_step():
    made = []

    def step(x):
        if not made:
            made.append(tf.Variable(2.0))
        made[0].assign_add(mt.all_reduce(tf.reduce_mean(x), "mean"))
        return made[0] * x

    step = mt.replicate(step, cpus(2))
    np.testing.assert_allclose(step(tf.ones([3])), [3, 3, 3])
    assert step.traces == 1
    assert [float(c) for c in step.copies(made[0])] == [3, 3]


def test_a_lookup_table_shared_by_towers_does_not_hang():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1)
    step = mt.replicate(lambda s: mt.all_reduce(tf.reduce_sum(table.lookup(s))), cpus(3))
    assert int(step(tf.constant(["a", "b", "b", "x"]))) == 4


def test_steps_share_copies_and_do_not_disturb_each_other():
    w = tf.Variable(tf.ones([3, 1]))
    train = mt.replicate(linear_step(w), cpus(2))
    test = mt.replicate(lambda x, y: tf.reduce_mean((x @ w - y) ** 2), cpus(2))
    on_four = mt.replicate(lambda x: x @ w, cpus(4))
    x, y = data(9)
    for _ in range(3):
        train(x, y)
        np.testing.assert_allclose(test(x, y), tf.reduce_mean((x @ w - y) ** 2), **CLOSE)
    assert train.copies(w)[1] is test.copies(w)[1]
    on_four.refresh()
    np.testing.assert_allclose(on_four(x), x @ w, **CLOSE)


def test_beside_a_mirrored_strategy():
    strategy = tf.distribute.MirroredStrategy(cpus(2))
    with strategy.scope():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

    @tf.function
    def mirrored():
        return strategy.reduce("SUM", strategy.run(lambda: v * 2.0), axis=None)

    _, _, step = trained(2, 7)
    for _ in range(3):
        assert float(mirrored()) == 4
        step(*data(7))
    assert step.traces == 1


@pytest.mark.parametrize("change", ["assign", "keras", "checkpoint"])
def test_changes_from_outside_reach_every_tower(change, tmp_path):
    w = keras.Variable(tf.ones([2]))
    step = mt.replicate(lambda x: x * w[0], cpus(2))
    path = tf.train.Checkpoint(w=w).write(str(tmp_path / "c"))
    np.testing.assert_array_equal(step(tf.ones([4])), [1] * 4)
    w.assign([5.0, 5.0])
    np.testing.assert_array_equal(step(tf.ones([4])), [5] * 4)
    if change == "checkpoint":
        tf.train.Checkpoint(w=w).restore(path)
        np.testing.assert_array_equal(step(tf.ones([4])), [1] * 4)
    elif change == "keras":
        w.assign_add([1.0, 1.0])
        np.testing.assert_array_equal(step(tf.ones([4])), [6] * 4)
    else:
        w.value.scatter_update(tf.IndexedSlices([9.0], [0]))
        np.testing.assert_array_equal(step(tf.ones([4])), [9] * 4)


def test_refresh_after_a_graph_of_its_own_changed_a_variable():
    w = tf.Variable(1.0)
    step = mt.replicate(lambda x: x * w, cpus(2))
    step(tf.ones([2]))
    tf.function(lambda: w.assign(3.0))()
    step.refresh()
    np.testing.assert_array_equal(step(tf.ones([2])), [3, 3])


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_gradients_through_all_gather_and_all_reduce(rows):
    """A contrastive loss: every tower compares its own rows with all rows, so each dy is needed by every tower."""
    x = data(rows)[0]

    def gradient_of(wrap):
        w = tf.Variable(tf.linspace(0.1, 0.9, 6), trainable=True)

        def step(x):
            with tf.GradientTape() as tape:
                z = x @ tf.reshape(w, [3, 2])
                everyone = mt.all_gather(z)
                centre = mt.all_reduce(tf.reduce_sum(z, 0)) / rows
                loss = tf.reduce_mean(tf.reduce_sum((z @ tf.transpose(everyone)) ** 2, 1) + (z @ centre[:, None])[:, 0])
            return mt.all_reduce(tape.gradient(loss, w), "mean"), mt.all_reduce(loss, "mean")

        return wrap(step)(tf.constant(x))

    expected, loss = gradient_of(lambda s: s)
    for n in (2, 4):
        got, got_loss = gradient_of(lambda s, n=n: mt.replicate(s, cpus(n)))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)  # sums of products of order rows
        np.testing.assert_allclose(got_loss, loss, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "uint8", "bfloat16", "float16", "float32", "float64"])
def test_all_gather_keeps_dtype_and_order(dtype):
    x = tf.cast(tf.constant([0, 1, 1, 0, 1]), dtype)
    out = mt.replicate(lambda x: mt.all_gather(tf.identity(x)), cpus(2))(x)
    assert out.dtype == dtype
    np.testing.assert_array_equal(tf.cast(out, "float32"), [0, 1, 1, 0, 1] * 2)


def test_all_gather_of_rows_that_are_not_those_of_the_shard():
    step = mt.replicate(lambda x: tf.size(mt.all_gather(tf.boolean_mask(x, x > 2.0))), cpus(3))
    assert int(step(tf.range(7.0))) == 4


def test_index_count_and_rows():
    step = mt.replicate(
        lambda x: (tf.fill([mt.rows()], mt.tower_index()), mt.all_reduce(mt.rows()), mt.tower_count()), cpus(3)
    )
    index, total, count = step(tf.zeros([7, 2]))
    assert index.numpy().tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert int(total) == 7
    assert int(count) == 3


def test_outside_towers_there_is_one():
    x = tf.range(3.0)
    assert mt.tower_count() == 1
    assert int(mt.tower_index()) == 0
    assert int(mt.rows(x)) == 3
    np.testing.assert_array_equal(mt.all_reduce(x), x)
    np.testing.assert_array_equal(mt.all_gather(x), x)
    with pytest.raises(MultitowerError, match="outside a replicated step"):
        mt.rows()


def test_towers_draw_different_random_numbers_from_the_same_state():
    generator = keras.random.SeedGenerator(7)
    step = mt.replicate(lambda x: keras.random.uniform(tf.shape(x), seed=generator), cpus(2))
    a, b = step(tf.zeros([4])).numpy().reshape(2, 2)
    assert not np.allclose(a, b)
    assert not np.allclose(a, step(tf.zeros([4]))[:2])
    assert np.array_equal(*step.copies(generator.state))


def test_a_step_inside_a_graph():
    w, _, step = trained(2, 7)
    expected = w.numpy()

    @tf.function
    def twice(x, y):
        step(x, y)
        return step(x, y)

    twice(*map(tf.constant, data(7)))
    assert not np.allclose(w, expected)
    assert all(np.array_equal(c, w) for c in step.copies(w))


def test_a_failing_tower_ends_the_step_with_its_own_error():
    w = tf.Variable(1.0)

    def step(x, bad):
        fine = tf.debugging.Assert((mt.tower_index() < 1) | tf.logical_not(bad), ["this tower is bad"])
        with tf.control_dependencies([fine]):  # the update waits for the check, on one device as on several
            total = tf.reduce_sum(x)
        w.assign_add(mt.all_reduce(total))
        return w.read_value()

    step = mt.replicate(step, cpus(3))
    with pytest.raises(tf.errors.InvalidArgumentError, match="this tower is bad"):
        step(tf.ones([3]), tf.constant(True))
    assert float(step(tf.ones([3]), tf.constant(False))) == 4


def test_a_first_step_that_fails_leaves_the_towers_usable():
    """It ends while the other towers wait in their first collective. Without Group.meet all later steps are cancelled,
    in the whole process, so this file cannot show the control.
    """

    def late(index, bad):
        if bad and index == 1:
            time.sleep(0.3)
            raise ValueError("this tower is bad")
        return index

    def step(x, bad):
        index = tf.numpy_function(late, [mt.tower_index(), bad], tf.int32)
        return mt.all_reduce(tf.reduce_sum(x) + 0 * tf.cast(tf.reshape(index, []), tf.float32))

    step = mt.replicate(step, ["CPU:5", "CPU:6", "CPU:7"])  # a group no other test uses
    with pytest.raises(tf.errors.OpError, match="this tower is bad"):
        step(tf.ones([6]), tf.constant(True))
    assert float(step(tf.ones([6]), tf.constant(False))) == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s(tf.zeros([0, 2])), "no rows"),
        (lambda s: s({"a": tf.zeros([3]), "b": tf.zeros([4, 1])}), "different numbers of rows: 3, 4"),
        (lambda s: s(tf.constant(1.0)), "no tensor with rows"),
        (lambda s: s(3), "no tensor with rows"),
    ],
)
def test_batches_that_cannot_be_split(call, message):
    with pytest.raises(BatchError, match=message):
        call(mt.replicate(lambda x: x, cpus(2)))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("rows", "message"), [((3, 2), "different numbers of rows: 3, 2"), ((0, 0), "has no rows")])
def test_a_bad_batch_after_good_ones_changes_nothing(n, rows, message):
    """A step that knows this kind of batch goes straight to its function, and looks at the rows all the same."""
    v = tf.Variable(0.0)

    def step(x, y):
        v.assign_add(mt.all_reduce(tf.reduce_sum(x)))
        return tf.reduce_sum(y)

    run = mt.replicate(step, cpus(n))
    run(tf.ones([3]), tf.ones([3]))
    with pytest.raises(BatchError, match=message):
        run(tf.ones([rows[0]]), tf.ones([rows[1]]))
    assert float(v) == 3.0


def test_errors_of_use():
    with pytest.raises(BatchError, match="names tabel, which the step does not take; its arguments are x, table"):
        mt.replicate(lambda x, table: x, cpus(2), whole=["tabel"])
    with pytest.raises(ValueError, match="expected 'sum' or 'mean'"):
        mt.all_reduce(1.0, "max")
    with pytest.raises(MultitowerError, match="dtype string cannot be sent"):
        mt.replicate(lambda s: mt.all_gather(tf.identity(s)), cpus(2), reduce="ring")(tf.constant(["a", "b"]))
    inner = mt.replicate(lambda x: x, cpus(2))
    with pytest.raises(MultitowerError, match="inside a tower"):
        mt.replicate(lambda x: inner(x), cpus(2))(tf.zeros([2]))
