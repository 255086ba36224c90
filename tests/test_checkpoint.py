"""Checkpoints: all state comes back, on any number of devices; bad ones are named; failing to write harms none."""

import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import multitower as mt
from multitower import checkpoint, storage
from multitower.errors import CheckpointError, StoppedError
from oracle import assert_copies_equal, devices, state
from small_models import built, classification, compiled, cross_entropy, features, linear, regression

ROWS, BATCH = 22, 4


def everything(optimizer=None):
    """Dropout, batch normalisation, averages, accumulated gradients, a scaled loss: all state there is."""
    inner = keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2)
    members = [
        keras.layers.Dense(8, "tanh"),
        keras.layers.Dropout(0.3),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3),
    ]
    optimizer = optimizer or keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=5)
    return built(
        compiled(
            members, optimizer, cross_entropy(), metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
        ),
        features(1),
    )


def trainer_of(build, count=2, seed=0):
    keras.utils.set_random_seed(seed)
    return mt.Trainer(build(), devices(count))


def batches(data, repeat=1):
    return tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(BATCH).repeat(repeat)


def values(trainer):
    return {name: v.numpy() for name, v in state(trainer.model).items()}


def assert_equal(got, expected):
    for (name, one), other in zip(got.items(), expected.values(), strict=True):
        np.testing.assert_array_equal(one, other, name)


@pytest.fixture(scope="module")
def trained():
    """A trainer after two epochs."""
    trainer = trainer_of(everything)
    trainer.fit(batches(classification(ROWS)), epochs=2, shuffle=False, verbose=0)
    return trainer


@pytest.fixture
def saved(trained, tmp_path):
    """Its checkpoint, and one before it."""
    checkpoint.save(trained, tmp_path, epoch=1)
    return checkpoint.save(trained, tmp_path, epoch=2)


# What is in it


def test_everything_comes_back(trained, saved, tmp_path):
    keras.utils.set_random_seed(5)
    other = mt.Trainer(everything(), devices(3))
    other.test_on_batch(features(4), np.zeros(4))
    position = checkpoint.restore(other, tmp_path)
    assert position == checkpoint.Position(epoch=2, batch=0, step=6)
    got, expected = values(other), values(trained)
    kept = [name for name in expected if not name.startswith("metric")]
    assert [name.split()[0] for name in kept].count("optimizer") > 20
    assert any("seed" in name for name in kept)
    for (name, value), other_value in zip(expected.items(), got.values(), strict=True):
        np.testing.assert_array_equal(other_value, value, name)
    assert_copies_equal(other)


def test_the_global_seed_comes_back(trained, tmp_path):
    keras.utils.set_random_seed(7)
    keras.random.normal((2,))
    checkpoint.save(trained, tmp_path)
    expected = np.asarray(keras.random.normal((2,)))
    keras.utils.set_random_seed(8)
    checkpoint.restore(trained, tmp_path)
    np.testing.assert_array_equal(np.asarray(keras.random.normal((2,))), expected)


def test_optimizers_that_are_attributes_are_saved(tmp_path):
    def with_two():
        model = linear()
        model.second = keras.optimizers.Adam()
        model.second.build(model.trainable_variables)
        return model

    one, other = trainer_of(with_two, 1), trainer_of(with_two, 1)
    one.model.second.iterations.assign(42)
    checkpoint.save(one, tmp_path)
    checkpoint.restore(other, tmp_path)
    assert int(other.model.second.iterations.numpy()) == 42


def test_a_model_that_is_not_built_takes_a_batch(tmp_path):
    def unbuilt():
        return compiled([keras.layers.Dense(3)], loss=cross_entropy(), metrics=["accuracy"])

    data = classification(ROWS)
    one, other = trainer_of(unbuilt), trainer_of(unbuilt, seed=1)
    with pytest.raises(CheckpointError, match="has no variables yet; train a batch first"):
        checkpoint.save(one, tmp_path)
    one.fit(batches(data), shuffle=False, verbose=0)
    checkpoint.save(one, tmp_path, epoch=0, batch=4)
    with pytest.raises(CheckpointError, match="give restore one"):
        checkpoint.restore(other, tmp_path)
    checkpoint.restore(other, tmp_path, batch=(data["x"][:4], data["y"][:4]))
    assert_equal(values(other), values(one))


