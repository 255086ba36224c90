"""Canaries: what multitower takes from TensorFlow and Keras without its being public API, see upstream.py."""

import inspect

import keras
import pytest
import tensorflow as tf
from keras.layers import BatchNormalization

from multitower import norm, upstream

MOMENTS = upstream.batch_norm_moments_name()


def test_batch_norm_moments_take_inputs_and_mask():
    assert list(inspect.signature(getattr(BatchNormalization, MOMENTS)).parameters) == ["self", "inputs", "mask"]
    assert MOMENTS in vars(BatchNormalization)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_batch_norm_uses_its_moments_in_training_and_gives_them_float32_at_least(monkeypatch, dtype):
    calls = []

    def moments(layer, inputs, mask):
        calls.append((inputs.dtype, mask))
        return tf.ones([2], inputs.dtype), tf.fill([2], tf.constant(4.0, inputs.dtype))

    monkeypatch.setattr(BatchNormalization, MOMENTS, moments)
    layer = BatchNormalization(momentum=0.5, epsilon=0.0, dtype=dtype)
    outputs = layer(tf.constant([[3.0, 5.0]], dtype), training=True)
    assert calls == [(tf.float64 if dtype == "float64" else tf.float32, None)]
    assert outputs.numpy().tolist() == [[1.0, 2.0]]
    assert layer.moving_mean.numpy().tolist() == [0.5, 0.5]
    assert layer.moving_variance.numpy().tolist() == [2.5, 2.5]


@pytest.mark.parametrize(("trainable", "training"), [(True, False), (False, True)])
def test_batch_norm_asks_for_no_moments_when_it_does_not_train(monkeypatch, trainable, training):
    monkeypatch.setattr(BatchNormalization, MOMENTS, None)
    layer = BatchNormalization(trainable=trainable)
    assert layer(tf.ones([1, 2]), training=training).shape == (1, 2)


def test_batch_norm_keeps_the_statistics_we_know_and_no_others():
    options = {"renorm": True} if "renorm" in inspect.signature(BatchNormalization).parameters else {}
    layer = BatchNormalization(**options)
    layer.build((None, 2))
    known = {id(getattr(layer, name)) for name in norm._STATISTICS if hasattr(layer, name)}
    assert {id(v) for v in layer.non_trainable_variables} == known


def test_batch_norm_divides_masked_sums_by_the_count_and_epsilon():
    layer = BatchNormalization(momentum=0.0, dtype="float64")
    mask = tf.constant([[True], [True], [False]])
    layer(tf.constant([[[1.0]], [[3.0]], [[9.0]]], tf.float64), training=True, mask=mask)
    assert layer.moving_mean.numpy() == pytest.approx(4 / (2 + keras.config.epsilon()), rel=1e-12)


def test_keras_keeps_masks_where_we_look():
    outputs = keras.layers.Masking()(tf.constant([[[1.0], [0.0]]]))
    assert upstream.keras_mask(outputs).numpy().tolist() == [[True, False]]
    assert upstream.keras_mask(tf.ones([1])) is None
    other = tf.ones([1, 2, 1])
    upstream.set_keras_mask(other, tf.constant([[False, True]]))
    assert upstream.keras_mask(other).numpy().tolist() == [[False, True]]


def test_compile_makes_a_new_loss_tracker():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    first = upstream.made_by_compile(model)
    assert upstream.made_by_compile(model) is first
    model.compile("sgd", "mse")
    assert upstream.made_by_compile(model) is not first


def test_an_optimizer_keeps_its_learning_rate_where_we_look():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    assert upstream.learning_rate_of(keras.optimizers.SGD(schedule)) is schedule
    rate = upstream.learning_rate_of(keras.optimizers.SGD(0.25))
    assert isinstance(rate, keras.Variable)
    assert float(rate.numpy()) == 0.25
    callback = upstream.learning_rate_of(keras.optimizers.SGD(lambda: 0.5))
    assert callback() == 0.5


