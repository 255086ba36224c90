"""The volumes job: its files and every mistake in them, its phantoms, and that it learns."""

import sys
import zipfile

import keras
import nibabel
import numpy as np
import pytest

import multitower
from multitower import volume_files
from multitower.errors import JobError
from multitower.jobs import volumes
from multitower.volume_files import read_folder, read_table, read_volume, standardised

ROWS = 12
SHAPE = (8, 9, 10)


def save(file, array):
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), file)


@pytest.fixture
def folder(tmp_path):
    """Twelve volumes, every other one compressed, and a table of them."""
    rng = np.random.default_rng(0)
    lines = ["id,site,target,sex"]
    for i in range(ROWS):
        save(tmp_path / f"s{i}.nii{'.gz' if i % 2 else ''}", rng.integers(-99, 999, SHAPE).astype(np.int16))
        lines.append(f"s{i},A,{20 + i / 2},{'FM'[i % 2]}")
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("in_memory", [True, False])
def test_volumes_targets_and_sexes_come_together(folder, in_memory):
    found = read_folder(folder, in_memory)
    assert found.shape == SHAPE
    np.testing.assert_array_equal(found.target, 20 + np.arange(ROWS, dtype=np.float32) / 2)
    np.testing.assert_array_equal(found.sex, np.arange(ROWS) % 2)
    for row, name in ((0, "s0.nii"), (11, "s11.nii.gz")):
        raw = nibabel.load(folder / name).get_fdata()
        np.testing.assert_allclose(found.read(row), (raw - raw.mean()) / raw.std(), atol=1e-5)
        assert found.read(row).dtype == np.float32


def test_intensities_are_scaled_as_the_header_says(tmp_path):
    image = nibabel.Nifti1Image(np.arange(8, dtype=np.int16).reshape(2, 2, 2), np.eye(4))
    image.header.set_slope_inter(0.5, 3)
    nibabel.save(image, tmp_path / "a.nii")
    np.testing.assert_allclose(read_volume(tmp_path / "a.nii"), standardised(np.arange(8).reshape(2, 2, 2)), atol=1e-6)


def test_an_empty_volume_is_zeros():
    assert not standardised(np.full((2, 2, 2), 7.0)).any()


# Mistakes in files


def error_of(function, *arguments):
    with pytest.raises(JobError) as raised:
        function(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_another_shape_is_named(folder):
    save(folder / "s5.nii.gz", np.zeros((8, 9, 11), np.float32))
    message = error_of(read_folder, folder, True)
    assert f"{folder}/s5.nii.gz has shape (8, 9, 11), s0.nii has (8, 9, 10)" in message


def test_four_dimensions_are_named(folder):
    save(folder / "s0.nii", np.zeros((8, 9, 10, 2), np.float32))
    assert f"{folder}/s0.nii has shape (8, 9, 10, 2); expected three dimensions" in error_of(read_folder, folder, True)


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("name", ["s2.nii", "s3.nii.gz"])
@pytest.mark.parametrize("left", [0, 100, -100])
def test_truncated_file_is_named(folder, name, left, in_memory):
    file = folder / name
    file.write_bytes(file.read_bytes()[:left])
    assert f"{file} is truncated or no NIfTI file (" in error_of(read_folder, folder, in_memory)


def test_other_file_is_named(folder):
    (folder / "s4.nii").write_text("no picture" * 100)
    assert f"{folder}/s4.nii is truncated or no NIfTI file" in error_of(read_folder, folder, True)


def test_voxels_that_are_not_finite_are_named(folder):
    array = np.zeros(SHAPE, np.float32)
    array[1, 2, 3] = np.nan
    save(folder / "s4.nii", array)
    assert f"{folder}/s4.nii has voxels that are not finite numbers" in error_of(read_folder, folder, True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("id,target\ns0,1\n", "has no column sex; its first line is ['id', 'target']"),
        ("", "has no column id, target, sex; its first line is None"),
        ("id,target,sex\n", "has 0 volumes; expected at least 2"),
        ("id,target,sex\ns0,1,F\ns1,,M\n", "line 3: target ''; expected a number"),
        ("id,target,sex\ns0,nan,F\ns1,2,M\n", "line 2: target 'nan'; expected a number"),
        ("id,target,sex\ns0,1\n", "line 2: sex ''; expected one of f, female, 0, m, male, 1"),
        ("id,target,sex\ns0,1,x\n", "line 2: sex 'x'; expected one of"),
        ("id,target,sex\ns77,1,F\n", "line 2: neither s77.nii.gz nor s77.nii is in"),
        ("id,target,sex\n,1,F\n", "line 2: neither .nii.gz nor .nii is in"),
        ("id,target,sex\ns0,1,F\ns1,2,M\ns0,1,F\n", "names s0.nii 2 times"),
    ],
)
def test_mistakes_in_the_table_are_named(folder, text, told):
    table = folder / "people.csv"
    table.write_text(text)
    message = error_of(read_table, table)
    assert str(table) in message
    assert told in message


def test_table_in_another_encoding_is_named(folder):
    (folder / "people.csv").write_bytes("id,target,sex\nsé,1,F\n".encode("latin-1"))
    assert "people.csv is no text in UTF-8" in error_of(read_folder, folder, True)


