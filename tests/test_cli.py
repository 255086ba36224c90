"""The command line: what it prints, writes and returns; every mistake is one line on stderr and exit code 2."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from multitower import cli, train
from multitower.jobs.digits import load_data

JOB = """
import keras
import numpy as np

EPOCHS = 2
BATCH_SIZE = 4

def build_model(lr=0.1):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(lr), "mse", metrics=["mae"])
    return model

def load_data(rows=10):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    return (x, x[:, :1]), (x[:5], x[:5, :1])
"""
DATASET = """
import tensorflow as tf

def load_data({parameter}):
    x = tf.random.stateless_normal((10, 3), (0, 0))
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch({size})
    return batches, batches
"""
COMMAND = [sys.executable, "-m", "multitower.cli"]
# The package under test from any working directory, also where PYTHONPATH holds a relative path
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The path of a small job; the working directory is an empty one."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def run_process(*arguments, cwd):
    """Run the command line in a process of its own, as a user does."""
    command = [*COMMAND, *arguments]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)


def last_json(stdout):
    """The object on the last line, in strict JSON: no NaN."""
    return json.loads(stdout.splitlines()[-1], parse_constant=pytest.fail)


CALLBACKS = """
def make_callbacks():
    return [keras.callbacks.LambdaCallback(on_train_begin=lambda logs: print("the job's callback"))]
