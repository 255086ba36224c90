"""Batch normalisation over towers against one device and float64: values, gradients, moving statistics, collectives."""

import functools
import inspect

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from keras.layers import BatchNormalization

import multitower as mt
from multitower import norm
from multitower.batches import Whole
from multitower.moments import Moments, measure, merge
from multitower.step import TowerStep
from multitower.tower import Weighting, current
from multitower.towers import Replicated
from oracle import assert_close, assert_copies_equal, check, devices, twins

# float64 sums of a few dozen numbers are right to 1e-15; float32 ones to 1e-7, and dividing by the spread of a small
# batch makes ten times as much of it. A reduction that leaves a tower out is wrong by 1e-2 and more.
BOUNDS = {"float32": 1e-5, "float64": 1e-10}
HARD = [(0.0, 1.0), (100.0, 1.0), (4096.0, 1.0), (1000.0, 0.1)]  # (mean, std)
SHARDS = [(6, 2), (4, 0), (3, 0, 5), (1, 4, 2, 1), (0, 3, 1, 0, 1, 2, 1, 1)]
RENORM = {"renorm": True, "renorm_clipping": {"rmax": 3.0, "rmin": 0.3, "dmax": 5.0}}
needs_renorm = pytest.mark.skipif(
    "renorm" not in inspect.signature(BatchNormalization).parameters, reason="this Keras has no renorm"
)


class OnlySuper(BatchNormalization):
    """What people write: something of their own around Keras' layer."""

    def build(self, shape):
        super().build(shape)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs, training=None, mask=None):
        self.calls.assign_add(1.0)
        return super().call(inputs, training=training, mask=mask)


def numbers(shape, seed=0, mean=0.5, std=2.0):
    return np.random.default_rng(seed).normal(mean, std, shape)


def on_shards(function, shards, *arrays, weighting=Weighting.LOSS, batch_norm="global"):
    """Run `function` on towers that have as many rows of the arrays as `shards` says; return (results, TowerStep).

    Results that are rows come back in the order of the rows, all others once for each tower, stacked.
    """

    def step(one_row_each, *whole):
        tower = current()
        tower.rows = tf.constant(shards)
        start = tf.reduce_sum(tower.rows[: tower.index])
        own = [array[start : start + tower.own_rows] for array in whole]
        return [r if r.shape.rank and r.shape[0] is None else once(r, one_row_each) for r in function(*own)]

    def once(result, one_row_each):
        return tf.tile(result[tf.newaxis], [tf.size(one_row_each), *[1] * result.shape.rank])

    towers = TowerStep(step, devices(len(shards)), weighting=weighting, batch_norm=batch_norm)
    results = Replicated(towers)(np.zeros(len(shards)), *[Whole(tf.convert_to_tensor(a)) for a in arrays])
    return [r.numpy() for r in results], towers


def layer_of(make, shape, dtype):
    """A built layer with weights that are not those it starts from."""
    layer = make(dtype=dtype)
    layer.build((None, *shape[1:]))
    for k, v in enumerate(layer.weights):
        v.assign(np.abs(numbers(v.shape, seed=k, mean=1.0, std=0.3)))
    return layer


def training_step(layer, rows=None, weighting=Weighting.LOSS, mask=False):
    """A step that gives outputs, input gradients, then gradients of the weights, all of them of the global batch.

    The loss is a mean over `rows` rows of the global batch; in the shard it is, by weighting, this tower's part of it
    or the mean over its own rows (0/0 for none).
    """
    own = weighting is Weighting.GRADIENT

    def step(x, factors, *masks):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=masks[0] if mask else None)
            loss = tf.reduce_sum(y * factors) / tf.cast(tf.shape(x)[0] if own else rows, y.dtype)
        dx, *dw = tape.gradient(loss, [x, *[v.value for v in layer.trainable_variables]])
        if current() is None:
            return [y, dx, *dw]
        share = tf.cast(current().share(tf.float64), dx.dtype) if own else 1
        return [y, dx * share, *[mt.all_reduce(g, "mean" if own else "sum") for g in dw]]

    return step


