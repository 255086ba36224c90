"""Bad input: one clear error each, and the Trainer goes on working after it."""

import faulthandler
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import multitower
from multitower.errors import BatchError, DeviceError, ModelError
from oracle import assert_copies_equal, check_again, devices, model_of
from small_models import compiled, features, linear, momentum, numbers

COUNT = 3
X, Y = features(12), numbers(12)


@pytest.fixture(autouse=True)
def _never_hangs():
    """A tower that waits for another one for ever would keep the tests waiting, too."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def trainer():
    return multitower.Trainer(linear(), devices(COUNT))


def fit(trainer, x=X, y=Y, **options):
    return trainer.fit(x, y, **{"batch_size": 5, "shuffle": False, "verbose": 0, **options})


def works(trainer):
    """Whether the Trainer trains, and the towers agree."""
    start = trainer.model.get_weights()
    assert np.isfinite(fit(trainer).history["loss"]).all()
    assert_copies_equal(trainer)
    return not any(map(np.array_equal, start, trainer.model.get_weights()))


# What cannot become a Trainer.


def mirrored():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return compiled([keras.Input((6,)), layers.Dense(1)])


def uncompiled():
    return keras.Sequential([keras.Input((6,)), layers.Dense(1)])


MODELS = {
    "no model": (lambda: "model.keras", "got 'model.keras' of type str; expected a compiled keras.Model"),
    "a layer": (lambda: layers.Dense(1), "of type Dense; expected a compiled keras.Model"),
    "a class": (lambda: keras.Model, "of type type; expected a compiled keras.Model"),
    "not compiled": (uncompiled, r"is not compiled; call model.compile\(optimizer, loss\) first"),
    "eager": (
        lambda: linear(run_eagerly=True),
        "run_eagerly=True, and towers run in a graph; compile it with run_eagerly=F",
    ),
    "mirrored": (mirrored, "was made under MirroredStrategy; make it outside any tf.distribute strategy"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_trained_on_towers(name):
    make, message = MODELS[name]
    with pytest.raises(ModelError, match=message):
        multitower.Trainer(make(), devices(2))


@pytest.mark.parametrize("spec", ["TPU:0", "GPU:0", "cpu:9", ["CPU:0", "CPU:9"], "all of them", 0, [], 3.5])
def test_devices_that_are_not_there(spec):
    with pytest.raises(DeviceError):
        multitower.Trainer(linear(), spec)


def test_unknown_batch_norm():
    with pytest.raises(ModelError, match="batch_norm='local' is unknown; expected 'global' or 'tower'"):
        multitower.Trainer(linear(), devices(2), batch_norm="local")


def test_a_model_that_is_compiled_for_eager_steps_later():
    trainer = multitower.Trainer(linear(), devices(COUNT))
    trainer.model.compile(momentum(), "mse", run_eagerly=True)
    with pytest.raises(ModelError, match="run_eagerly"):
        fit(trainer)
    trainer.model.compile(momentum(), "mse")
    assert works(trainer)


# Batches that cannot be split.


def unknown_rows(*batches):
    """A dataset whose numbers of rows show when it runs only."""
    return tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=(tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1]))
    )


def generator(*batches):
    yield from batches


EMPTY = (X[:0], Y[:0])
NO_ROWS = "the batch has no rows; expected at least one row: leave empty batches out of the data"
UNEQUAL = "tensors of one batch have different numbers of rows; expected one row of every tensor for each row"
AMBIGUOUS = "Data cardinality is ambiguous"  # Keras sees arrays before we do

BATCHES = {
    "arrays without rows": (lambda: EMPTY, BatchError, "x has no rows: .* shape \\(0, 6\\); expected at least one row"),
    "dataset without rows": (lambda: (unknown_rows(EMPTY), None), BatchError, NO_ROWS),
    "dataset known to have no rows": (lambda: (tf.data.Dataset.from_tensors(EMPTY), None), BatchError, NO_ROWS),
    "generator without rows": (lambda: (generator(EMPTY), None), BatchError, NO_ROWS),
    "empty batch after others": (lambda: (unknown_rows((X, Y), EMPTY), None), BatchError, NO_ROWS),
    "arrays of different lengths": (lambda: (X, Y[:5]), ValueError, AMBIGUOUS),
    "weights of another length": (lambda: (X, Y, np.ones(5)), ValueError, AMBIGUOUS),
    "dataset of different lengths": (lambda: (unknown_rows((X, Y[:5])), None), BatchError, UNEQUAL),
    "generator of different lengths": (lambda: (generator((X, Y[:5])), None), BatchError, UNEQUAL),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_cannot_be_split(name, trainer):
    make, error, message = BATCHES[name]
    x, y, *weights = make()
    start = trainer.model.get_weights()
    with pytest.raises(error, match=message):
        fit(trainer, x, y, batch_size=None, sample_weight=weights[0] if weights else None)
    untouched = all(map(np.array_equal, start, trainer.model.get_weights()))
    assert untouched == (name != "empty batch after others")
    assert works(trainer)


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch"])
@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:0], Y[:0], "the batch has no rows: received tensors of shape"),
        (X, Y[:5], "different numbers of rows: 12, 5;"),
        ([[1.0]], [[1.0]], "no tensor with rows to split"),
    ],
)
def test_single_batches_that_cannot_be_split(method, x, y, message, trainer):
    with pytest.raises(BatchError, match=message):
        getattr(trainer, method)(x, y)
    assert works(trainer)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_arrays_without_rows_have_no_results(method, trainer):
    with pytest.raises(BatchError, match="x has no rows"):
        getattr(trainer, method)(X[:0], verbose=0)
    assert works(trainer)


def test_validation_data_without_rows(trainer):
    with pytest.raises(BatchError, match="validation_data has no rows"):
        fit(trainer, validation_data=EMPTY)
    assert works(trainer)


@pytest.mark.parametrize(
    "source",
    [
        lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)},
        lambda: {"x": generator((X, Y), (X[:2], Y[:2]))},
        lambda: {"x": X, "y": Y, "batch_size": 5},
    ],
    ids=["dataset", "generator", "arrays"],
)
def test_data_that_ends_early(source):
    """Keras warns and trains on what there was; so does the Trainer."""

    def train(either):
        with pytest.warns(UserWarning, match="ran out of data"):
            history = either.fit(**source(), steps_per_epoch=5, epochs=2, shuffle=False, verbose=0)
        # Both may count a step more in every epoch: the graph adds 1 before it finds that there is no batch.
        model_of(either).optimizer.iterations.assign(0)
        return history

    check_again(linear, train, COUNT)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch"])
def test_unknown_arguments(method, trainer):
    with pytest.raises((TypeError, ValueError), match="epoch"):
        getattr(trainer, method)(X, epoch=3)
    assert works(trainer)


# Towers that fail.


class RefusesLargeNumbers(layers.Layer):
    """Raises where the rows it sees say so: on one tower, if only that one has such rows."""

    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 100.0, message="a number is too large")]):
            return tf.identity(x)


@pytest.mark.parametrize("position", [0, 7, 11])
def test_one_tower_raises(position):
    """The first, a middle or the last tower: the step ends at once with its error, and the next one works."""
    trainer = picky_trainer()
    x = X.copy()
    x[position] = 1000.0
    for call in (lambda: fit(trainer, x, batch_size=12), lambda: trainer.predict(x, batch_size=12, verbose=0)):
        start = time.perf_counter()
        with pytest.raises(tf.errors.InvalidArgumentError, match="a number is too large"):
            call()
        assert time.perf_counter() - start < 20  # an ordinary step takes some milliseconds, a first trace seconds
        assert works(trainer)


_picky = []


def picky_trainer():
    if not _picky:
        model = compiled([keras.Input((6,)), RefusesLargeNumbers(), layers.BatchNormalization(), layers.Dense(1)])
        _picky.append(multitower.Trainer(model, devices(COUNT)))
        fit(_picky[0])
    return _picky[0]


class WrongRows(layers.Layer):
    """An output with two rows for each row of the batch."""

    def call(self, x):
        return tf.concat([x, x], 0)


def test_outputs_that_are_not_rows():
    trainer = multitower.Trainer(compiled([keras.Input((6,)), WrongRows(), layers.Dense(1)]), devices(COUNT))
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not have one row for each row of the batch"):
        fit(trainer)


class RaisesWhileTraced(layers.Layer):
    broken = True

    def call(self, x):
        if self.broken:
            raise RuntimeError("this layer is broken")
        return x


def test_a_layer_that_raises_while_it_is_traced():
    """Keras is left as it was: neither the plain model nor the next trace sees anything of it."""
    trainer = multitower.Trainer(compiled([RaisesWhileTraced(), layers.Dense(1)]), devices(COUNT))
    update = keras.Metric.update_state
    with pytest.raises(RuntimeError, match="this layer is broken"):
        fit(trainer)
    assert keras.Metric.update_state is update
    assert multitower.tower_count() == 1
    trainer.model.layers[0].broken = False
    assert works(trainer)
