"""`multitower verify`: what it prints and returns; 0 equal, 1 not equal, 2 could not run."""

import pytest

from test_cli import JOB, last_json, run_process

BROKEN = """
import tensorflow as tf

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x) - y) ** 2) / 4
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}

def build_model():
    model = Model()
    model.compile("sgd")
    return model
"""
RANDOM = """
import tensorflow as tf

def build_model():
    noise = keras.layers.Lambda(lambda x: x + tf.random.normal((3,)))
    model = keras.Sequential([keras.Input((3,)), noise, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
"""
OTHER_FEATURES = """
def build_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
"""
DATASET = """
def load_data():
    import tensorflow as tf

    x = tf.random.stateless_normal((10, 3), (0, 0))
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(5)
    return batches, batches
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The path of a small job; the working directory is its folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def write(job, *parts):
    job.write_text(job.read_text() + "".join(parts))


def test_digits_in_a_process_of_its_own(tmp_path):
    done = run_process("verify", "--devices", "cpu:4", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = last_json(done.stdout)
    assert report["equal"] is True
    assert 0 <= report["largest_difference"] <= report["bound"]
    assert (report["first_divergence"], report["reason"]) == (None, None)
    assert report["batches"] == [64, 63, 3, 64, 63]
    assert report["notes"] == ["random layers ran as in inference: dropout"]
    assert report["seconds"] < 60
    table = done.stdout.rpartition("\n{")[0]
    assert all(word in table for word in ("4 towers = one device", "yes, up to rounding", "loss", "copies", "equal"))
    assert not list(tmp_path.iterdir())


def test_options_reach_the_job(run, job):
    options = ["--steps", 3, "--batch-size", 7, "--set", "lr=0.01", "--seed", 5, "--devices", "cpu:2", "--json"]
    code, out, err = run("verify", job, *options)
    assert (code, err) == (0, "")
    report = last_json(out)
    assert (report["steps"], report["batches"]) == (3, [6, 7, 1])
    assert report["devices"] == ["CPU:0", "CPU:1"]


def test_a_dataset_gives_its_first_batch(run, job):
    write(job, DATASET)
    code, out, _ = run("verify", job, "--devices", "cpu:2", "--json")
    assert code == 0
    assert last_json(out)["batches"][:3] == [4, 5, 1]


def test_not_equal_is_exit_code_1(run, job):
    write(job, BROKEN)
    code, out, err = run("verify", job, "--devices", "cpu:2", "--json")
    assert (code, err) == (1, "")
    report = last_json(out)
    assert report["equal"] is False
    assert report["largest_difference"] > report["bound"]
    assert report["first_divergence"]["step"] == 1
    assert report["reason"].startswith("the loss is a sum over rows, not a mean")
    assert "the loss is a sum over rows" in " ".join(out.replace("│", " ").split())


def test_not_comparable_is_exit_code_2(run, job):
    write(job, RANDOM)
    code, out, err = run("verify", job, "--devices", "cpu:2", "--json")
    assert (code, err) == (2, "")
    assert last_json(out)["equal"] is None
    assert last_json(out)["reason"].startswith("random numbers or something else that is not deterministic")


def test_could_not_run_is_one_line_and_exit_code_2(run, job):
    write(job, OTHER_FEATURES)
    code, out, err = run("verify", job, "--devices", "cpu:2", "--json")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "one device cannot train this on batches of different sizes" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["verify", "digit"], "did you mean 'digits'?"),
        (["verify", "{job}", "--steps", "2"], "Invalid value for '--steps': 2 is not in the range x>=3"),
        (["verify", "{job}", "--devices", "cpu:99"], "cpu:99"),
        (["verify", "{job}", "--set", "rate=1"], "no parameter 'rate'"),
        (["verify", "{job}", "--epochs", "3"], "No such option '--epochs'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, job, arguments, told):
    code, out, err = run(*(argument.format(job=job) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("multitower: error: ")
    assert err.count("\n") == 1
    assert told in err


def test_an_error_that_is_not_ours_is_exit_code_2(run, job, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("broken")

    monkeypatch.setattr("multitower.verification.job.verify_job", fail)
    code, _, err = run("verify", job)
    assert code == 2
    assert "RuntimeError: broken" in err


def test_help_tells_the_exit_codes(run):
    text = " ".join(run("verify", "--help")[1].split())
    assert "0: equal; 1: not equal; 2: could not run" in text
    assert all(o in text for o in ("--devices", "--steps", "--batch-size", "--set", "--seed", "--json", "--debug"))
    assert "verify" in run("--help")[1]
