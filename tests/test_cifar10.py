"""The cifar10 job: its files, its input picture by picture, its network and recipe, its average on towers."""

import pickle
import socket
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import multitower
from multitower import cifar10_files
from multitower.cifar10_files import from_keras, read_binary, read_folder, read_python
from multitower.errors import JobError
from multitower.job import load_job
from multitower.jobs import cifar10
from multitower.pictures import central_crop, distorted, distorted_batches, plain_batches, standardised
from multitower.upstream import learning_rate_of
from oracle import check, twins
from picture_files import PARTS, digit_pictures, write_binary, write_python

ROWS = 20  # of each file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_binary(tmp_path_factory.mktemp("cifar10"), ROWS)


# Files


@pytest.mark.parametrize("write", [write_binary, write_python])
@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin", "cifar-10-batches-py"])
def test_both_versions_are_read_as_they_are(write, inner, tmp_path):
    write(tmp_path / inner, ROWS)
    (x, y), (x_test, y_test) = read_folder(tmp_path)
    images, labels = digit_pictures(6 * ROWS)
    assert (x.dtype, y.dtype) == (np.uint8, np.int32)
    np.testing.assert_array_equal(np.concatenate([x, x_test]), images)
    np.testing.assert_array_equal(np.concatenate([y, y_test]), labels)
    assert not np.array_equal(x[..., 0], x[..., 1])  # the colours are told apart


def error_of(function, *arguments):
    with pytest.raises(JobError) as raised:
        function(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("size", [0, 3072, 3073 * 7 - 1, 3073 * 7 + 1])
def test_truncated_binary_file_is_named(size, tmp_path):
    write_binary(tmp_path, ROWS)
    file = tmp_path / "data_batch_3.bin"
    file.write_bytes((file.read_bytes() * 2)[:size])
    assert f"{file} has {size} bytes, not a whole number of records of 3073" in error_of(read_folder, tmp_path)


def test_file_cut_off_at_a_record_is_named(tmp_path):
    write_binary(tmp_path, ROWS)
    file = tmp_path / "data_batch_5.bin"
    file.write_bytes(file.read_bytes()[: 3073 * 7])
    assert f"{file} has 7 pictures, others of its folder 20: it is truncated" in error_of(read_folder, tmp_path)


def test_other_binary_file_is_named(tmp_path):
    file = tmp_path / "data_batch_1.bin"
    file.write_bytes(bytes([77]) * 3073)
    assert f"{file} has labels of 77 … 77; expected 0 … 9" in error_of(read_binary, file)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "EOFError"),
        (b"not a pickle", "truncated or no file of CIFAR-10's Python version"),
        (pickle.dumps([1, 2]), "TypeError"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}), "KeyError: b'labels'"),
        (
            pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}),
            r"data uint8(2, 3072) and labels int64(1,)",
        ),
        (pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}), "data float64(1, 3072)"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}), "labels of 10 … 10"),
        (pickle.dumps({b"data": np.zeros((0, 3072), np.uint8), b"labels": np.zeros(0, int)}), "has no pictures"),
        (pickle.dumps(Evil()), "builtins.print has no place in a file of CIFAR-10"),
    ],
)
def test_wrong_python_file_is_named(content, told, tmp_path, capsys):
    file = tmp_path / "data_batch_1"
    file.write_bytes(content)
    message = error_of(read_python, file)
    assert str(file) in message
    assert told in message
    assert "executed" not in capsys.readouterr().out


def test_truncated_python_file_is_named(tmp_path):
    write_python(tmp_path, ROWS)
    file = tmp_path / "test_batch"
    file.write_bytes(file.read_bytes()[:-1000])
    assert f"{file} is truncated" in error_of(read_folder, tmp_path)


def test_missing_files_and_folders_are_named(tmp_path):
    assert "is not a folder; give the one with the files of CIFAR-10, from https://" in error_of(
        read_folder, tmp_path / "no"
    )
    assert f"{tmp_path} holds no file of CIFAR-10" in error_of(read_folder, tmp_path)
    write_binary(tmp_path, 1)
    for part in ("data_batch_2", "test_batch"):
        (tmp_path / f"{part}.bin").unlink()
    assert f"{tmp_path} lacks data_batch_2.bin, test_batch.bin" in error_of(read_folder, tmp_path)


def test_without_data_keras_copy_is_used(monkeypatch):
    images, labels = digit_pictures(3)
    monkeypatch.setattr(
        keras.datasets.cifar10, "load_data", lambda: ((images, labels[:, None]), (images[:1], labels[:1, None]))
    )
    (x, y), (x_test, _) = from_keras()
    assert (x.shape, y.shape, y.dtype, len(x_test)) == ((3, 32, 32, 3), (3,), np.int32, 1)


