"""SIGTERM, SIGINT and SIGKILL to a process that trains: nothing that was saved is lost, and the run goes on."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from multitower import cli, stopping, storage

SOURCE = str(Path(cli.__file__).parents[1])
JOB = """
import keras
import numpy as np
import time

EPOCHS = 4
BATCH_SIZE = 4

def build_model():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model

def load_data(steps=10):
    x = np.random.default_rng(0).normal(size=(4 * steps, 6)).astype("float32")
    return (x, x[:, :1]), (x[:5], x[:5, :1])
"""
# TensorFlow is imported once; a copy of the process, made before TensorFlow starts its threads, trains.
SERVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import keras, tensorflow, multitower.train, multitower.cli
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        code = multitower.cli.main(line.split())
        sys.stdout.flush()
        os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Server:
    """Runs command lines of multitower one after another, each in a process of its own that starts at once."""

    def __init__(self, folder):
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
        self.log = folder / "log"
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, SOURCE],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self):
        return self._process.stdout.readline().strip()

    def start(self, *arguments):
        """Start a command; its process id."""
        self.log.write_text("")
        self._process.stdin.write(" ".join(map(str, arguments)) + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def exit_code(self):
        return int(self._line())

    def until(self, pattern, seconds=60):
        """Wait until the command has printed something."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.log.read_text()):
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.005)

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "job.py").write_text(JOB)
    server = Server(folder)
    yield server
    server.close()


def weights(run_dir):
    import keras

    return keras.models.load_model(run_dir / "model.keras").get_weights()


@pytest.fixture(scope="module")
def whole(server):
    """The weights of a run that nothing disturbs, and how long it takes in seconds."""
    folder = server.log.parent
    start = time.monotonic()
    server.start("train", "job.py", "--devices", "cpu:2", "--run-dir", "whole")
    assert server.exit_code() == 0, server.log.read_text()
    return weights(folder / "whole"), time.monotonic() - start


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


LONG = ("--set", "steps=2000", "--epochs", "50")


def test_the_first_signal_saves_and_a_run_goes_on(server):
    """SIGINT is tried by tests/test_cli.py."""
    folder = server.log.parent
    pid = server.start("train", "job.py", "--devices", "cpu:2", "--run-dir", "stopped", *LONG)
    server.until("Epoch 1/50")
    time.sleep(1)
    os.kill(pid, signal.SIGTERM)
    assert server.exit_code() == stopping.EXIT_CODE == 75, server.log.read_text()
    (path,) = storage.checkpoints(folder / "stopped" / "checkpoints")
    told = server.log.read_text().splitlines()[-1]
    assert told == (
        f"multitower: error: stopped by SIGTERM, saved in stopped/checkpoints/{path.name}; "
        "go on with: multitower train --resume stopped"
    )


def test_a_second_signal_ends_a_step_that_hangs(server, tmp_path):
    """The step sleeps in C++ code of TensorFlow, where no Python handler gets a turn."""
    job = server.log.parent / "hangs.py"
    job.write_text(
        JOB.replace("import time", "import time\nimport tensorflow as tf")
        + """
class Hangs(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)
    def train_step(self, data):
        print("tracing", flush=True)
        tf.numpy_function(lambda: time.sleep(600), [], [])
        return super().train_step(data)

def build_model():
    model = Hangs()
    model.compile("sgd", "mse")
    return model
"""
    )
    pid = server.start("train", "hangs.py", "--devices", "cpu:1", "--run-dir", tmp_path / "run")
    server.until("tracing")
    time.sleep(2)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
    os.kill(pid, 0)
    os.kill(pid, signal.SIGTERM)
    assert server.exit_code() == 128 + signal.SIGTERM


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    threads = threading.active_count()
    with stopping.stop_requests() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 5
        while stop.signal is None and time.monotonic() < end:
            time.sleep(0.01)
        assert stop.signal == "SIGTERM"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert threading.active_count() == threads


def test_outside_the_main_thread_signals_keep_their_meaning():
    seen = []

    def body():
        with stopping.stop_requests() as stop:
            seen.append((stop.signal, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(None, signal.getsignal(signal.SIGTERM))]


def kill_and_resume(server, whole, run_dir, kills, seed):
    """Kill a run `kills` times at random moments after its start, go on each time, and compare its end."""
    random_moment = random.Random(seed)
    folder = server.log.parent
    arguments = ["job.py", "--run-dir", run_dir, "--save-steps", "3"]
    expected, seconds = whole
    killed = before = 0
    for _ in range(kills):
        pid = server.start("train", "--devices", "cpu:2", *arguments)
        time.sleep(random_moment.uniform(0.0, seconds))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = server.exit_code()
        killed += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), server.log.read_text()
        found = storage.checkpoints(folder / run_dir / "checkpoints")
        for path in found:
            storage.checked(path)
        newest = int(found[-1].name.split("-")[0]) if found else 0
        assert newest >= before, "a checkpoint was lost"
        before = newest
        if code == 0:
            break
        if (folder / run_dir / "run.json").is_file():
            arguments = ["--resume", run_dir, "--save-steps", "3"]
    if code != 0:
        server.start("train", "--devices", "cpu:2", *arguments)
        assert server.exit_code() == 0, server.log.read_text()
    assert_same(weights(folder / run_dir), expected)
    return killed


@pytest.mark.slow
def test_kill_at_twenty_random_moments(server, whole):
    killed, round_ = 0, 0
    while killed < 20:
        killed += kill_and_resume(server, whole, f"killed-{round_}", 20 - killed, round_)
        round_ += 1


@pytest.mark.slow
def test_kill_at_two_random_moments(server, whole):
    kill_and_resume(server, whole, "killed", 2, 100)