def test_autograph_converts_methods():
    class Sign:
        def of(self, x):
            if x > 0:
                return 1
            return -1

    sign = upstream.with_autograph(Sign().of)
    assert int(tf.function(lambda x: sign(x), autograph=False)(tf.constant(-3.0))) == -1


def test_a_tf_function_knows_its_python_function():
    def plain(x):
        return x

    assert upstream.python_function(tf.function(plain)) is plain
    assert upstream.python_function(plain) is plain


def test_checkpoints_restore_through_the_method_we_watch(tmp_path):
    calls = []
    variable = tf.Variable(1.0)
    path = tf.train.Checkpoint(v=variable).write(str(tmp_path / "c"))
    restore = getattr(variable, upstream.restore_method_name())
    setattr(variable, upstream.restore_method_name(), lambda tensors: (calls.append(1), restore(tensors))[1])
    tf.train.Checkpoint(v=variable).restore(path)
    assert calls


def test_graphs_of_functions_are_shown_while_they_are_instantiated():
    @tf.function
    def two_devices(x):
        with tf.device("CPU:1"):
            y = tf.matmul(x, x, name="there")
        with tf.device("CPU:0"):
            return tf.cumsum(y, name="here")

    x = tf.ones([2, 2])
    upstream.collect_graphs()
    two_devices(x)
    (graphs,) = upstream.collected_graphs()
    devices = {node.op: node.device[-5:] for graph in graphs for node in graph.node}
    assert (devices["MatMul"], devices["Cumsum"]) == ("CPU:1", "CPU:0")
    assert {"_Send", "_Recv"} <= devices.keys()
    keys = [node.attr["tensor_name"].s for graph in graphs for node in graph.node if node.op in ("_Send", "_Recv")]
    assert len(keys) == 2 * len(set(keys))
    assert upstream.collected_graphs() == []


def test_a_profile_tells_what_the_executor_ran(tmp_path):
    dataset = iter(tf.data.Dataset.range(9))

    @tf.function
    def step(iterator):
        return tf.tanh(tf.cast(iterator.get_next(), tf.float32), name="known")

    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2)
    with tf.profiler.experimental.Profile(str(tmp_path), options):
        step(dataset)
        step(dataset)
    space = upstream.read_profile(next(tmp_path.rglob("*.xplane.pb")))
    (host,) = (plane for plane in space.planes if plane.name.startswith("/host:CPU"))
    told: dict = {}
    for event in (event for line in host.lines for event in line.events):
        name = host.event_metadata[event.metadata_id].name
        told.setdefault(name, set()).update(host.stat_metadata[s.metadata_id].name for s in event.stats)
    assert "known:Tanh" in told
    assert "id" in told[upstream.FUNCTION_RUN] & told[upstream.EXECUTOR]
    assert {"name", "step_id"} <= told[upstream.ASYNC_START] & told[upstream.ASYNC_DONE]


def test_global_seed_generator():
    """keras.src.random.seed_generator.global_seed_generator: what keras.random draws from, and set_random_seed sets."""
    keras.utils.set_random_seed(3)
    generator = upstream.global_seed_generator()
    before = generator.state.numpy().tolist()
    keras.random.normal((2,))
    assert upstream.global_seed_generator() is generator
    assert generator.state.numpy().tolist() != before


def test_weight_averages():
    """Optimizer._model_variables_moving_average: the variables that follow the weights, in their order."""
    weights = [keras.Variable([1.0, 2.0]), keras.Variable([[3.0]])]
    plain, averaging = keras.optimizers.SGD(), keras.optimizers.SGD(use_ema=True)
    for optimizer in (plain, averaging):
        optimizer.build(weights)
    assert upstream.weight_averages(plain) == []
    averages = upstream.weight_averages(keras.optimizers.LossScaleOptimizer(averaging))
    assert [a.shape for a in averages] == [w.shape for w in weights]
    assert {id(a) for a in averages} <= {id(v) for v in averaging.variables}