def test_where_it_cannot_be_downloaded_the_error_says_where_to_get_it(monkeypatch):
    patience = []

    def unreachable():
        patience.append(socket.getdefaulttimeout())
        raise OSError("Name or service\nnot known")

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", unreachable)
    message = error_of(from_keras)
    assert "could not be downloaded (OSError: Name or service not known)" in message
    assert f"{cifar10_files.WHERE}, unpack it, and give --set data=DIR" in message
    assert patience[0] is not None  # no wait for ever
    assert socket.getdefaulttimeout() is None


# Input


def test_a_picture_is_distorted_as_tf_image_does_it():
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    draws = np.random.default_rng(1).random((5, 5), np.float32)
    got = distorted(tf.constant(images), 24, *draws.T)
    for image, (y, x, flip, brightness, contrast), one in zip(images, draws, got, strict=True):
        picture = tf.cast(tf.image.crop_to_bounding_box(image, int(y * 9), int(x * 9), 24, 24), tf.float32)
        picture = tf.image.flip_left_right(picture) if flip < 0.5 else picture
        picture = tf.image.adjust_brightness(picture, (2 * brightness - 1) * 63)
        picture = tf.image.adjust_contrast(picture, 0.2 + 1.6 * contrast)
        np.testing.assert_allclose(one, tf.image.per_image_standardization(picture), atol=2e-5)
    assert got.numpy().mean((1, 2, 3)) == pytest.approx(0, abs=1e-5)
    assert got.numpy().std((1, 2, 3)) == pytest.approx(1, abs=1e-4)


def test_crops_stay_inside_and_reach_every_place():
    images = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None, None], (2, 32, 32, 1))
    ends = np.array([0, 1 - 2**-24], np.float32)
    zero = np.zeros(2, np.float32)
    got = distorted(tf.constant(images), 24, ends, ends, zero, zero + 0.5, zero + 0.5)
    np.testing.assert_allclose(got[0], standardised(tf.constant(images[:1, :24, :24]))[0], atol=1e-5)
    np.testing.assert_allclose(got[1], standardised(tf.constant(images[:1, 8:, 8:]))[0], atol=1e-5)


def test_central_crop_is_that_of_tf_image():
    images = np.random.default_rng(0).random((2, 32, 32, 3))
    np.testing.assert_array_equal(central_crop(images, 24), tf.image.resize_with_crop_or_pad(images, 24, 24))


@pytest.fixture
def pictures():
    return digit_pictures(50)


def epoch(dataset):
    images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def test_every_epoch_has_every_picture_in_another_order_distorted_anew(pictures):
    data = distorted_batches(*pictures, 16, 24, seed=3)
    assert int(data.cardinality()) == 4
    (x, y), (x2, y2) = epoch(data), epoch(data)
    assert x.shape == (50, 24, 24, 3)
    assert sorted(y) == sorted(y2) == sorted(pictures[1])
    assert not np.array_equal(y, y2)
    assert len({image.tobytes() for image in np.concatenate([x, x2])}) == 100


def test_the_same_seed_gives_the_same_epochs_with_any_batch(pictures):
    """So that a run goes on exactly on another N; passing over an epoch costs no more than iter()."""
    small, large, other_copy, other = (
        distorted_batches(*pictures, b, 24, seed) for b, seed in ((7, 3), (50, 3), (9, 3), (7, 4))
    )
    first, second = epoch(small), epoch(small)
    iter(large)
    for got, expected in zip(epoch(large), second, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    inside = tf.data.Dataset.range(1).flat_map(lambda _: other_copy)
    iter(other_copy)
    np.testing.assert_array_equal(epoch(inside)[1], second[1])
    assert not np.array_equal(first[1], second[1])
    assert not np.array_equal(epoch(other)[1], first[1])


def test_evaluation_is_in_order_and_always_the_same(pictures):
    x, y = epoch(plain_batches(*pictures, 16, 24))
    np.testing.assert_array_equal(y, pictures[1])
    expected = tf.image.per_image_standardization(pictures[0][:, 4:28, 4:28])
    np.testing.assert_allclose(x, expected, atol=1e-5)


# Network and recipe


def test_the_network_is_the_tutorials(folder):
    model = cifar10.build_model(str(folder), average=0)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    assert shapes == [
        (5, 5, 3, 64),
        (64,),
        (5, 5, 64, 64),
        (64,),
        (2304, 384),
        (384,),
        (384, 192),
        (192,),
        (192, 10),
        (10,),
    ]
    assert [float(v.numpy().flat[0]) for v in model.trainable_variables[1::2]] == pytest.approx([0, 0.1, 0.1, 0.1, 0])
    weights = [v.numpy().astype("float64") for v in model.trainable_variables]
    expected = sum(0.004 * tf.nn.l2_loss(weights[i]).numpy() for i in (4, 6))
    assert float(sum(model.losses)) == pytest.approx(expected, rel=1e-5)


def test_local_response_normalisation_is_that_of_tensorflow():
    x = 30 * np.random.default_rng(0).standard_normal((2, 3, 3, 64), np.float32)
    expected = tf.nn.local_response_normalization(x, 4, bias=1.0, alpha=0.001 / 9, beta=0.75)
    np.testing.assert_allclose(cifar10.local_response_normalisation(tf.constant(x)), expected, rtol=2e-6)


@pytest.mark.parametrize("towers", [1, 2, 8])
def test_the_rate_falls_after_350_epochs_of_examples_whatever_the_towers(towers):
    job = load_job("cifar10")
    batch = job.global_batch(towers)
    assert batch == 128 * towers
    rate = learning_rate_of(cifar10.build_model(batch_size=batch, examples=50_000).optimizer)
    steps = 350 * -(-50_000 // batch)
    assert [float(rate(step)) for step in (0, steps - 1, steps)] == pytest.approx([0.1, 0.1, 0.01])


def test_a_saved_model_is_a_plain_one_of_keras(folder, tmp_path):
    model = cifar10.build_model(str(folder))
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    assert b"multitower" not in zipfile.ZipFile(tmp_path / "model.keras").read("config.json")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(0).standard_normal((2, 24, 24, 3), np.float32)
    np.testing.assert_array_equal(model(x), loaded(x))
    assert loaded.optimizer.ema_momentum == 0.9999


# The moving average


def small_averaged():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), "mse", metrics=["mae"])
    return model


