"""Every kind of data and every argument that keras.Model takes: the Trainer gives what plain Keras gives."""

import re

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf
from keras import layers

from oracle import check, check_again, model_of
from small_models import (
    built,
    classes,
    compiled,
    cross_entropy,
    features,
    functional,
    linear,
    momentum,
    named,
    numbers,
    regression,
)

COUNT = 3
ROWS, BATCH = 23, 5
X, Y = features(ROWS), numbers(ROWS)
WEIGHTS = np.linspace(0, 2, ROWS, dtype="float32")


def batches(*arrays):
    """What a generator of batches yields, the last one short."""
    return [tuple(a[i : i + BATCH] for a in arrays) for i in range(0, ROWS, BATCH)]


def generator(*arrays, epochs=1):
    yield from batches(*arrays) * epochs


def dataset(*arrays, **options):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, **options)


def always(*_):
    """A filter that keeps all, and takes from a dataset that it knows its length."""
    return True


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(batches(X, Y))

    def __getitem__(self, i):
        return batches(X, Y)[i]


# What x may be: each a function that makes the arguments of fit, anew for every fit.

SOURCES = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "tensors": lambda: {"x": tf.constant(X), "y": tf.constant(Y), "batch_size": BATCH},
    "frames": lambda: {"x": pandas.DataFrame(X), "y": pandas.Series(Y[:, 0]), "batch_size": BATCH},
    "float64": lambda: {"x": X.astype("float64"), "y": Y.astype("float64"), "batch_size": BATCH},
    "default batch size": lambda: {"x": np.tile(X, [4, 1]), "y": np.tile(Y, [4, 1])},
    "weights": lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS, "batch_size": BATCH},
    "dataset": lambda: {"x": dataset(X, Y)},
    "dataset with weights": lambda: {"x": dataset(X, Y, WEIGHTS)},
    "dataset of full batches": lambda: {"x": dataset(X, Y, drop_remainder=True)},
    "endless dataset": lambda: {"x": dataset(X, Y).repeat(), "steps_per_epoch": 4},
    "PyDataset": lambda: {"x": Batches(workers=0)},
    "PyDataset with a worker": lambda: {"x": Batches(workers=1)},
    "generator": lambda: {"x": generator(X, Y, epochs=2), "steps_per_epoch": 5},
    "generator with weights": lambda: {"x": generator(X, Y, WEIGHTS, epochs=2), "steps_per_epoch": 5},
}


def fit(either, epochs=2, **arguments):
    """Not shuffled: Keras warns where it cannot, and what it can shuffle must come in the same order twice."""
    return either.fit(**arguments, shuffle=False, epochs=epochs, verbose=0)


@pytest.mark.parametrize("source", SOURCES)
def test_fit_takes(source):
    check_again(linear, lambda m: fit(m, **SOURCES[source]()), COUNT)


def test_one_trace_serves_every_source():
    """Batches differ in size, and in whether their size is known; those with weights are another kind of batch."""
    _, trainer = check_again(linear, lambda m: fit(m, **SOURCES["arrays"]()), COUNT)
    for source in ("tensors", "default batch size", "dataset", "dataset of full batches", "endless dataset"):
        before = trainer.traces["train_step"]
        check_again(linear, lambda m, source=source: fit(m, **SOURCES[source]()), COUNT)
        assert trainer.traces["train_step"] == before, source


@pytest.mark.parametrize(
    "source",
    [
        lambda: {"x": dataset(X, Y).filter(always)},
        pytest.param(lambda: {"x": generator(X, Y), "epochs": 1}, marks=pytest.mark.slow),
    ],
    ids=["dataset", "generator"],
)
def test_fit_takes_data_whose_end_nobody_knows(source):
    def train(either):
        with pytest.warns(UserWarning, match="ran out of data"):
            history = fit(either, **source())
        # Both may count a step more in every epoch: the graph adds 1 before it finds that there is no batch.
        model_of(either).optimizer.iterations.assign(0)
        return history

    check_again(linear, train, COUNT)


def two_inputs():
    left, right = keras.Input((6,)), keras.Input((6,))
    model = keras.Model([left, right], layers.Dense(1)(layers.Concatenate()([left, right])))
    model.compile(momentum(), "mse")
    return built(model, [X[:1], X[:1]])


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": [X, X[::-1]], "y": Y, "batch_size": BATCH},
        {"x": (X, X[::-1]), "y": Y, "batch_size": BATCH},
        {"x": dataset((X, X[::-1]), Y)},
    ],
    ids=["list", "tuple", "dataset"],
)
def test_fit_takes_several_inputs(arguments):
    check_again(two_inputs, lambda m: fit(m, **arguments), COUNT)


@pytest.mark.parametrize(
    "arguments",
    [{**named(ROWS), "batch_size": BATCH}, {"x": dataset(*named(ROWS).values())}],
    ids=["arrays", "dataset"],
)
def test_fit_takes_dicts(arguments):
    check_again(functional, lambda m: fit(m, **arguments), COUNT)