def one_device(make, x, *others, mask=False):
    """Everything `training_step` gives, and the weights after it, on one device in float64."""
    layer = layer_of(make, x.shape, "float64")
    step = training_step(layer, x.shape[0], mask=mask)
    results = step(tf.constant(x), *[tf.constant(a) for a in others])
    return [r.numpy() for r in results], [w.numpy() for w in layer.weights]


def assert_one_device(make, shards, x, *others, dtype="float64", bound=None, mask=False, weighting=Weighting.LOSS):
    bound = bound or BOUNDS[dtype]
    expected, weights = one_device(make, x, *others, mask=mask)
    layer = layer_of(make, x.shape, dtype)
    step = training_step(layer, x.shape[0], weighting, mask)
    cast = [x.astype(dtype), others[0].astype(dtype), *others[1:]]
    (y, dx, *dw), towers = on_shards(step, shards, *cast, weighting=weighting)
    for name, got, right in zip(("outputs", "input gradients"), (y, dx), expected, strict=False):
        assert_close(got, right.astype(dtype), bound, name)
    for gradient, right in zip(dw, expected[2:], strict=True):
        for tower in gradient:
            assert_close(tower, right.astype(dtype), bound, "weight gradient")
    for variable, right in zip(layer.weights, weights, strict=True):
        assert_close(variable.numpy(), right.astype(dtype), bound, variable.name)
    return layer, towers


def copies_of(towers, variable):
    return [c.numpy() for c in Replicated(towers).copies(variable)]


def collectives(towers, *batch):
    """How many operations between towers a traced step has, functions it calls included: (gathers, reductions)."""
    graph = towers.program(*batch).concrete.graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    assert not [n.op for n in nodes if n.op.startswith("Collective") and n.op[-2:] != "V2"]
    return tuple(sum(n.op == f"Collective{kind}V2" for n in nodes) for kind in ("Gather", "Reduce"))


# ---- merging