def fit_with_average(model):
    x = np.random.default_rng(0).standard_normal((10, 3))
    data = (x, x[:, :2])
    callbacks = cifar10.make_callbacks(0.9)
    return model.fit(*data, batch_size=4, epochs=3, shuffle=False, verbose=0, validation_data=data, callbacks=callbacks)


@pytest.mark.parametrize(("count", "placement"), [(1, "auto"), (3, "replicated"), (3, "shared")])
def test_the_average_on_towers_is_that_of_one_device(count, placement):
    _, trainer = check(small_averaged, fit_with_average, count, placement=placement)
    average = trainer.model.optimizer.variables[-1].numpy()
    np.testing.assert_array_equal(
        trainer.model.trainable_variables[-1].numpy(), average
    )  # fit ends with it, as Keras' does


def test_the_average_is_what_is_validated():
    """Control: without the callback, validation on towers sees the weights themselves."""
    x = np.random.default_rng(0).standard_normal((10, 3))
    losses = []
    for callbacks in (cifar10.make_callbacks(0.9), []):
        _, model = twins(small_averaged)
        trainer = multitower.Trainer(model, ["CPU:0", "CPU:1"])
        history = trainer.fit(x, x[:, :2], batch_size=5, verbose=0, validation_data=(x, x[:, :2]), callbacks=callbacks)
        losses.append((history.history["val_loss"][0], trainer.evaluate(x, x[:, :2], verbose=0)[0]))
    (validated, after), (of_weights, same_after) = losses
    assert validated == pytest.approx(after, rel=1e-5)
    assert after == pytest.approx(same_after, rel=1e-5)
    assert of_weights != pytest.approx(after, rel=1e-2)


def test_a_run_too_short_for_its_average_is_told(capsys):
    assert cifar10.make_callbacks(0.0) == []
    fit_with_average(twins(small_averaged)[0])
    assert "after 9 steps the moving average still consists of the first weights by 39%" in capsys.readouterr().out


# The whole job


def test_the_job_trains_on_two_towers(run, folder, tmp_path):
    code, out, err = run(
        "train", "cifar10", "--devices", "cpu:2", "--epochs", 1, "--batch-size", 25, "--set", f"data={folder}",
        "--set", "average=0.5", "--run-dir", tmp_path / "run", "--scale-lr", "linear",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "13 + 12 of a batch of 25" in out
    assert "that of the job × 0.1953 (--scale-lr linear)" in out
    loaded = keras.models.load_model(tmp_path / "run" / "model.keras")
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.1 * 25 / 128)
    assert int(loaded.optimizer.iterations) == 4


def test_wrong_files_end_it_before_anything_is_written(run, folder, tmp_path):
    code, _, err = run(
        "train", "cifar10", "--devices", "cpu:2", "--set", f"data={tmp_path}", "--run-dir", tmp_path / "run"
    )
    assert code == 2
    assert err.count("\n") == 1
    assert f"{tmp_path} holds no file of CIFAR-10" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_towers_train_it_as_one_device_does(run, folder):
    code, out, err = run("verify", "cifar10", "--devices", "cpu:2", "--batch-size", 9, "--set", f"data={folder}")
    assert (code, err) == (0, "")
    assert "yes, up to rounding" in out


@pytest.mark.slow
def test_it_learns(folder):
    """100 digits in colour, learned by heart."""
    keras.utils.set_random_seed(0)
    train, _ = cifar10.load_data(str(folder), batch_size=20)
    model = cifar10.build_model(str(folder), batch_size=20, average=0)
    history = multitower.Trainer(model, ["CPU:0", "CPU:1"]).fit(train, epochs=25, shuffle=False, verbose=0)
    assert np.mean(history.history["accuracy"][-3:]) > 0.3  # by chance 0.1


def test_names_of_the_files_are_those_of_the_archives():
    assert cifar10_files._PARTS == PARTS