def test_fit_takes_the_same_batches_in_the_same_shuffled_order():
    def train(either):
        keras.utils.set_random_seed(3)
        return either.fit(X, Y, batch_size=BATCH, shuffle=True, epochs=2, verbose=0)

    check_again(linear, train, COUNT)


class MeanOfRagged(keras.Model):
    """Rows of different lengths, as they are: a keras.Model takes ragged tensors where its call does."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(tf.reduce_mean(x, axis=1)[:, None])


def ragged_model():
    model = MeanOfRagged()
    model.compile(momentum(), "mse")
    return model


def test_fit_takes_ragged_rows():
    rows = tf.RaggedTensor.from_row_lengths(features(ROWS * 2).ravel(), np.repeat([12], ROWS) + np.arange(ROWS) - 11)
    data = tf.data.Dataset.from_tensor_slices((rows, Y)).ragged_batch(BATCH)
    check(ragged_model, lambda m: fit(m, x=data), COUNT)


# The arguments of fit.

FIT = {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False, "verbose": 0}
MORE = (features(11, 7), numbers(11, 8))

ARGUMENTS = {
    "validation_data": {"validation_data": MORE, "epochs": 2},
    "validation_data with weights": {"validation_data": (*MORE, np.linspace(0, 1, 11)), "epochs": 2},
    "validation_data as dataset": {"validation_data": tf.data.Dataset.from_tensor_slices(MORE).batch(4), "epochs": 2},
    "validation_steps": {"validation_data": MORE, "validation_steps": 2, "validation_batch_size": 3, "epochs": 2},
    "validation_split": {"validation_split": 0.3, "epochs": 2},
    "validation_freq": {"validation_data": MORE, "validation_freq": 2, "epochs": 3},
    "validation_freq as list": {"validation_data": MORE, "validation_freq": [1, 3], "epochs": 3},
    "initial_epoch": {"initial_epoch": 2, "epochs": 4},
    "steps_per_epoch": {"steps_per_epoch": 2, "epochs": 2},
    "no epoch": {"initial_epoch": 2, "epochs": 2},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_fit_arguments(name):
    check_again(linear, lambda m: m.fit(**FIT, **ARGUMENTS[name]), COUNT)


def test_class_weight_of_a_dataset():
    data = dataset(X, classes(ROWS))
    weights = {0: 0.2, 1: 1.0, 2: 3.0}
    check(
        lambda: compiled([layers.Dense(3)], loss=cross_entropy(), weighted_metrics=["accuracy"]),
        lambda m: fit(m, x=data, class_weight=weights),
        COUNT,
    )


def test_arguments_by_position():
    check_again(linear, lambda m: m.fit(X, Y, BATCH, 2, 0, None, 0.2, None, False), COUNT)


class Steps(keras.callbacks.Callback):
    """Which steps Keras reports, and with which logs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, dict(logs)))

    on_test_batch_end = on_train_batch_end

    def on_predict_batch_end(self, batch, logs=None):
        self.seen.append((batch, np.asarray(logs["outputs"])))


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("source", ["arrays", pytest.param("generator", marks=pytest.mark.slow)])
def test_steps_per_execution(steps, source):
    """Five batches in executions of three: the last execution has two."""
    seen = {}

    def train(either):
        callback = Steps()
        fit(either, **SOURCES[source](), callbacks=[callback])
        either.evaluate(X, Y, batch_size=BATCH, verbose=0, callbacks=[callback])
        either.predict(X, batch_size=BATCH, verbose=0, callbacks=[callback])
        seen[either is model_of(either)] = [batch for batch, _ in callback.seen]
        return callback.seen

    check(lambda: linear(steps_per_execution=steps), train, COUNT)
    assert seen[True] == seen[False]
    assert len(seen[False]) == (20 if steps == 1 else 8)


def test_steps_per_execution_of_data_whose_end_nobody_knows():
    """Six batches are two whole executions: the end is found by a third one that has no batch at all."""
    data = dataset(*regression(6 * BATCH).values()).filter(always)

    def train(either):
        with pytest.warns(UserWarning, match="ran out of data"):
            return fit(either, x=data)

    check(lambda: linear(steps_per_execution=3), train, COUNT)


# What is printed.


def shape_of(output):
    """The kinds of lines, without colours, numbers, times, padding and what Keras prints when 50 ms have gone by."""
    text = re.sub(r"\x1b\[\d+m|\x08", "", output)
    bars = [line.strip() for line in text.splitlines() if not re.search(r"\b([1-4])/(?!\1\b)\d+ ━", line)]
    plain = [re.sub(r"\d+", "0", re.sub(r"\d+(ms|us|s)\b", "0s", line)) for line in bars if line]
    return "\n".join(dict.fromkeys(plain))