def test_tables_are_one(folder):
    assert "is not a folder" in error_of(read_folder, folder / "people.csv", True)
    (folder / "other.csv").write_text("")
    assert "holds as CSV files: other.csv, people.csv; expected exactly one" in error_of(read_folder, folder, True)


def test_without_nibabel_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    assert "pip install 'multitower[volumes]'" in error_of(read_volume, folder / "s0.nii")


# Data


@pytest.mark.parametrize("in_memory", [True, False])
def test_batches_hold_every_volume_once(folder, in_memory):
    train, held_out = volumes.load_data(str(folder), batch_size=4, in_memory=in_memory)
    found = read_folder(folder, True)
    seen = []
    for part in (train, held_out):
        for inputs, target in part.as_numpy_iterator():
            assert inputs["volume"].shape == (len(target), *SHAPE, 1)
            for volume, sex, value in zip(inputs["volume"], inputs["sex"], target, strict=True):
                row = int(np.flatnonzero(found.target == value)[0])
                np.testing.assert_array_equal(volume[..., 0], found.read(row))
                assert sex == found.sex[row]
                seen.append(row)
    assert sorted(seen) == list(range(ROWS))
    assert int(held_out.cardinality()) == 1


def test_the_order_is_new_every_epoch_and_the_same_for_a_seed():
    def orders(seed):
        train, _ = volumes.load_data(size=8, phantoms=20, seed=seed)
        return [np.concatenate([y for _, y in train.as_numpy_iterator()]).tolist() for _ in range(2)]

    first, second = orders(1)
    assert sorted(first) == sorted(second)
    assert first != second
    assert orders(1) == [first, second]
    assert orders(2) != [first, second]


def test_phantoms_have_the_target_they_say(capsys):
    """100 · cavity / head, measured on the picture: from the volumes of what is bright and of what is dark in it."""
    phantoms = volumes.make_phantoms(20, 32)
    for row in range(20):
        picture = phantoms.read(row)
        level = picture - np.median(picture[:2])  # above the air
        bright = level > 0.6 * np.percentile(level, 99)
        places = np.indices(picture.shape)
        radius = max(np.ptp(axis[bright]) + 1 for axis in places) / 2
        ball = sum((axis - 15.5) ** 2 for axis in places) < (radius - 0.5) ** 2
        cavity = (3 / (4 * np.pi) * (ball & ~bright).sum()) ** (1 / 3)
        assert 100 * cavity / radius == pytest.approx(phantoms.target[row], abs=5)  # half a voxel of 11
    volumes.load_data(size=8, phantoms=10)
    assert "these are 10 synthetic phantoms" in capsys.readouterr().out


def test_phantoms_too_few_or_small():
    assert "phantoms=1, size=16; expected at least 2 phantoms" in error_of(volumes.make_phantoms, 1, 16)
    assert "at least 8 voxels" in error_of(volumes.make_phantoms, 5, 7)


# The job


def test_the_model_starts_at_the_mean_and_decays_by_epochs():
    model = volumes.build_model(size=8, phantoms=50, batch_size=7, lr=0.01, decay=0.5, decay_epochs=2)
    rate = multitower.upstream.learning_rate_of(model.optimizer)
    assert [float(rate(step)) for step in (0, 11, 12, 24)] == pytest.approx(
        [0.01, 0.01, 0.005, 0.0025]
    )  # 40 rows: 6 steps
    assert model.layers[-1].offset == pytest.approx(50, abs=8)
    assert [type(layer).__name__ for layer in model.layers].count("Conv3D") == 3


def test_the_job_trains_on_files_on_two_towers(run, folder, tmp_path):
    directory = tmp_path / "run"
    code, out, err = run(
        "train", "volumes", "--devices", "cpu:2", "--epochs", 1, "--batch-size", 5, "--set", f"data={folder}",
        "--set", "width=2", "--run-dir", directory,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "mae" in out
    assert "synthetic" not in out
    assert b"multitower" not in zipfile.ZipFile(directory / "model.keras").read("config.json")
    keras.models.load_model(directory / "model.keras")


@pytest.mark.slow
def test_towers_train_it_as_one_device_does(run):
    code, out, err = run("verify", "volumes", "--devices", "cpu:2", "--set", "size=8", "--set", "phantoms=40")
    assert (code, err) == (0, "")
    assert "random layers ran as in inference: dropout" in out


@pytest.mark.slow
def test_it_learns_what_the_phantoms_show():
    """Better than the mean, which is 15 off, on phantoms held out; control: without the pictures it is not."""
    keras.utils.set_random_seed(0)
    options = {"size": 12, "phantoms": 200}
    train, held_out = volumes.load_data(**options)
    model = volumes.build_model(**options, decay_epochs=8)
    trainer = multitower.Trainer(model, ["CPU:0", "CPU:1"])
    trainer.fit(train, epochs=20, shuffle=False, verbose=0)
    targets = np.concatenate([y for _, y in held_out.as_numpy_iterator()])
    of_the_mean = np.abs(targets - np.concatenate([y for _, y in train.as_numpy_iterator()]).mean()).mean()
    assert trainer.evaluate(held_out, verbose=0)[1] < of_the_mean / 3
    blind = held_out.map(lambda x, y: ({**x, "volume": 0 * x["volume"]}, y))
    assert trainer.evaluate(blind, verbose=0)[1] > of_the_mean / 2


def test_sexes_are_told_apart():
    assert set(volume_files.SEXES.values()) == {0.0, 1.0}
