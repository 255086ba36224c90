"""Summaries: what TensorBoard reads, the table, the picture, and that norms and noise scale are the right numbers."""

import itertools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import multitower as mt
from multitower import summaries
from multitower.gradient_norms import GradientNorms, squared_norm
from multitower.throughput import Throughput, rows_by_step
from oracle import devices
from small_models import classification, compiled, features, linear, numbers, regression

ROWS, BATCH = 22, 4


def trainer_of(build=linear, count=2, **options):
    keras.utils.set_random_seed(0)
    return mt.Trainer(build(), devices(count), **options)


def points(folder, part):
    """{tag: [(step, value)]} of an event file, read with TensorFlow."""
    found = {}
    for file in sorted((folder / part).glob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, tf.make_ndarray(value.tensor)))
    return found


def fit(trainer, callbacks, epochs=2, **options):
    data = regression(ROWS)
    return trainer.fit(
        **data,
        batch_size=BATCH,
        epochs=epochs,
        validation_data=(data["x"][:5], data["y"][:5]),
        callbacks=callbacks,
        shuffle=False,
        verbose=0,
        **options,
    )


def test_losses_metrics_rate_and_speed_are_written(tmp_path):
    trainer = trainer_of(lambda: linear(metrics=["mae"]))
    speed = Throughput(rows_by_step(ROWS, BATCH))
    writing = summaries.Summaries(trainer, tmp_path, every_steps=4, speed=speed)
    history = fit(trainer, [speed, writing, summaries.Table(tmp_path / "history.csv")]).history
    train, validation = points(tmp_path, "train"), points(tmp_path, "validation")
    assert [step for step, _ in train["loss"]] == [6, 12]
    np.testing.assert_allclose([value for _, value in train["loss"]], history["loss"])
    np.testing.assert_allclose([value for _, value in validation["mae"]], history["val_mae"])
    assert [float(value) for _, value in train["learning_rate"]] == pytest.approx([0.05, 0.05])
    assert all(value > 0 for _, value in train["examples_per_second"])
    assert [step for step, _ in train["step/loss"]] == [4, 10]
    assert set(validation) == {"loss", "mae"}
    table = summaries.read_table(tmp_path / "history.csv")
    assert set(table[0]) == {*history, "epoch"}
    assert float(table[1]["loss"]) == pytest.approx(history["loss"][1])


def test_tensorboard_reads_them(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    optimizer = lambda: keras.optimizers.SGD(0.05, use_ema=True)  # noqa: E731
    trainer = trainer_of(lambda: linear(optimizer()))
    fit(trainer, [summaries.Summaries(trainer, tmp_path, gradients=True)])
    events = accumulator.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert {"loss", "learning_rate", "gradient_norm", "noise_scale", "gradient_norm/tower_1"} <= set(tags)
    assert events.SummaryMetadata("loss").plugin_data.plugin_name == "scalars"
    averages = [tag for tag in tags if tag.startswith("average/")]
    assert len(averages) == 2
    assert events.SummaryMetadata(averages[0]).plugin_data.plugin_name == "histograms"


def test_averages_are_those_of_the_optimizer(tmp_path):
    trainer = trainer_of(lambda: linear(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)))
    seen = {}

    def note(epoch, logs):
        averages = [v for v in trainer.model.optimizer.variables if v.path.endswith("average")]
        for variable, average in zip(trainer.model.trainable_variables, averages, strict=True):
            value, mean = variable.numpy(), average.numpy()
            seen[variable.path] = np.linalg.norm(value - mean) / np.linalg.norm(mean)

    fit(trainer, [summaries.Summaries(trainer, tmp_path), keras.callbacks.LambdaCallback(on_epoch_end=note)], epochs=1)
    written = points(tmp_path, "train")
    for path, distance in seen.items():
        assert float(written[f"distance_from_average/{path}"][0][1]) == pytest.approx(distance, rel=1e-5)
        assert written[f"average/{path}"][0][1][:, 2].sum() == (6 if "kernel" in path else 1)


def test_without_averages_none_are_written(tmp_path):
    trainer = trainer_of()
    fit(trainer, [summaries.Summaries(trainer, tmp_path)], epochs=1)
    assert not [tag for tag in points(tmp_path, "train") if "average" in tag]


# Norms and noise scale


def plain_gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    return [np.asarray(g) for g in tape.gradient(loss, model.trainable_variables)]


def squared(gradients):
    return sum(float(np.sum(np.square(g, dtype=np.float64))) for g in gradients)