"""


# Help and version


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["env", "-h"], ["--version"], ["train", "--epoch"]]
)
def test_help_does_not_import_tensorflow(arguments):
    code = (
        "import sys, multitower.cli; multitower.cli.main(sys.argv[1:]); "
        "sys.exit(bool({'tensorflow', 'keras', 'numpy', 'rich'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], env=ENVIRONMENT, check=True, capture_output=True)


def test_help_names_commands_and_options(run):
    assert all(word in run("--help")[1] for word in ("train", "env", "--debug", "--version"))
    text = run("train", "--help")[1]
    options = [
        "--devices",
        "--epochs",
        "--batch-size",
        "--set",
        "--run-dir",
        "--scale-lr",
        "--placement",
        "--reduce",
        "--seed",
        "--json",
        "--debug",
    ]
    options += ["--resume", "--allow-older", "--save-epochs", "--save-steps", "--keep", "--evaluate-on", "--gradient-n"]
    assert all(option in text for option in options)
    assert "accuracy and loss are those of the validation data" in " ".join(text.split())


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert re.fullmatch(r"multitower \d+\.\d+\.\d+\n", out)


def test_no_command_shows_the_help(run):
    code, _, err = run()
    assert code == 2
    assert "Usage: multitower" in err


# train


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """One epoch of digits on two towers, as a user runs it: the finished process and its directory."""
    cwd = tmp_path_factory.mktemp("digits")
    done = run_process("train", "--devices", "cpu:2", "--epochs", "1", "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done, cwd


def test_train_prints_progress_table_and_json(digits_run):
    done, _ = digits_run
    assert done.stderr == ""
    assert re.search(r"^23/23 - .* - val_loss: ", done.stdout, re.MULTILINE)
    assert re.search(r"rows per tower *│ 32 \+ 32 of a batch of 64", done.stdout)
    report = last_json(done.stdout)
    assert (report["job"], report["epochs"], report["seed"], report["params"]) == ("digits", 1, 0, {})
    assert (report["devices"], report["towers"]) == (["CPU:0", "CPU:1"], 2)
    assert (report["batch_size"], report["rows_per_tower"]) == (64, [32, 32])
    assert report["accuracy"] == report["metrics"]["validation"]["accuracy"]
    assert report["loss"] == report["metrics"]["validation"]["loss"]
    assert report["metrics"]["train"]["accuracy"] > 0.1
    assert report["examples_per_second"] > 100
    assert report["seconds"] > 0


def test_train_writes_model_history_and_report(digits_run):
    done, cwd = digits_run
    report = last_json(done.stdout)
    assert re.fullmatch(r"runs/digits-\d{8}-\d{6}", report["run_dir"])
    files = {str(path.relative_to(cwd / report["run_dir"])) for path in cwd.rglob("*") if path.is_file()}
    logs = {file for file in files if not file.startswith(("checkpoints/", "logs/tensorboard/"))}
    assert logs == {
        ".lock",
        "run.json",
        "model.keras",
        "logs/history.csv",
        "logs/report.json",
        "logs/curves.png",
    }
    assert "checkpoints/000001-epoch-1-batch-0/manifest.json" in files
    assert sum(file.startswith("logs/tensorboard/") for file in files) == 2
    assert json.loads((cwd / report["logs"] / "report.json").read_text()) == report
    with open(cwd / report["logs"] / "history.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1
    columns = {"epoch", "accuracy", "loss", "val_accuracy", "val_loss", "learning_rate", "examples_per_second"}
    assert rows[0].keys() == columns
    assert float(rows[0]["val_loss"]) == pytest.approx(report["loss"], rel=1e-5)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 2), ("sqrt", 2**0.5)])
def test_scale_lr_follows_the_global_batch_and_is_printed(run, job, rule, factor):
    job.write_text(JOB + CALLBACKS)
    code, out, err = run(
        "train", job, "--devices", "cpu:2", "--epochs", 1, "--batch-size", 8, "--scale-lr", rule, "--json"
    )
    assert (code, err) == (0, "")
    assert "the job's callback" in out
    assert f"that of the job × {factor:.4g} (--scale-lr {rule})" in out
    report = last_json(out)
    assert (report["scale_lr"], report["lr_factor"]) == (rule, factor)
    model = keras.models.load_model(report["model"])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize(("placement", "reduce"), [("replicated", "ring"), ("shared:cpu:1", "host")])
def test_placement_and_reduce_are_as_asked(run, job, placement, reduce):
    arguments = ("--devices", "cpu:2", "--epochs", 1, "--placement", placement, "--reduce", reduce, "--json")
    code, out, err = run("train", job, *arguments)
    assert (code, err) == (0, "")
    assert f"2, variables {placement.partition(':')[0]}, reduce by {reduce}" in out
    report = last_json(out)
    assert (report["placement"], report["reduce"]) == (placement.partition(":")[0], reduce)
    assert Path(report["checkpoints"]).is_dir()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--placement", "independent", "placement='independent' trains no model"),
        ("--placement", "mirrored", "placement='mirrored' is unknown"),
        ("--reduce", "nccl", "NCCL needs a GPU for every tower"),
    ],
)
def test_placement_and_reduce_that_cannot_be(run, job, option, value, message):
    code, _, err = run("train", job, "--devices", "cpu:2", option, value)
    assert code == 2
    assert message in err
    assert list(Path.cwd().iterdir()) == []


def test_rate_that_cannot_be_scaled_and_rule_that_is_none(run, job):
    job.write_text(JOB.replace("SGD(lr)", "SGD(lambda: lr)"))
    code, _, err = run("train", job, "--devices", "cpu:2", "--batch-size", 8, "--scale-lr", "sqrt")
    assert code == 2
    assert "the learning rate of SGD is function; only a number or a Keras LearningRateSchedule can be scaled" in err
    code, _, err = run("train", job, "--scale-lr", "half")
    assert code == 2
    assert "'half' is not one of 'none', 'linear', 'sqrt'" in err


def test_plain_keras_loads_the_model_without_multitower(digits_run):
    done, cwd = digits_run
    report = last_json(done.stdout)
    code = """