def parts_of(arrays, dtype="float64"):
    moments = [measure(tf.constant(a, dtype), 1) for a in arrays]
    return Moments(*[tf.stack(part) for part in zip(*moments, strict=True)])


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    mean=st.floats(-1e4, 1e4),
    std=st.floats(0.1, 10.0),
    apart=st.floats(0.0, 3.0),
    seed=st.integers(0, 99),
)
def test_merged_moments_are_those_of_the_whole_set(sizes, mean, std, apart, seed):
    arrays = [numbers((n, 3), [seed, i], mean + apart * std * i, std).astype("float32") for i, n in enumerate(sizes)]
    whole = np.concatenate(arrays).astype("float64")
    for dtype, bound in BOUNDS.items():
        merged = merge(parts_of(arrays, dtype))
        assert merged.count.numpy().tolist() == [len(whole)] * 3
        if len(whole):
            spread = np.maximum(whole.var(0), 1e-12)
            assert np.all(np.abs(merged.mean.numpy() - whole.mean(0)) <= bound * np.abs(whole).max())
            assert np.all(np.abs(merged.variance.numpy() - whole.var(0)) <= bound * spread)
        else:
            assert [*merged.mean.numpy(), *merged.variance.numpy()] == [0.0] * 6


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=3, max_size=6), cut=st.integers(1, 2))
def test_merging_in_two_stages_is_merging_at_once(sizes, cut):
    arrays = [numbers((n, 2), i, mean=1e3) for i, n in enumerate(sizes)]
    stages = [merge(parts_of(part)) for part in (arrays[:cut], arrays[cut:])]
    twice = merge(Moments(*[tf.stack(part) for part in zip(*stages, strict=True)]))
    once = merge(parts_of(arrays))
    np.testing.assert_allclose(twice.mean, once.mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(twice.variance, once.variance, rtol=1e-10, atol=1e-12)


def test_constant_numbers_have_no_variance_and_it_is_never_negative():
    for value in (0.1, 1000.1, 3e-7):
        variance = measure(tf.fill([37, 4], tf.constant(value)), 1).variance.numpy()
        assert np.all(variance >= 0)
        assert np.all(variance <= (1e-6 * value) ** 2)


def test_a_number_that_is_not_finite_is_not_hidden():
    x = numbers((6, 2)).astype("float32")
    x[3, 0], x[5, 1] = np.nan, np.inf
    moments = measure(tf.constant(x), 1)
    assert not np.isfinite(moments.mean.numpy()).any()
    assert np.isnan(moments.variance.numpy()).all()


# ---- precision


@functools.cache
def layer_on_towers(count):
    """A layer whose moving variance is the variance of the batch, and a step that has `count` towers find it."""
    layer = layer_of(functools.partial(BatchNormalization, momentum=0.0), (None, 8, 8, 5), "float32")
    return layer, mt.replicate(lambda x: layer(x, training=True), devices(count))


def hard_batch(mean, std, rows):
    """Rows with other statistics in every part of the batch, so that the towers' own means differ."""
    drift = std * np.linspace(-1, 1, rows)[:, None, None, None]
    return (numbers((rows, 8, 8, 5), mean=mean, std=std) + drift).astype("float32")


def errors_of(variance, x):
    return np.max(np.abs(variance.astype("float64") / np.var(x.astype("float64"), (0, 1, 2)) - 1))


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize(("mean", "std"), HARD)
def test_variance_is_right_whatever_the_mean_is(count, mean, std):
    layer, step = layer_on_towers(count)
    x = hard_batch(mean, std, 5 * count + 1)
    step(x)
    assert errors_of(layer.moving_variance.numpy(), x) <= 1e-5
    true_mean = x.astype("float64").mean((0, 1, 2))
    np.testing.assert_allclose(layer.moving_mean.numpy(), true_mean, rtol=2**-23, atol=1e-6)


@pytest.mark.parametrize(("mean", "std"), HARD[1:])
def test_control_mean_of_squares_minus_square_of_mean_is_wrong(mean, std):
    x = hard_batch(mean, std, 16)
    naive = tf.reduce_mean(tf.square(x), (0, 1, 2)) - tf.square(tf.reduce_mean(x, (0, 1, 2)))
    assert errors_of(naive.numpy(), x) > 1e-5


def test_variance_is_right_over_many_elements():
    """Where TensorFlow's own sum over 131072 rows at once, and Keras' variance with it, is 3e-5 to 1e-4 off."""
    x = numbers((128, 32, 32, 4), mean=1000.0, std=0.1).astype("float32")
    assert errors_of(measure(tf.constant(x), 3).variance.numpy(), x) <= 1e-6


# ---- equality with one device


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("weighting", Weighting)
def test_one_device_equality(shards, dtype, weighting):
    x, factors = numbers((sum(shards), 3, 4)), numbers((sum(shards), 3, 4), seed=1)
    layer, towers = assert_one_device(BatchNormalization, shards, x, factors, dtype=dtype, weighting=weighting)
    for variable in layer.weights:
        first, *others = copies_of(towers, variable)
        assert all(first.tobytes() == other.tobytes() for other in others)


KINDS = {
    "rank 2": (BatchNormalization, (7, 3)),
    "rank 5": (BatchNormalization, (5, 2, 3, 2, 4)),
    "axis 1": (functools.partial(BatchNormalization, axis=1), (5, 4, 3, 2)),
    "axis -2": (functools.partial(BatchNormalization, axis=-2), (5, 2, 3, 4)),
    "one channel": (BatchNormalization, (5, 3, 1)),
    "no gamma": (functools.partial(BatchNormalization, scale=False), (7, 3)),
    "no beta": (functools.partial(BatchNormalization, center=False), (7, 3)),
    "neither": (functools.partial(BatchNormalization, scale=False, center=False), (7, 3)),
    "synchronized": (functools.partial(BatchNormalization, synchronized=True), (7, 3)),
    "subclass": (OnlySuper, (7, 3)),
    "ours": (mt.BatchNormalization, (7, 3)),
    "renorm": pytest.param(functools.partial(BatchNormalization, **RENORM), (7, 3), marks=needs_renorm),
}


@pytest.mark.parametrize(("make", "shape"), KINDS.values(), ids=KINDS)
def test_kinds_of_layers_equal_one_device(make, shape):
    assert_one_device(make, (shape[0] - 2, 2), numbers(shape), numbers(shape, seed=1))


MASKS = {
    "some": [[1, 1, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1]],
    "none on tower 0": [[0, 0, 0], [0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1]],
    "none at all": [[0, 0, 0]] * 5,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_masked_elements_do_not_count(mask, dtype):
    mask = np.array(mask, bool)
    x = numbers((5, 3, 2), mean=3.0)
    assert_one_device(BatchNormalization, (2, 2, 1), x, numbers(x.shape, seed=1), mask, dtype=dtype, mask=True)


def test_masked_elements_may_be_anything():
    x, mask = numbers((4, 3, 2)), np.array([[1, 1, 0]] * 4, bool)
    statistics = []
    for masked in (0.0, np.nan):
        x[:, 2] = masked
        layer = layer_of(BatchNormalization, x.shape, "float64")
        on_shards(lambda x, mask, layer=layer: [layer(x, training=True, mask=mask)], (1, 3), x, mask)
        statistics.append([layer.moving_mean.numpy(), layer.moving_variance.numpy()])
    np.testing.assert_array_equal(*statistics)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_statistics_of_half_precision_inputs_are_float32(dtype):
    x = tf.cast(numbers((9, 4, 3), mean=30.0, std=1.0), dtype)
    policy = keras.DTypePolicy(f"mixed_{dtype}")
    layers = [layer_of(BatchNormalization, x.shape, policy) for _ in range(2)]
    expected = layers[0](x, training=True)
    (got,), _ = on_shards(lambda x: [layers[1](x, training=True)], (5, 4), x)
    assert got.dtype == expected.numpy().dtype
    spacing = 2**-10 if dtype == "float16" else 2**-7
    np.testing.assert_allclose(got.astype("float32"), tf.cast(expected, tf.float32), atol=8 * spacing)
    for one, many in zip(layers[0].weights, layers[1].weights, strict=True):
        assert_close(many.numpy(), one.numpy(), 1e-6, one.name)


def test_control_a_backward_pass_without_its_collective_is_wrong(monkeypatch):
    monkeypatch.setattr(norm, "shared_gradient", lambda gradient: gradient)
    with pytest.raises(AssertionError, match="input gradients"):
        assert_one_device(BatchNormalization, (3, 2), numbers((5, 3)), numbers((5, 3), seed=1), dtype="float32")


def test_control_towers_that_count_alike_are_wrong(monkeypatch):
    monkeypatch.setattr(norm, "merge", lambda parts: merge(parts._replace(count=tf.ones_like(parts.count))))
    with pytest.raises(AssertionError, match="outputs"):
        assert_one_device(BatchNormalization, (3, 2), numbers((5, 3)), numbers((5, 3), seed=1), dtype="float32")


def test_the_gradient_of_the_gradient_is_refused():
    layer = layer_of(BatchNormalization, (None, 3), "float32")

    def twice(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True) ** 3
            size = tf.reduce_sum(tape.gradient(y, x) ** 2)
        return [outer.gradient(size, x)]

    with pytest.raises(Exception, match=r"ModelError: .* can be differentiated once"):
        on_shards(twice, (3, 2), numbers((5, 3)).astype("float32"))


# ---- inside Trainer


def deep(**options):
    """Layers of all kinds in one model, one of them in a submodel, one of them frozen."""
    block = keras.Sequential([keras.layers.Conv2D(3, 2, name="conv"), BatchNormalization(**options)], name="block")
    model = keras.Sequential(
        [
            keras.Input((4, 4, 2)),
            BatchNormalization(axis=1),
            block,
            OnlySuper(),
            BatchNormalization(trainable=False),
            keras.layers.Flatten(),
            keras.layers.Dense(4, "tanh"),
            BatchNormalization(synchronized=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def fit(either):
    x, y = numbers((10, 4, 4, 2)).astype("float32"), numbers((10, 1), seed=1).astype("float32")
    history = either.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0)
    return [history, either.evaluate(x, y, verbose=0, batch_size=4), either.predict(x, verbose=0, batch_size=10)]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=slow), 3, pytest.param(4, marks=slow), pytest.param(8, marks=slow)]
)
def test_trainer_gives_unchanged_models_the_statistics_of_the_global_batch(count, tmp_path):
    _, trainer = check(deep, fit, count, bound=BOUNDS["float32"])
    assert_saved_model_is_that_of_one_device(trainer, tmp_path / "model.keras")


def test_trainer_with_statistics_of_shards_and_fewer_rows_than_towers(tmp_path):
    keras.utils.set_random_seed(1)
    trainer = mt.Trainer(deep(), devices(5), batch_norm="tower")
    history, *_ = fit(trainer)
    assert np.isfinite(history.history["loss"]).all()
    assert all(np.isfinite(v.numpy()).all() for v in trainer.model.variables)
    assert_copies_equal(trainer)
    assert_saved_model_is_that_of_one_device(trainer, tmp_path / "model.keras")


def assert_saved_model_is_that_of_one_device(trainer, path):
    """Towers evaluate and predict what the model does that one device loads."""
    x, y = numbers((10, 4, 4, 2)).astype("float32"), numbers((10, 1), seed=1).astype("float32")
    trainer.model.save(path)
    loaded = keras.models.load_model(path, custom_objects={"OnlySuper": OnlySuper})
    assert_close(loaded.evaluate(x, y, verbose=0, batch_size=4), trainer.evaluate(x, y, verbose=0, batch_size=4))
    assert_close(loaded.predict(x, verbose=0), trainer.predict(x, verbose=0, batch_size=10))


# ---- collectives


def stack_of(count, **options):
    layers = [layer_of(functools.partial(BatchNormalization, **options), (None, 3), "float32") for _ in range(count)]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for layer in layers:
                y = layer(y, training=True)
            loss = tf.reduce_mean(y**3)
        return tape.gradient(loss, [x, *[v.value for layer in layers for v in layer.trainable_variables]])

    return step


@pytest.mark.parametrize(("count", "weighting"), [(2, Weighting.LOSS), (8, Weighting.GRADIENT)])
@pytest.mark.parametrize(("batch_norm", "backward"), [("global", 1), ("tower", 0)])
def test_one_collective_forward_and_one_backward_for_each_layer(count, weighting, batch_norm, backward):
    x = tf.zeros([9, 3])
    for layers in (0, 1, 3):
        step = stack_of(layers)
        towers = TowerStep(step, devices(count), reduce="ring", weighting=weighting, batch_norm=batch_norm)
        assert collectives(towers, (x,)) == (layers, backward * layers)
        assert towers.traces == 1


def in_trainer(layers):
    """(gathers, reductions) of the train_step and of the test_step of a model with so many layers."""
    model = keras.Sequential([keras.Input((3,)), *[BatchNormalization() for _ in range(layers)], keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    batch = (tf.zeros([9, 3]), tf.zeros([9, 1]))
    steps = [
        TowerStep(s, devices(3), reduce="ring", weighting=Weighting.LOSS, autograph=False) for s in model_steps(model)
    ]
    return np.array([collectives(towers, (batch,)) for towers in steps])


def model_steps(model):
    return model.train_step, model.test_step


def test_keras_steps_have_one_and_one_more_for_each_layer_and_none_in_evaluate():
    assert (in_trainer(3) - in_trainer(1)).tolist() == [[2, 2], [0, 0]]


@pytest.mark.parametrize("batch_norm", ["global", "tower"])
@pytest.mark.parametrize(("training", "trainable"), [(False, True), (True, False), (None, True)])
def test_layers_that_do_not_train_are_plain_keras(batch_norm, training, trainable):
    layer = layer_of(functools.partial(BatchNormalization, trainable=trainable), (None, 3), "float32")
    before = [w.numpy() for w in layer.weights]
    x = numbers((5, 3)).astype("float32")
    expected = layer(x, training=training).numpy()
    (got,), towers = on_shards(lambda x: [layer(x, training=training)], (3, 2), x, batch_norm=batch_norm)
    np.testing.assert_array_equal(got, expected)
    assert collectives(towers, (tf.zeros([2]), Whole(tf.constant(x)))) == (0, 0)
    assert all(np.array_equal(w.numpy(), b) for w, b in zip(layer.weights, before, strict=True))


def test_keras_is_as_it_was_after_a_trace():
    before = dict(vars(BatchNormalization))
    for batch_norm in ("global", "tower"):
        TowerStep(stack_of(1), devices(2), batch_norm=batch_norm).program((tf.zeros([4, 3]),))
        assert dict(vars(BatchNormalization)) == before


# ---- batch_norm="tower"


def shard_by_shard(make, shards, x, factors):
    """What "tower" means, computed on one device in float64: (outputs, input gradients, weight gradients)."""
    results = []
    for own, factor in zip(np.split(x, np.cumsum(shards)[:-1]), np.split(factors, np.cumsum(shards)[:-1]), strict=True):
        if len(own):
            step = training_step(layer_of(make, x.shape, "float64"), sum(shards))
            results.append([r.numpy() for r in step(tf.constant(own), tf.constant(factor))])
    y, dx, *dw = zip(*results, strict=True)
    return [np.concatenate(y), np.concatenate(dx), *[np.sum(g, 0) for g in dw]]


TOWER_KINDS = {
    "plain": BatchNormalization,
    "no gamma or beta": functools.partial(BatchNormalization, scale=False, center=False),
    "renorm": pytest.param(functools.partial(BatchNormalization, **RENORM), marks=needs_renorm),
}


@pytest.mark.parametrize("make", TOWER_KINDS.values(), ids=TOWER_KINDS)
@pytest.mark.parametrize("shards", [(6, 2), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("weighting", Weighting)
def test_tower_uses_the_shard_for_outputs_and_the_batch_for_moving_statistics(make, shards, weighting):
    x, factors = numbers((sum(shards), 2, 3)), numbers((sum(shards), 2, 3), seed=1)
    layer = layer_of(make, x.shape, "float64")
    step = training_step(layer, len(x), weighting)
    (y, dx, *dw), towers = on_shards(step, shards, x, factors, weighting=weighting, batch_norm="tower")
    expected = shard_by_shard(make, shards, x, factors)
    for got, right in zip([y, dx, *[g[0] for g in dw]], expected, strict=True):
        assert_close(got, right, BOUNDS["float64"])
    _, weights = one_device(make, x, factors)
    for variable, right in zip(layer.weights, weights, strict=True):
        assert_close(variable.numpy(), right, BOUNDS["float64"], variable.name)
        first, *others = copies_of(towers, variable)
        assert all(first.tobytes() == other.tobytes() for other in others)


def test_control_tower_and_global_differ():
    x = numbers((5, 3))
    layer = layer_of(BatchNormalization, x.shape, "float64")
    step = training_step(layer, 5)
    (tower, *_), _ = on_shards(step, (3, 2), x, x, batch_norm="tower")
    (whole, *_), _ = on_shards(step, (3, 2), x, x)
    assert np.max(np.abs(tower - whole)) > 1e-2


def test_tower_pools_variances_of_shards_of_one_row():
    """Their own variances are 0, and inference would divide by √ε."""
    x = numbers((2, 3))
    layer = layer_of(functools.partial(BatchNormalization, momentum=0.0), x.shape, "float64")
    on_shards(lambda x: [layer(x, training=True)], (1, 1), x, batch_norm="tower")
    np.testing.assert_allclose(layer.moving_variance.numpy(), x.var(0), rtol=1e-12)


def test_tower_with_masks_and_a_tower_that_has_nothing():
    x, mask = numbers((4, 3, 2)), np.array(MASKS["none on tower 0"][:4], bool)
    layer = layer_of(BatchNormalization, x.shape, "float64")
    step = training_step(layer, 4, mask=True)
    results, _ = on_shards(step, (2, 2), x, numbers(x.shape, seed=1), mask, batch_norm="tower")
    assert all(np.isfinite(r).all() for r in results)
    _, weights = one_device(BatchNormalization, x, x, mask, mask=True)
    for variable, right in zip(layer.weights, weights, strict=True):
        assert_close(variable.numpy(), right, BOUNDS["float64"], variable.name)


def test_another_word_is_refused():
    with pytest.raises(mt.errors.ModelError, match="batch_norm='local' is unknown; expected 'global' or 'tower'"):
        mt.replicate(lambda x: x, devices(2), batch_norm="local")(tf.zeros([2, 1]))


def test_tower_calls_a_subclass_once():
    layer = layer_of(OnlySuper, (None, 3), "float64")
    calls = float(layer.calls.numpy())
    on_shards(lambda x: [layer(x, training=True)], (3, 2), numbers((5, 3)), batch_norm="tower")
    assert float(layer.calls.numpy()) == calls + 1


# ---- mt.BatchNormalization


def test_ours_outside_a_step_is_that_of_keras():
    x = numbers((5, 3)).astype("float32")
    layers = [layer_of(make, x.shape, "float32") for make in (mt.BatchNormalization, BatchNormalization)]
    ours, keras_own = (layer(x, training=True).numpy() for layer in layers)
    np.testing.assert_array_equal(ours, keras_own)
    for one, other in zip(*[layer.weights for layer in layers], strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_ours_is_global_where_the_rest_is_not():
    x = numbers((5, 3))
    layers = [layer_of(make, x.shape, "float64") for make in (mt.BatchNormalization, BatchNormalization)]
    (ours, theirs), _ = on_shards(lambda x: [y(x, training=True) for y in layers], (3, 2), x, batch_norm="tower")
    expected = layer_of(BatchNormalization, x.shape, "float64")(x, training=True).numpy()
    assert_close(ours, expected, BOUNDS["float64"])
    assert np.max(np.abs(theirs - expected)) > 1e-2


def test_ours_computes_the_variance_of_one_tower_in_the_same_way():
    x = numbers((128, 32, 32, 2), mean=1000.0, std=0.1).astype("float32")
    layer = layer_of(functools.partial(mt.BatchNormalization, momentum=0.0), x.shape, "float32")
    mt.replicate(lambda x: layer(x, training=True), devices(1))(x)
    assert errors_of(layer.moving_variance.numpy(), x) <= 1e-6


def test_ours_is_saved_and_loaded(tmp_path):
    def build():
        model = keras.Sequential([keras.Input((3,)), mt.BatchNormalization(momentum=0.7), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x, y = numbers((7, 3)).astype("float32"), numbers((7, 1)).astype("float32")
    plain, _ = twins(build)
    trainer = mt.Trainer(plain, devices(2), batch_norm="tower")
    trainer.fit(x, y, verbose=0)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is mt.BatchNormalization
    assert loaded.layers[0].momentum == 0.7
    assert_close(loaded.predict(x, verbose=0), plain.predict(x, verbose=0))


def test_ours_makes_its_variables_inside_a_step():
    layer = mt.BatchNormalization(epsilon=0.0)
    step = mt.replicate(lambda x: layer(x, training=True), devices(2))
    assert_close(step(np.array([[1.0], [3.0]], "float32")).numpy(), np.array([[-1.0], [1.0]], "float32"))


def test_ours_takes_the_arguments_of_keras():
    config = mt.BatchNormalization(axis=1, momentum=0.5, scale=False, name="own").get_config()
    assert (config["axis"], config["momentum"], config["scale"], config["name"]) == (1, 0.5, False, "own")
    assert isinstance(mt.BatchNormalization.from_config(config), mt.BatchNormalization)
    with pytest.raises((TypeError, ValueError), match="nonsense"):
        mt.BatchNormalization(nonsense=1)