@pytest.mark.parametrize(("count", "rows"), [(1, 4), (2, 7), (3, 7), (4, 2)])
def test_norms_are_those_of_plain_gradients(count, rows):
    """One step with a learning rate of 0 on uneven shards, one of them without rows."""
    trainer = trainer_of(lambda: linear(keras.optimizers.SGD(0.0)), count)
    norms = GradientNorms(count)
    trainer.record_gradients(norms)
    x, y = features(rows), numbers(rows)
    trainer.train_on_batch(x, y)
    shares = [rows // count + (i < rows % count) for i in range(count)]
    starts = np.cumsum([0, *shares])
    parts = [slice(a, b) for a, b in itertools.pairwise(starts)]
    whole = squared(plain_gradients(trainer.model, x, y))
    towers = [squared(plain_gradients(trainer.model, x[p], y[p])) if p.start < p.stop else None for p in parts]
    seen = norms.take()
    assert seen.norm == pytest.approx(whole**0.5, rel=1e-5)
    for got, expected in zip(seen.tower_norms, towers, strict=True):
        assert got == (None if expected is None else pytest.approx(expected**0.5, rel=1e-5))
    present = [(t, b) for t, b in zip(towers, shares, strict=True) if b]
    if len(present) > 1:
        small, inverse = np.mean([t for t, _ in present]), np.mean([1 / b for _, b in present])
        noise = (small - whole) / (inverse - 1 / rows)
        signal = whole - noise / rows
        assert seen.noise_scale == (pytest.approx(noise / signal, rel=1e-4) if signal > 0 else None)
    else:
        assert seen.noise_scale is None
    assert norms.take().norm is None


def test_the_formula_of_the_paper_for_equal_shards():
    """McCandlish et al. 2018, A.1: |G|² = (B·|G_B|² − b·|G_b|²) / (B − b), S = (|G_b|² − |G_B|²) / (1/b − 1/B)."""
    trainer = trainer_of(lambda: linear(keras.optimizers.SGD(0.0)), 2)
    norms = GradientNorms(2)
    trainer.record_gradients(norms)
    x, y = features(40), numbers(40)
    y[:] += x.sum(1, keepdims=True) * 3
    trainer.train_on_batch(x, y)
    seen = norms.take()
    small, big = np.mean(np.square(seen.tower_norms)), seen.norm**2
    signal, noise = (40 * big - 20 * small) / 20, (small - big) / (1 / 20 - 1 / 40)
    assert seen.noise_scale == pytest.approx(noise / signal, rel=1e-3)


def test_the_noise_scale_of_a_known_distribution():
    """y = noise alone at weight 0 around a slope: per-row gradients have mean G and variance known in closed form."""
    keras.utils.set_random_seed(0)
    model = compiled([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    trainer = mt.Trainer(model, devices(4))
    norms = GradientNorms(4)
    trainer.record_gradients(norms)
    rng = np.random.default_rng(0)
    for _ in range(100):  # gradient of a row: −2·x·y with x = 1, so G = −2·E y, tr Σ = 4·Var y: B = Var y / (E y)²
        y = rng.normal(0.5, 1.0, size=(16, 1)).astype("float32")
        trainer.train_on_batch(np.ones((16, 1), "float32"), y)
    assert norms.take().noise_scale == pytest.approx(1.0 / 0.25, rel=0.25)


def test_sparse_gradients_count_rows_that_stand_twice_once():
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([2, 0, 2]), [4, 2])
    dense = tf.convert_to_tensor(slices)
    assert float(squared_norm([slices, None])) == pytest.approx(float(tf.reduce_sum(dense**2)))


def test_norms_of_a_scaled_loss_and_of_a_custom_step(tmp_path):
    expected = None
    data = regression(8)
    for optimizer in (keras.optimizers.SGD(0.0), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))):
        trainer = trainer_of(lambda optimizer=optimizer: linear(optimizer))
        norms = GradientNorms(2)
        trainer.record_gradients(norms)
        trainer.train_on_batch(data["x"], data["y"])
        seen = norms.take()
        expected = expected or seen
        assert seen.norm == pytest.approx(expected.norm, rel=1e-5)
        assert seen.tower_norms == pytest.approx(expected.tower_norms, rel=1e-5)


def test_recording_changes_nothing_and_is_off_unless_asked():
    data = classification(ROWS)
    build = lambda: compiled(  # noqa: E731
        [keras.Input((6,)), keras.layers.Dense(3)], loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    plain, recorded = trainer_of(build), trainer_of(build)
    norms = GradientNorms(2)
    recorded.record_gradients(norms)
    for trainer in (plain, recorded):
        trainer.fit(**data, batch_size=BATCH, shuffle=False, verbose=0)
    for one, other in zip(plain.model.get_weights(), recorded.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    recorded.record_gradients(None)
    norms.take()
    recorded.fit(**data, batch_size=BATCH, shuffle=False, verbose=0)
    assert norms.take().norm is None


# Table and picture


def test_a_table_goes_on_and_may_get_columns(tmp_path):
    path = tmp_path / "history.csv"
    table = summaries.Table(path)
    for epoch in range(3):
        table.on_epoch_end(epoch, {"loss": epoch / 2})
    again = summaries.Table(path, first_epoch=2)
    again.on_epoch_end(2, {"loss": 7.0, "mae": 1.0})
    rows = summaries.read_table(path)
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert [row["loss"] for row in rows] == ["0.0", "0.5", "7.0"]
    assert [row["mae"] for row in rows] == ["", "", "1.0"]
    assert [file.name for file in tmp_path.iterdir()] == ["history.csv"]


def test_curves_are_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    table = summaries.Table(tmp_path / "history.csv")
    for epoch in range(3):
        table.on_epoch_end(epoch, {"loss": 1.0, "val_loss": 2.0, "learning_rate": float("nan")})
    picture = tmp_path / "curves.png"
    assert summaries.draw_curves(tmp_path / "history.csv", picture) == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert summaries.draw_curves(tmp_path / "none.csv", tmp_path / "none.png") is None


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    summaries.Table(tmp_path / "history.csv").on_epoch_end(0, {"loss": 1.0})
    assert summaries.draw_curves(tmp_path / "history.csv", tmp_path / "curves.png") is None
    assert not (tmp_path / "curves.png").exists()