def test_a_checkpoint_says_what_it_holds(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["format"] == "multitower checkpoint 1"
    assert manifest["position"] == {"epoch": 2, "batch": 0, "step": 6}
    assert set(manifest["variables"]) == {"model", "optimizer", "metrics", "seed"}
    assert len(manifest["files"]["variables.index"]["sha256"]) == 64


def test_independent_towers_are_not_saved(tmp_path):
    trainer = mt.Trainer(linear(), devices(2), placement="independent")
    for call in (checkpoint.save, checkpoint.restore):
        with pytest.raises(CheckpointError, match="placement='independent' trains another model on every tower"):
            call(trainer, tmp_path)


# Which are kept


def test_the_last_ones_are_kept_and_latest_is_the_newest(tmp_path):
    trainer = trainer_of(linear, 1)
    assert checkpoint.latest(tmp_path / "none") is None
    paths = [checkpoint.save(trainer, tmp_path, epoch=epoch, keep=2) for epoch in range(4)]
    assert storage.checkpoints(tmp_path) == paths[2:]
    assert checkpoint.latest(tmp_path) == paths[3]
    assert paths[3].name == "000004-epoch-3-batch-0"
    checkpoint.save(trainer, tmp_path, keep=None)
    assert len(storage.checkpoints(tmp_path)) == 3


@pytest.mark.parametrize("options", [{"keep": 0}, {"every_epochs": 0}, {"every_steps": 0}])
def test_counts_are_at_least_one(tmp_path, options):
    with pytest.raises(CheckpointError, match=f"{next(iter(options))}=0: expected"):
        checkpoint.Checkpoints(trainer_of(linear, 1), tmp_path, **options)


def test_the_callback_saves_by_epochs_and_steps(tmp_path):
    trainer = trainer_of(linear)
    saving = checkpoint.Checkpoints(trainer, tmp_path, every_epochs=2, every_steps=4, keep=None)
    trainer.fit(batches(regression(ROWS)), epochs=3, callbacks=[saving], shuffle=False, verbose=0)
    names = [path.name.partition("-")[2] for path in storage.checkpoints(tmp_path)]
    # 6 steps an epoch: steps 4, 8, (12: end of epoch 2), 16
    assert names == ["epoch-0-batch-4", "epoch-1-batch-2", "epoch-1-batch-6", "epoch-2-batch-0", "epoch-2-batch-4"]
    assert saving.path == checkpoint.latest(tmp_path)


def test_two_runs_do_not_write_to_one_directory(tmp_path):
    trainer = trainer_of(linear, 1)
    lock = storage.Lock(tmp_path)
    (tmp_path / ".writing-by-the-other").mkdir()
    saving = checkpoint.Checkpoints(trainer, tmp_path)
    with pytest.raises(CheckpointError, match=r"is being written by another run \(process \d+\)"):
        trainer.fit(**regression(4), callbacks=[saving], shuffle=False, verbose=0)
    assert (tmp_path / ".writing-by-the-other").is_dir()
    lock.release()
    trainer.fit(**regression(4), callbacks=[saving], shuffle=False, verbose=0)
    trainer.fit(**regression(4), callbacks=[saving], shuffle=False, verbose=0)
    assert not (tmp_path / ".writing-by-the-other").exists()


# Damaged and foreign ones


def damage_cut(path):
    file = next(path.glob("*.data*"))
    file.write_bytes(file.read_bytes()[:-7])


def damage_bit(path):
    file = next(path.glob("*.data*"))
    content = bytearray(file.read_bytes())
    content[20] ^= 1
    file.write_bytes(content)


DAMAGES = [
    (damage_cut, "is damaged: variables.data-00000-of-00001 has .* bytes, expected"),
    (damage_bit, "is damaged: the content of variables.data-00000-of-00001 is not what was written"),
    (lambda path: (path / "variables.index").unlink(), "is damaged: variables.index is missing"),
    (lambda path: (path / "manifest.json").unlink(), "is no checkpoint of multitower: manifest.json: No such file"),
    (lambda path: (path / "manifest.json").write_text('{"format": '), "is damaged: manifest.json is not JSON"),
    (lambda path: (path / "manifest.json").write_text('{"format": "x"}'), "format 'x', expected 'multitower check"),
    (lambda path: (path / "manifest.json").write_text("[]"), "format None, expected"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_it_used_only_if_allowed(trained, saved, tmp_path, damage, told):
    damage(saved)
    with pytest.raises(CheckpointError, match=told) as raised:
        checkpoint.restore(trained, tmp_path)
    assert str(saved) in str(raised.value)
    assert "the one before it is 000001-epoch-1-batch-0, used only with --allow-older" in str(raised.value)
    with pytest.warns(UserWarning, match=told):
        assert checkpoint.restore(trained, tmp_path, allow_older=True).epoch == 1


def test_where_none_can_be_used_all_are_named(trained, saved, tmp_path):
    for path in storage.checkpoints(tmp_path):
        damage_cut(path)
    with (
        pytest.warns(UserWarning, match="an older one is used"),
        pytest.raises(CheckpointError, match=r"no checkpoint of .* can be used: .*000002-.*000001-"),
    ):
        checkpoint.restore(trained, tmp_path, allow_older=True)
    with pytest.raises(CheckpointError, match="none holds no checkpoint"):
        checkpoint.restore(trained, tmp_path / "none")


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (linear, r"variable 0 of model is .*dense.*/kernel \(6, 8\) float32 in it and .*kernel \(6, 1\) float32 here"),
        (lambda: everything(keras.optimizers.SGD(0.1)), "variable 0 of optimizer is .* in it and sgd.*/iteration"),
    ],
    ids=["model", "optimizer"],
)
def test_one_of_another_model_is_named(saved, tmp_path, build, told):
    trainer = trainer_of(build, 1)
    before = values(trainer)
    with pytest.raises(CheckpointError, match=f"is of another model: {told}"):
        checkpoint.restore(trainer, tmp_path)
    assert_equal(values(trainer), before)


def test_one_checkpoint_can_be_named(trained, saved, tmp_path):
    assert checkpoint.restore(trained, tmp_path / "000001-epoch-1-batch-0").epoch == 1


# Failing to write


def test_a_full_disk_leaves_the_last_one(trained, saved, tmp_path, monkeypatch):
    def full(self, prefix):
        with open(f"{prefix}.index", "wb") as file:
            file.write(b"half")
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr(tf.train.Checkpoint, "write", full)
    with pytest.raises(OSError, match=r"epoch 4, batch 1 could not .*No space left.*the last one is 000002-epoch-2"):
        checkpoint.save(trained, tmp_path, epoch=3, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001-epoch-1-batch-0", "000002-epoch-2-batch-0"]
    assert checkpoint.restore(trained, tmp_path).epoch == 2


def test_a_file_that_may_not_grow_leaves_the_last_one(trained, saved, tmp_path):
    """The kernel refuses to write behind 1 KiB: TensorFlow's own error, half-written files."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written to .*the last one is 000002-"):
            checkpoint.save(trained, tmp_path, epoch=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(list(tmp_path.iterdir())) == 2
    assert checkpoint.restore(trained, tmp_path).epoch == 2


def test_one_half_written_or_half_deleted_is_none(trained, saved, tmp_path):
    shutil.copytree(saved, tmp_path / ".writing-x")
    shutil.copytree(saved, tmp_path / ".deleting-000009-epoch-9-batch-0")
    assert checkpoint.latest(tmp_path) == saved
    storage.sweep(tmp_path)
    assert sorted(p.name[0] for p in tmp_path.iterdir()) == ["0", "0"]


# Stopping


class Ask(keras.callbacks.Callback):
    """Asks for a stop in the middle of training or of validation."""

    def __init__(self, stop, train_batch=None, test_batch=None):
        super().__init__()
        self.stop, self.train_batch, self.test_batch = stop, train_batch, test_batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.train_batch:
            self.stop.signal = "SIGTERM"

    def on_test_batch_end(self, batch, logs=None):
        if batch == self.test_batch:
            self.stop.signal = "SIGINT"


@pytest.mark.parametrize(
    ("where", "name"), [({"train_batch": 2}, "epoch-0-batch-3"), ({"test_batch": 0}, "epoch-0-batch-6")]
)
def test_a_stop_saves_at_once_and_is_no_failure(tmp_path, where, name):
    trainer = trainer_of(linear)
    with checkpoint.stop_requests() as stop:
        saving = checkpoint.Checkpoints(trainer, tmp_path, stop=stop)
        data = batches(regression(ROWS))
        with pytest.raises(StoppedError, match=f"stopped by SIG.*, saved in .*{name}"):
            trainer.fit(
                data, validation_data=data, epochs=3, callbacks=[Ask(stop, **where), saving], shuffle=False, verbose=0
            )
    storage.Lock(tmp_path).release()
