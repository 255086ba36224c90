"""Callbacks and whatever else touches the model between steps: it reaches every tower, and the model stays plain."""

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf
from keras import callbacks, layers

import multitower
from oracle import assert_copies_equal, assert_same_state, check, check_again, devices, model_of, twins
from small_models import compiled, features, linear, momentum, numbers, own_loss, sequential

COUNT = 3
X, Y = features(17), numbers(17)
VALIDATION = (features(9, 7), numbers(9, 8))


def fit(either, *called, epochs=3, **arguments):
    return either.fit(
        X, Y, batch_size=5, shuffle=False, epochs=epochs, verbose=0, callbacks=list(called) or None, **arguments
    )


def adaptive():
    """Adam: its slots have to be saved and loaded as well."""
    return linear(keras.optimizers.Adam(0.05))


# Keras' own callbacks.


def test_model_checkpoint_continues_as_a_plain_model(tmp_path):
    """The file holds no trace of towers: plain Keras loads it, with slots and step, and goes on."""

    def train(either):
        file = tmp_path / f"{type(either).__name__}.keras"
        history = fit(either, callbacks.ModelCheckpoint(file), epochs=2)
        loaded = keras.models.load_model(file)
        return history, fit(loaded), loaded.get_weights()

    check_again(adaptive, train, COUNT)


def test_model_checkpoint_within_an_epoch(tmp_path):
    """save_freq counts batches: the weights of that moment are saved."""

    def train(either):
        file = tmp_path / f"{type(either).__name__}.weights.h5"
        fit(either, callbacks.ModelCheckpoint(file, save_weights_only=True, save_freq=3), epochs=1)
        loaded = linear()
        loaded.load_weights(file)
        return loaded.get_weights()

    check_again(linear, train, COUNT)


def test_early_stopping_restores_the_best_weights():
    """The third epoch and those after it spoil what the first two have learned."""

    def train(either):
        called = (
            callbacks.EarlyStopping(patience=1, restore_best_weights=True),
            callbacks.LearningRateScheduler(lambda epoch: 0.02 if epoch < 2 else 0.3),
        )
        history = fit(either, *called, epochs=9, validation_data=VALIDATION)
        assert 2 < len(history.epoch) < 9
        return history, rate_put_back(either), fit(either, epochs=1)

    check_again(linear, train, COUNT)


KERAS = {
    "ReduceLROnPlateau": lambda: callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10),
    "LearningRateScheduler": lambda: callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
    "TerminateOnNaN": callbacks.TerminateOnNaN,
    "LambdaCallback": lambda: callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None),
}


@pytest.mark.parametrize("name", KERAS)
def test_keras_callbacks(name):
    check_again(linear, lambda m: (fit(m, KERAS[name]()), rate_put_back(m)), COUNT)


def rate_put_back(either):
    """The twins serve other tests: the learning rate is no variable of theirs."""
    rate = float(model_of(either).optimizer.learning_rate)
    model_of(either).optimizer.learning_rate = 0.05
    return rate


def test_csv_logger(tmp_path):
    def train(either):
        file = tmp_path / f"{type(either).__name__}.csv"
        fit(either, callbacks.CSVLogger(file), validation_data=VALIDATION)
        return pandas.read_csv(file).to_dict("list")

    check_again(linear, train, COUNT)


def test_tensorboard(tmp_path):
    """Scalars of every epoch and step and the histograms of the weights are written."""

    def train(either):
        directory = tmp_path / type(either).__name__
        fit(either, callbacks.TensorBoard(directory, histogram_freq=1, update_freq=1), validation_data=VALIDATION)
        return sorted((file.parent.name, *tags(file)) for file in directory.rglob("events*"))

    check_again(linear, train, COUNT)


def tags(file):
    """The summaries in an event file, in order."""
    records = tf.data.TFRecordDataset(str(file))
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in records]
    return [(event.step, value.tag.split("/")[-1]) for event in events for value in event.summary.value]


def test_swap_ema_weights():
    """During validation the model has the moving averages, while it trains its own weights."""

    def train(either):
        return fit(either, callbacks.SwapEMAWeights(swap_on_epoch=True), validation_data=VALIDATION)

    check(lambda: linear(momentum(use_ema=True, ema_momentum=0.8)), train, COUNT)


class InterruptedTrainingError(Exception):
    pass