@pytest.mark.parametrize("verbose", [0, 1, 2, "auto"])
def test_progress(verbose, capsys):
    def text(either):
        either.fit(X, Y, batch_size=BATCH, epochs=2, validation_data=MORE, verbose=verbose)
        either.evaluate(X, Y, batch_size=BATCH, verbose=verbose)
        either.predict(X, batch_size=BATCH, verbose=verbose)
        return shape_of(capsys.readouterr().out)

    _, trainer = check_again(linear, text, COUNT)
    printed = text(trainer)
    assert ("Epoch 0/0" in printed and "val_loss" in printed) if verbose else printed == ""


# evaluate and predict.


@pytest.mark.parametrize("source", ["arrays", "weights", "frames", "dataset", "PyDataset", "generator"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_evaluate(source, as_dict):
    def look(either):
        arguments = SOURCES[source]()
        steps = arguments.pop("steps_per_epoch", None)
        return either.evaluate(**arguments, steps=steps, return_dict=as_dict, verbose=0)

    check_again(measured, look, COUNT)


def measured():
    return linear(metrics=["mae"], weighted_metrics=["mse"])


def test_evaluate_returns_a_number_where_there_is_no_metric():
    check_again(linear, lambda m: m.evaluate(X, Y, verbose=0), COUNT)


def test_evaluate_of_several_outputs():
    data = named(ROWS)
    check_again(functional, lambda m: m.evaluate(**data, batch_size=BATCH, verbose=0), COUNT)
    check_again(functional, lambda m: m.evaluate(**data, batch_size=BATCH, verbose=0, return_dict=True), COUNT)


PREDICTED = {
    "arrays": lambda: {"x": X, "batch_size": BATCH},
    "default batch size": lambda: {"x": np.tile(X, [3, 1])},
    "frame": lambda: {"x": pandas.DataFrame(X), "batch_size": BATCH},
    "dataset": lambda: {"x": dataset(X)},
    "dataset with targets": lambda: {"x": dataset(X, Y)},
    "PyDataset": lambda: {"x": Batches(workers=0)},
    "generator": lambda: {"x": generator(X, Y), "steps": 5},
    "steps": lambda: {"x": dataset(X).repeat(), "steps": 7},
    "one row": lambda: {"x": X[:1]},
}


@pytest.mark.parametrize("source", PREDICTED)
def test_predict(source):
    check_again(linear, lambda m: m.predict(**PREDICTED[source](), verbose=0), COUNT)


def test_predict_gives_all_rows_in_order():
    _, trainer = check_again(linear, lambda m: m.predict(X, batch_size=BATCH, verbose=0), COUNT)
    weights, bias = trainer.model.get_weights()
    np.testing.assert_allclose(trainer.predict(X, batch_size=BATCH, verbose=0), X @ weights + bias, rtol=1e-5)


def test_predict_of_dicts():
    x = named(ROWS)["x"]
    check_again(functional, lambda m: m.predict(x, batch_size=BATCH, verbose=0), COUNT)
    check_again(functional, lambda m: m.predict(dataset(x), verbose=0), COUNT)


# One batch at a time.


@pytest.mark.parametrize("build", [linear, measured])
@pytest.mark.parametrize("as_dict", [False, True])
def test_batch_by_batch(build, as_dict):
    """Numbers, lists and dicts, as plain Keras returns them; batches of 7, of 2 (fewer than towers) and of 5 rows."""

    def train(either):
        results = []
        for start, end in ((0, 7), (7, 9), (9, 14)):
            x, y, weights = X[start:end], Y[start:end], WEIGHTS[start:end]
            results += [
                either.train_on_batch(x, y, return_dict=as_dict),
                either.train_on_batch(x, y, weights, return_dict=as_dict),
                either.test_on_batch(x, y, return_dict=as_dict),
                either.test_on_batch(x, y, weights, return_dict=as_dict),
                either.predict_on_batch(x),
            ]
        return results

    _, trainer = check_again(build, train, COUNT)
    traces = trainer.traces
    train(trainer)
    assert trainer.traces == traces


def test_batch_by_batch_with_class_weight():
    weights = {0: 0.2, 1: 1.0, 2: 3.0}
    check(
        lambda: compiled([layers.Dense(3)], loss=cross_entropy(), metrics=["accuracy"]),
        lambda m: [m.train_on_batch(X[i : i + 4], classes(ROWS)[i : i + 4], class_weight=weights) for i in (0, 4, 8)],
        COUNT,
    )


def test_batch_by_batch_of_dicts():
    data = named(7)

    def train(either):
        logs = either.train_on_batch(**data), either.test_on_batch(**data)
        # Plain Keras counts the rows of a batch for the loss of an output if they are known when it traces, else one.
        model_of(either).reset_metrics()
        return *logs, either.predict_on_batch(data["x"])

    check_again(functional, train, COUNT)


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"])
def test_signatures_are_those_of_keras(name):
    import inspect

    import multitower

    assert inspect.signature(getattr(multitower.Trainer, name)) == inspect.signature(getattr(keras.Model, name))