import sys
sys.modules["multitower"] = None  # importing it now fails
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
x, y = np.load(sys.argv[2]), np.load(sys.argv[3])
print(model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"])
"""
    paths = [str(cwd / name) for name in ("x.npy", "y.npy")]
    for path, array in zip(paths, load_data()[1], strict=True):
        np.save(path, array)
    shown = subprocess.run(
        [sys.executable, "-c", code, str(cwd / report["model"]), *paths], capture_output=True, text=True, check=True
    )
    assert float(shown.stdout) == pytest.approx(report["accuracy"], abs=1e-6)


def test_options_reach_the_job(run, job, tmp_path):
    options = ["--epochs", 3, "--batch-size", 5, "--set", "lr=0.01", "--set", "rows=15", "--seed", 7]
    code, out, err = run("train", job, *options, "--run-dir", tmp_path / "run", "--devices", "cpu:4", "--json")
    assert (code, err) == (0, "")
    report = last_json(out)
    assert report["params"] == {"lr": 0.01, "rows": 15}
    assert (report["epochs"], report["seed"], report["batch_size"]) == (3, 7, 5)
    assert report["rows_per_tower"] == [2, 1, 1, 1]
    assert report["model"] == str(tmp_path / "run" / "model.keras")
    model = keras.models.load_model(report["model"])
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.01)
    assert int(model.optimizer.iterations.numpy()) == 9


def test_without_a_metric_named_accuracy_it_is_null(run, job):
    code, out, _ = run("train", job, "--devices", "cpu:1", "--json")
    report = last_json(out)
    assert code == 0
    assert report["accuracy"] is None
    assert report["metrics"]["validation"].keys() == {"loss", "mae"}


def test_runs_of_one_seed_are_alike_and_of_another_are_not(job, tmp_path):
    losses = [
        train.run(str(job), "cpu:2", run_dir=tmp_path / str(number), seed=seed).loss
        for number, seed in enumerate([1, 1, 2])
    ]
    assert losses[0] == losses[1] != losses[2]


def test_an_empty_run_directory_is_used(run, job, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run("train", job, "--devices", "cpu:1", "--run-dir", tmp_path / "empty")[0] == 0
    assert (tmp_path / "empty" / "model.keras").is_file()


def test_batch_size_goes_to_a_dataset_that_accepts_it(run, job):
    job.write_text(JOB + DATASET.format(parameter="batch_size=2", size="batch_size"))
    code, out, err = run("train", job, "--batch-size", 5, "--devices", "cpu:2", "--json")
    assert (code, err) == (0, "")
    assert last_json(out)["batch_size"] == 5
    assert last_json(out)["examples_per_second"] > 0


def test_a_dataset_keeps_its_own_batches(run, job):
    job.write_text(JOB + DATASET.format(parameter="", size=3))
    code, out, err = run("train", job, "--devices", "cpu:2", "--json")
    assert (code, err) == (0, "")
    assert last_json(out)["rows_per_tower"] == [2, 1]


def test_numbers_that_are_not_finite_are_null_in_json(run, job):
    code, out, _ = run("train", job, "--devices", "cpu:1", "--set", "lr=1e38", "--epochs", 3, "--json")
    assert code == 0
    assert last_json(out)["loss"] is None


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_digits_reach_97_percent_in_a_minute(tmp_path, devices):
    done = run_process("train", "--devices", devices, "--json", cwd=tmp_path)
    report = last_json(done.stdout)
    assert report["accuracy"] > 0.97
    assert report["seconds"] < 60


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trian"], "No such command 'trian'"),
        (["train", "--device", "cpu:1"], "No such option '--device'"),
        (["train", "{job}", "more"], "unexpected extra argument (more)"),
        (["train", "--epochs", "0"], "Invalid value for '--epochs': 0 is not in the range x>=1"),
        (["train", "--batch-size", "many"], "Invalid value for '--batch-size': 'many' is not a valid integer"),
        (["train", "--seed", "-1"], "Invalid value for '--seed'"),
        (["train", "digit"], "did you mean 'digits'?"),
        (["train", "{job}x"], "no job"),
        (["train", "{job}", "--set", "lr"], "parameter 'lr'; expected NAME=VALUE"),
        (["train", "{job}", "--set", "rate=1"], "no parameter 'rate'; build_model and load_data accept: lr, rows"),
        (["train", "{job}", "--set", "rows=0"], "load_data returned as train arrays without rows"),
        (["train", "{job}", "--set", "rows=x"], "load_data raised TypeError: "),
        (["train", "{job}", "--devices", "cpu:99"], "cpu:99"),
        (["train", "{job}", "--devices", "cpu:0"], "cpu:0"),
        (["train", "{job}", "--devices", "tpu:1"], "tpu:1"),
        (["train", "{job}", "--run-dir", "{job}"], "is a file; give --run-dir a new or empty directory"),
        (["train", "{job}", "--run-dir", "{folder}"], "is not empty and is not overwritten; give --run-dir another"),
        (["train", "{job}", "--run-dir", "{job}/run"], "cannot be made (Not a directory); give --run-dir another one"),
        (["train", "--resume", "{folder}", "--run-dir", "x"], "a run goes on in its own directory; leave --run-dir"),
        (["train", "--resume", "{folder}"], "no run has begun there (no run.json)"),
        (["env", "--devices", "gpu:77"], "gpu:77"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, job, tmp_path, arguments, told):
    code, out, err = run(*(argument.format(job=job, folder=tmp_path) for argument in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("multitower: error: ")
    assert err.count("\n") == 1
    assert told in err
    assert not list((tmp_path / "cwd").iterdir())


def test_batch_size_for_a_dataset_that_does_not_accept_it(run, job):
    job.write_text(JOB + DATASET.format(parameter="", size=3))
    code, _, err = run("train", job, "--batch-size", 5, "--devices", "cpu:1")
    assert code == 2
    assert "--batch-size 5: job job loads a tf.data.Dataset" in err
    assert "load_data has no parameter batch_size" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "nothing.py"], "no job file 'nothing.py'"),
        (["train", "--set", "width=wide"], "build_model raised"),
    ],
)
def test_a_mistake_in_a_process_of_its_own(tmp_path, arguments, told):
    done = run_process(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("multitower: error: ")
    assert done.stderr.count("\n") == 1
    assert told in done.stderr
    assert not list(tmp_path.iterdir())


FAILING = """
def load_data():
    import tensorflow as tf

    def check(x, y):
        with tf.control_dependencies([tf.debugging.assert_less(x, 5.0, "the data is\\nbad")]):
            return tf.identity(x), y

    x = tf.concat([tf.ones((8, 3)), tf.fill((2, 3), 9.0)], 0)
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2).map(check)
    return batches, batches
