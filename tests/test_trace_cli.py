"""`multitower trace`: what it prints, writes and returns; 0, 1 with --expect-colocated, 2 where something is wrong."""

import gzip
import json

import pytest

from test_cli import JOB, last_json, run_process

NAIVE = """
import tensorflow as tf

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, activation="tanh")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        with tf.device("/device:CPU:0"):
            gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

def build_model():
    model = Model()
    model.compile("sgd", "mse")
    return model
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The path of a small job; the working directory is an empty one."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def test_digits_in_a_process_of_its_own(tmp_path):
    options = ["--devices", "cpu:2", "--steps", "2", "--json", "-o", "out", "--expect-colocated"]
    done = run_process("trace", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = last_json(done.stdout)
    assert (report["devices"], report["steps"], report["misplaced"]) == (["CPU:0", "CPU:1"], 2, [])
    for device in report["devices"]:
        share = report["where_the_time_went"][device]
        names = ("compute", "exposed", "copies", "input", "waiting", "host")
        assert sum(share["percent"][name] for name in names) == pytest.approx(100, abs=2)
        assert sum(share[f"{name}_seconds"] for name in names) == pytest.approx(report["step_seconds"])
        assert report["placement"][device]["backward"] > 20
    assert report == json.loads((tmp_path / "out/timeline.json").read_text()) | {
        "files": report["files"],
        "seconds": report["seconds"],
    }
    events = json.loads(gzip.decompress((tmp_path / "out/trace.json.gz").read_bytes()))["traceEvents"]
    assert {e["name"] for e in events if e.get("cat") == "step"} == {"step 0", "step 1"}
    assert "<svg" in (tmp_path / "out/report.html").read_text()
    table = done.stdout.rpartition("\n{")[0]
    assert all(word in table for word in ("critical path", "advice", "slowest", "exposed", "colocated"))


def test_gradients_taken_elsewhere_are_exit_code_1_when_that_is_asked(run, job):
    job.write_text(job.read_text() + NAIVE)
    code, out, _ = run("trace", job, "--devices", "cpu:2", "--steps", 1, "-o", "one", "--json")
    assert code == 0
    misplaced = last_json(out)["misplaced"]
    assert {(m["device"], *m["forward_devices"]) for m in misplaced} == {("CPU:0", "CPU:1")}
    code, out, err = run("trace", job, "--devices", "cpu:2", "--steps", 1, "-o", "two", "--expect-colocated")
    assert (code, err) == (1, "")
    assert f"no: {len(misplaced)} of " in " ".join(out.replace("│", " ").split())


def test_options_reach_the_job_and_nothing_is_overwritten(run, job, tmp_path):
    options = ["--devices", "cpu:2", "--steps", 1, "--batch-size", 5, "--set", "lr=0.01", "--seed", 3]
    assert run("trace", job, *options)[0] == 0
    (folder,) = (tmp_path / "cwd" / "traces").iterdir()
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    code, out, err = run("trace", job, *options, "-o", folder)
    assert (code, out) == (2, "")
    assert "is not empty and is not overwritten" in err
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trace", "digit"], "did you mean 'digits'?"),
        (["trace", "{job}", "--steps", "0"], "Invalid value for '--steps': 0 is not in the range x>=1"),
        (["trace", "{job}", "--devices", "cpu:99"], "cpu:99"),
        (["trace", "{job}", "--set", "rate=1"], "no parameter 'rate'"),
        (["trace", "{job}", "-o", "{job}"], "is a file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, job, tmp_path, arguments, told):
    code, out, err = run(*(argument.format(job=job) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("multitower: error: ")
    assert err.count("\n") == 1
    assert told in err
    assert not list((tmp_path / "cwd").iterdir())


def test_help_tells_the_exit_codes_and_options(run):
    text = " ".join(run("trace", "--help")[1].split())
    assert "with --expect-colocated 1 if there is a backward operation" in text
    assert all(o in text for o in ("--devices", "--steps", "--output", "--expect-colocated", "--json", "--debug"))
    assert "trace" in run("--help")[1]