class InterruptsEpoch(callbacks.Callback):
    """Somebody pulls the plug in the second batch of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch, self.now = epoch, False

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch == self.epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.now and batch == 1:
            raise InterruptedTrainingError


@pytest.mark.parametrize("resumed_on", [1, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_backup_and_restore(tmp_path, resumed_on):
    """Interrupted on three towers, resumed by another Trainer, on other devices too: as plain Keras resumes."""
    resumed = {}
    for name in ("plain", "towers"):
        keras.utils.set_random_seed(1)
        first, second = adaptive(), adaptive()
        if name == "towers":
            first = multitower.Trainer(first, devices(COUNT))
            second = multitower.Trainer(second, devices(resumed_on))
        with pytest.raises(InterruptedTrainingError):
            fit(first, callbacks.BackupAndRestore(tmp_path / name), InterruptsEpoch(2), epochs=4)
        history = fit(second, callbacks.BackupAndRestore(tmp_path / name), epochs=4)
        assert history.epoch == [2, 3]
        resumed[name] = second
    assert_same_state(resumed["towers"], resumed["plain"])


# Callbacks that users write.


class Halves(callbacks.Callback):
    """Weights are changed between two steps."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            for variable in self.model.trainable_variables:
                variable.assign(variable * 0.5)


class Sets(callbacks.Callback):
    """Likewise, by set_weights; momentum is set back, too."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.model.set_weights([w + 0.1 for w in self.model.get_weights()])
            for variable in self.model.optimizer.variables:
                if "momentum" in variable.path:
                    variable.assign(variable * 0)


class HalvesInGraph(callbacks.Callback):
    """Weights are changed by a graph, where no Python call of assign shows it."""

    @tf.function
    def halve(self):
        for variable in self.model.trainable_variables:
            variable.assign(variable * 0.5)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.halve()


class Looks(callbacks.Callback):
    """Asks the model for predictions and values while it trains."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.predict(X, batch_size=6, verbose=0)

    def on_epoch_end(self, epoch, logs=None):
        logs["looked"] = self.model.evaluate(*VALIDATION, batch_size=9, verbose=0)


class Stops(callbacks.Callback):
    """Ends training in the middle of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.epoch == 1 and batch == 1


class Freezes(callbacks.Callback):
    """Without a new compile this changes nothing in plain Keras, as its step is traced."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[0].trainable = False

    def on_train_end(self, logs=None):
        self.model.layers[0].trainable = True


@pytest.mark.parametrize("callback", [Halves, Sets, HalvesInGraph, Looks, Stops, Freezes])
def test_users_callbacks(callback):
    check_again(linear, lambda m: fit(m, callback()), COUNT)


def test_callbacks_see_the_plain_model():
    seen = []
    trainer = multitower.Trainer(linear(), devices(COUNT))
    fit(trainer, callbacks.LambdaCallback(on_train_end=lambda logs: seen.append(1)), Remembers(seen), epochs=1)
    assert seen == [trainer.model, 1] or seen == [1, trainer.model]


class Remembers(callbacks.Callback):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_train_end(self, logs=None):
        self.seen.append(self.model)


def test_callbacks_as_callback_list():
    def train(either):
        called = callbacks.CallbackList([HalvesInGraph()], add_history=True, model=model_of(either), epochs=2)
        return either.fit(X, Y, batch_size=5, shuffle=False, epochs=2, callbacks=called)

    check_again(linear, train, COUNT)


# Between two calls.


def recompile(either, optimizer):
    model_of(either).compile(optimizer, "mse", metrics=["mae"])


def test_compile_with_another_optimizer():
    def train(either):
        first = fit(either)
        recompile(either, keras.optimizers.Adam(0.05))
        return first, fit(either), either.evaluate(X, Y, verbose=0)

    check(linear, train, COUNT)


def test_compile_of_a_model_with_its_own_metrics():
    """Nothing but the optimizer changes: the metrics are the model's own."""

    def train(either):
        first = fit(either)
        model_of(either).compile(keras.optimizers.Adam(0.05))
        return first, fit(either)

    check(own_loss, train, COUNT)