"""


def test_a_failure_in_training_is_one_line_and_exit_code_1(run, job):
    job.write_text(JOB + FAILING)
    code, out, err = run("train", job, "--devices", "cpu:2")
    assert code == 1
    assert "Epoch 1/2" in out
    assert err.startswith("multitower: error: InvalidArgumentError: ")
    assert err.count("\n") == 1
    assert re.search(r"; runs/job-\d{8}-\d{6} holds no file \(--debug shows the traceback\)$", err)


@pytest.mark.parametrize("place", [["--debug", "train", "{job}"], ["train", "{job}", "--debug"]])
def test_debug_shows_the_traceback(run, job, place):
    job.write_text(JOB + "\ndef load_data():\n    return 1 // 0\n")
    code, _, err = run(*(argument.format(job=job) for argument in place))
    assert code == 2
    assert "Traceback (most recent call last)" in err
    assert "ZeroDivisionError" in err
    assert err.splitlines()[-1].startswith("multitower: error: job job: load_data raised ZeroDivisionError")


def test_a_long_message_is_cut(run, job):
    job.write_text("raise ValueError('x' * 10_000)")
    _, _, err = run("train", job)
    assert len(err) < 1000


def test_ctrl_c_saves_and_is_one_line_and_exit_code_75(job, tmp_path):
    with subprocess.Popen(
        [*COMMAND, "train", str(job), "--epochs", "100000", "--devices", "cpu:1", "--run-dir", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Epoch 3/"):
                process.send_signal(signal.SIGINT)
                break
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    saved = r"stopped by SIGINT, saved in run/checkpoints/\d{6}-epoch-\d+-batch-\d+"
    assert re.fullmatch(rf"multitower: error: {saved}; go on with: multitower train --resume run\n", err)


# env


def test_env_shows_devices_versions_and_collectives(run):
    code, out, err = run("env", "--devices", "cpu:2", "--json")
    assert (code, err) == (0, "")
    found = last_json(out)
    assert [device["name"] for device in found["devices"]] == ["CPU:0", "CPU:1"]
    assert found["reduce"]["name"] == "host"
    assert found["reduce"]["reason"]
    assert found["placement"]["name"] == "shared"
    assert found["keras"] == keras.__version__
    table = out.rpartition("{")[0]
    assert all(word in table for word in ("CPU:1", "tensorflow", "keras", "python", "host: ", "memory growth"))


def test_env_of_one_device_needs_no_collectives(run):
    _, out, _ = run("env", "--devices", "cpu:1", "--json")
    assert last_json(out)["reduce"]["name"] == "none"
