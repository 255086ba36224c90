"""A run that goes on is the run that never stopped: on the same N to the bit, on another within rounding."""

import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import multitower as mt
from multitower import checkpoint, storage, train
from multitower.epochs import Epochs
from multitower.errors import BatchError, CheckpointError, JobError
from oracle import BOUND, assert_close, devices

EPOCHS, ROWS, BATCH = 5, 22, 4
JOB = """
import keras
import numpy as np
import tensorflow as tf

EPOCHS = 5
BATCH_SIZE = 4

def build_model(dropout=0.0):
    model = keras.Sequential([
        keras.Input((6,)),
        keras.layers.Dense(8, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(dropout),
        keras.layers.Dense(1),
    ])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model

def load_data(dataset=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 6)).astype("float32")
    y = x[:, :1] - x[:, 1:2] ** 2
    if not dataset:
        return (x, y), (x[:5], y[:5])
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    return rows.shuffle(22, seed=4).batch(4), rows.take(5).batch(4)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return str(path)


def weights(report):
    return keras.models.load_model(report.model).get_weights()


def assert_same_run(got, expected, bound):
    """Weights, validation, and the table of all epochs."""
    for one, other in zip(weights(got), weights(expected), strict=True):
        assert_close(one, other, bound)
    assert_close(got.metrics["validation"], expected.metrics["validation"], bound)
    rows, wanted = (np.genfromtxt(f"{r.logs}/history.csv", delimiter=",", names=True) for r in (got, expected))
    for column in ("epoch", "loss", "mae", "val_loss", "val_mae"):
        assert_close(rows[column], wanted[column], bound, column)


@pytest.fixture(scope="module")
def runs(job, tmp_path_factory):
    """Runs that never stop, by N and parameters; each is made once."""
    made = {}

    def uninterrupted(count, **params):
        key = (count, *params.items())
        if key not in made:
            run_dir = tmp_path_factory.mktemp("whole") / "run"
            made[key] = train.run(job, devices(count), params=params, run_dir=run_dir)
        return made[key]

    return uninterrupted


# multitower train --resume: N × N


@pytest.fixture(scope="module")
def begun(job, tmp_path_factory):
    """Directories of runs that ended after 3 of 5 epochs, by N; copied for every use."""
    made = {}

    def copy_of(count, target):
        if count not in made:
            made[count] = tmp_path_factory.mktemp("begun") / "run"
            train.run(job, devices(count), epochs=3, run_dir=made[count])
        shutil.copytree(made[count], target)
        return target

    return copy_of


FAST = [(4, 1), (2, 2)]
GRID = [(a, b) if (a, b) in FAST else pytest.param(a, b, marks=pytest.mark.slow) for a in (1, 2, 4) for b in (1, 2, 4)]


@pytest.mark.parametrize(("before", "after"), GRID)
def test_three_epochs_and_two_more_are_five(begun, runs, tmp_path, before, after):
    run_dir = begun(before, tmp_path / "run")
    report = train.run(devices=devices(after), epochs=EPOCHS, resume=run_dir)
    assert (report.first_epoch, report.epochs, report.towers) == (3, 5, after)
    assert_same_run(report, runs(before), 0 if before == after else 10 * BOUND)  # 30 steps add up the roundings


@pytest.mark.parametrize(
    ("before", "after"),
    [({"placement": "replicated", "reduce": "ring"}, {"placement": "shared", "reduce": "gather"}),
     ({"placement": "shared", "reduce": "host"}, {"placement": "replicated", "reduce": "host"})],
)  # fmt: skip
def test_a_run_goes_on_with_another_placement_and_reduce(job, runs, tmp_path, before, after):
    train.run(job, devices(2), epochs=3, run_dir=tmp_path / "run", **before)
    report = train.run(devices=devices(4), epochs=EPOCHS, resume=tmp_path / "run", **after)
    assert (report.placement, report.reduce) == (after["placement"], after["reduce"])
    assert_same_run(report, runs(2), 10 * BOUND)


def test_a_batch_per_tower_and_its_learning_rate_go_on_as_they_were(tmp_path):
    """128 rows on each tower is a number of rows of the global batch, which another N does not change."""
    path = tmp_path / "job.py"
    path.write_text(JOB.replace("BATCH_SIZE = 4", "BATCH_SIZE_PER_TOWER = 3"))
    whole = train.run(str(path), devices(4), epochs=4, run_dir=tmp_path / "whole", scale_lr="linear")
    train.run(str(path), devices(4), epochs=2, run_dir=tmp_path / "run", scale_lr="linear")
    report = train.run(devices=devices(1), epochs=4, resume=tmp_path / "run")
    assert (report.batch_size, report.scale_lr, report.lr_factor) == (12, "linear", 4)
    assert_same_run(report, whole, 10 * BOUND)
    with pytest.raises(JobError, match="the run began with scale-lr linear, now none"):
        train.run(devices=devices(1), epochs=5, resume=tmp_path / "run", scale_lr="none")


def test_a_run_of_other_weights_is_told_apart(runs, job, tmp_path):
    """The control: another seed."""
    with pytest.raises(AssertionError, match="apart"):
        assert_same_run(train.run(job, devices(1), seed=1, run_dir=tmp_path / "run"), runs(1), 10 * BOUND)


class KilledError(Exception):
    pass


def run_killed(monkeypatch, epoch, batch, *arguments, **options):
    """train.run that ends with an error behind a batch, as abruptly as Python can."""

    def end(self, at, logs=None):
        if (self._epoch, at) == (epoch, batch):
            raise KilledError

    with monkeypatch.context() as patch:
        original = checkpoint.Checkpoints.on_train_batch_end

        def on_train_batch_end(self, at, logs=None):
            original(self, at, logs)
            end(self, at)

        patch.setattr(checkpoint.Checkpoints, "on_train_batch_end", on_train_batch_end)
        with pytest.raises(KilledError):
            train.run(*arguments, **options)


@pytest.mark.parametrize(
    "params", [{}, {"dropout": 0.3}, {"dataset": True}], ids=["arrays", "dropout", "shuffled dataset"]
)
def test_inside_an_epoch_to_the_bit(runs, job, tmp_path, monkeypatch, params):
    run_dir = tmp_path / "run"
    saving = train.Saving(every_steps=4)
    run_killed(monkeypatch, 2, 4, job, devices(2), params=params, run_dir=run_dir, saving=saving)
    manifest_at = checkpoint.latest(run_dir / "checkpoints").name
    assert manifest_at.endswith("epoch-2-batch-4")
    report = train.run(devices=devices(2), resume=run_dir)
    assert (report.first_epoch, report.epochs) == (2, 5)
    assert_same_run(report, runs(2, **params), 0)


def test_a_run_that_saved_nothing_begins_again(runs, job, tmp_path, monkeypatch, capsys):
    run_killed(monkeypatch, 0, 1, job, devices(2), run_dir=tmp_path / "run")
    report = train.run(devices=devices(2), resume=tmp_path / "run")
    assert "before its first checkpoint: it begins again" in capsys.readouterr().out
    assert_same_run(report, runs(2), 0)


def test_a_run_that_ended_before_its_report_is_completed(runs, begun, tmp_path):
    run_dir = begun(1, tmp_path / "run")
    before = json.loads((run_dir / "logs" / "report.json").read_text())
    (run_dir / "logs" / "report.json").unlink()
    (run_dir / "model.keras").unlink()
    report = train.run(devices=devices(1), epochs=3, resume=run_dir)
    assert (report.first_epoch, report.epochs) == (3, 3)
    assert report.metrics == before["metrics"]
    assert (run_dir / "model.keras").is_file()


# What must match


def test_what_differs_is_said(begun, job, tmp_path):
    run_dir = begun(1, tmp_path / "run")
    before = sorted(run_dir.rglob("*"))
    given = {"batch_size": 8, "params": {"dropout": 0.1}, "seed": 3}
    told = r"batch size of the job, now 8; seed 0, now 3; parameter dropout of the job, now 0.1: a run goes on with"
    with pytest.raises(JobError, match=told):
        train.run(job, devices(1), resume=run_dir, **given)
    with pytest.raises(JobError, match=r"the run began with job .*job.py, now digits"):
        train.run("digits", devices(1), resume=run_dir)
    with pytest.raises(JobError, match="has trained 3 epochs; give --epochs more"):
        train.run(devices=devices(1), epochs=3, resume=run_dir)
    with pytest.raises(JobError, match="goes on in its own directory; leave --run-dir out"):
        train.run(devices=devices(1), run_dir=tmp_path / "new", resume=run_dir)
    with pytest.raises(JobError, match="no run has begun there"):
        train.run(devices=devices(1), resume=tmp_path)
    lock = storage.Lock(run_dir)
    with pytest.raises(CheckpointError, match="written by another run"):
        train.run(devices=devices(1), epochs=5, resume=run_dir)
    lock.release()
    assert sorted(run_dir.rglob("*")) == before


def test_a_damaged_checkpoint_is_named_on_the_command_line(run, begun, tmp_path):
    run_dir = begun(1, tmp_path / "run")
    file = next(checkpoint.latest(run_dir / "checkpoints").glob("*.data*"))
    file.write_bytes(b"")
    arguments = ["train", "--devices", "cpu:1", "--epochs", 4, "--resume", run_dir]
    code, _, err = run(*arguments)
    assert code == 2
    assert "000003-epoch-3-batch-0 is damaged" in err
    assert "--allow-older" in err
    assert err.count("\n") == 1
    with pytest.warns(UserWarning, match="an older one is used"):
        code, out, _ = run(*arguments, "--allow-older", "--json")
    assert code == 0
    assert "going on at epoch 3, batch 1 of 4 epochs, after 12 steps" in out


def test_a_job_file_that_changed_is_said(begun, job, tmp_path, capsys):
    run_dir = begun(1, tmp_path / "run")
    with open(job, "a") as file:
        file.write("\n# changed\n")
    train.run(devices=devices(1), epochs=4, resume=run_dir)
    assert "the file of job" in capsys.readouterr().out


# Trainer.fit


def built_trainer(count, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], **options)
    model.optimizer.build(model.trainable_variables)
    return mt.Trainer(model, devices(count))


X = np.random.default_rng(3).normal(size=(ROWS, 3)).astype("float32")
Y = X[:, :1]


@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fit_goes_on_inside_an_epoch_for_users_of_the_library(tmp_path, steps_per_execution):
    whole, first, second = (built_trainer(2, steps_per_execution=steps_per_execution) for _ in range(3))
    fit = {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False, "verbose": 0, "validation_data": (X[:5], Y[:5])}
    expected = whole.fit(**fit, epochs=3)
    saving = checkpoint.Checkpoints(first, tmp_path, every_epochs=None, every_steps=4, keep=None)
    first.fit(**fit, epochs=2, callbacks=[saving])
    path = next(p for p in storage.checkpoints(tmp_path) if p.name.endswith("epoch-0-batch-4"))
    position = checkpoint.restore(second, path, batch=(X[:4], Y[:4]))
    seen = []
    spy = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"])))
    got = second.fit(**fit, epochs=3, initial_epoch=position.epoch, callbacks=[spy])
    assert_close(got, expected, 0)
    first_epoch = [batch for batch, _ in seen][: 6 // steps_per_execution]
    assert first_epoch == list(range(6))[steps_per_execution - 1 :: steps_per_execution]
    assert len({loss for _, loss in seen[: 4 // steps_per_execution]}) == 1  # passed over
    for one, other in zip(second.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_later_fit_passes_over_nothing(tmp_path):
    trainer = built_trainer(1)
    trainer.test_on_batch(X, Y)
    checkpoint.save(trainer, tmp_path, epoch=0, batch=3)
    checkpoint.restore(trainer, tmp_path, batch=(X[:4], Y[:4]))
    trainer.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 3
    trainer.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 9


def test_data_that_end_before_the_position_are_told(tmp_path):
    trainer = built_trainer(1)
    trainer.test_on_batch(X, Y)
    trainer.start_at(0, 5)
    data = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(BATCH).filter(lambda *_: True)  # of unknown size
    with pytest.raises(BatchError, match="the data end 1 batches before the one where training is to go on"):
        trainer.fit(data, steps_per_epoch=6, shuffle=False, verbose=0)


def test_a_position_inside_an_execution_is_refused():
    trainer = built_trainer(1, steps_per_execution=2)
    trainer.test_on_batch(X, Y)
    trainer.start_at(0, 3)
    with pytest.raises(BatchError, match="not a multiple of steps_per_execution=2"):
        trainer.fit(X, Y, batch_size=BATCH, verbose=0)


# The order of the data


def rows_of(epochs, epoch):
    epochs.on_epoch_begin(epoch)
    return np.concatenate([np.asarray(batch[0]) for batch in epochs.dataset])


def test_the_order_of_arrays_depends_on_seed_and_epoch_alone():
    data = (np.arange(10.0), np.arange(10))
    one, late, other = Epochs(data, 4), Epochs(data, 4, first_epoch=7), Epochs(data, 4, seed=1)
    orders = [rows_of(one, epoch) for epoch in range(4)]
    np.testing.assert_array_equal(rows_of(late, 2), orders[2])
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert not np.array_equal(rows_of(other, 0), orders[0])
    assert int(one.dataset.cardinality()) == 3


def test_a_shuffled_dataset_goes_on_with_the_order_of_its_epoch():
    def dataset():
        return tf.data.Dataset.range(12).map(lambda i: (i, i)).shuffle(12, seed=2).batch(4)

    whole = Epochs(dataset(), 4)
    orders = [rows_of(whole, epoch) for epoch in range(4)]
    late = Epochs(dataset(), 4, first_epoch=2)
    np.testing.assert_array_equal(rows_of(late, 2), orders[2])
    np.testing.assert_array_equal(rows_of(late, 3), orders[3])
    assert not np.array_equal(orders[2], orders[3])


def test_all_kinds_of_arrays_are_shuffled_alike():
    import pandas as pd
    import scipy.sparse

    number = np.arange(8)
    dense = np.zeros((8, 9))
    dense[number, number] = number
    dense[number, 8] = 1
    ragged = tf.RaggedTensor.from_row_lengths(np.repeat(number, 1 + number % 2), 1 + number % 2)
    x = {
        "array": number.astype("float64"),
        "frame": pd.DataFrame({"a": number, "b": number}),
        "sparse": scipy.sparse.csr_matrix(dense),
        "tensor": tf.sparse.from_dense(dense),
        "ragged": ragged,
        "list": [number, number.astype(str)],
    }
    for x_batch, y in Epochs((x, number, None), 3).dataset:
        assert x_batch["array"].dtype == "float32"
        for got in (x_batch["array"], x_batch["frame"][:, 1], x_batch["ragged"].to_tensor()[:, 0], x_batch["list"][0]):
            np.testing.assert_array_equal(got, y)
        assert x_batch["list"][1].numpy().tolist() == [str(i).encode() for i in y.numpy()]
        for matrix in (x_batch["sparse"], x_batch["tensor"]):
            np.testing.assert_array_equal(tf.sparse.to_dense(tf.sparse.reorder(matrix)), dense[y.numpy()])


# Evaluation on one device


def test_evaluation_on_one_device_is_that_of_the_plain_model(runs, job, tmp_path):
    report = train.run(job, devices(2), run_dir=tmp_path / "run", evaluate_on="one")
    assert_same_run(report, runs(2), BOUND)
    trainer = mt.Trainer(built_trainer(1).model, devices(2), evaluate_on="one")
    trainer.evaluate(X, Y, verbose=0)
    assert set(trainer.traces) == {"train_step"}