class NoMetrics(keras.Model):
    """A train_step that reports nothing Keras keeps."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    @property
    def metrics(self):
        return []

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.dense(x) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_model_without_metrics():
    def build():
        model = NoMetrics()
        model.compile(momentum())
        return model

    def train(either):
        first = fit(either)
        model_of(either).compile(keras.optimizers.Adam(0.05))
        return first, fit(either)

    check(build, train, COUNT)


def test_layers_frozen_and_thawed():
    def train(either):
        model = model_of(either)
        histories = []
        for trainable in (False, True):
            model.layers[0].trainable = trainable
            recompile(either, momentum())
            before = model.layers[0].get_weights()
            histories.append(fit(either))
            assert np.array_equal(before[0], model.layers[0].get_weights()[0]) != trainable
        return histories

    check(lambda: compiled([keras.Input((6,)), layers.Dense(4), layers.Dense(1)]), train, COUNT)


def test_frozen_batch_normalisation():
    def build():
        model = compiled([keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])
        model.layers[1].trainable = False
        recompile(model, momentum())
        return model

    check(build, fit, COUNT)


def test_plain_fit_between_two_fits_on_towers():
    """Plain Keras trains tower 0's variables: the other towers follow at the next call."""

    def train(either):
        return fit(either), fit(model_of(either)), fit(either)

    check_again(adaptive, train, COUNT)


def test_the_model_is_plain_after_every_call():
    model = linear()
    trainer = multitower.Trainer(model, devices(2))
    fit(trainer)
    assert (model.train_function, model.test_function, model.predict_function) == (None, None, None)
    model.make_train_function()
    own = model.train_function
    fit(trainer)
    with pytest.raises(InterruptedTrainingError):
        fit(trainer, InterruptsEpoch(0))
    assert model.train_function is own


def test_two_trainers_of_one_model():
    """On other devices, in turn: each finds what the other one has learned."""

    def train(either):
        other = either if either is model_of(either) else multitower.Trainer(model_of(either), devices(2))
        return fit(either), fit(other), fit(either)

    check(adaptive, train, COUNT)


def changed_weights(model, tmp_path):
    weights = [w + 0.3 for w in model.get_weights()]
    model.set_weights(weights)


def loaded_weights(model, tmp_path):
    other = adaptive()
    other.set_weights([w * 2 for w in model.get_weights()])
    other.save_weights(tmp_path / "other.weights.h5")
    model.load_weights(tmp_path / "other.weights.h5")


def restored_checkpoint(model, tmp_path):
    checkpoint = tf.train.Checkpoint(variables=[v.value for v in model.trainable_variables])
    start = [v.numpy() for v in model.trainable_variables]
    for variable in model.trainable_variables:
        variable.assign(variable * 2)
    path = checkpoint.save(tmp_path / "checkpoint")
    for variable, value in zip(model.trainable_variables, start, strict=True):
        variable.assign(value)
    checkpoint.restore(path).assert_consumed()


def changed_rate(model, tmp_path):
    model.optimizer.learning_rate = 0.01


def changed_step(model, tmp_path):
    model.optimizer.iterations.assign(100)


@pytest.mark.parametrize("change", [changed_weights, loaded_weights, restored_checkpoint, changed_rate, changed_step])
def test_changes_between_batches(change, tmp_path):
    """train_on_batch after train_on_batch, and somebody changes the model in between."""

    def train(either):
        logs = []
        for start in (0, 5, 10):
            logs.append(either.train_on_batch(X[start : start + 5], Y[start : start + 5]))
            change(model_of(either), tmp_path)
        return *logs, either.train_on_batch(X[15:], Y[15:])

    check(adaptive, train, COUNT)


def test_moving_averages_replace_the_weights_at_the_end():
    check(lambda: linear(momentum(use_ema=True, ema_momentum=0.9)), lambda m: (fit(m), fit(m)), COUNT)


def test_a_model_loaded_from_a_file_trains_on_towers(tmp_path):
    """Half on one device, saved, the other half on towers."""
    plain, model = twins(sequential)
    data = {"x": X, "y": np.arange(17) % 3, "batch_size": 5, "shuffle": False, "verbose": 0}
    plain.fit(**data, epochs=2)
    model.fit(**data)
    model.save(tmp_path / "model.keras")
    trainer = multitower.Trainer(keras.models.load_model(tmp_path / "model.keras"), devices(COUNT))
    trainer.fit(**data, initial_epoch=1, epochs=2)
    assert_same_state(trainer, plain, bound=1e-5)
    assert_copies_equal(trainer)


def test_weights_assigned_before_the_model_is_compiled_anew_reach_every_tower():
    """The towers have copies from before, and the functions of the new compilation have not used them yet."""
    trainer = multitower.Trainer(linear(), devices(2), placement="replicated")
    trainer.test_on_batch(features(4), numbers(4))
    for variable in trainer.model.variables:
        variable.assign(variable + 1.0)
    trainer.model.compile("sgd", "mse")
    trainer.fit(features(4), numbers(4), verbose=0)
    assert_copies_equal(trainer)
