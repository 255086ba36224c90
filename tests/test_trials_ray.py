"""Trials on a Ray cluster: a local one that other processes connect to. Slow: it takes ten seconds to start."""

import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from trial_programs import ENVIRONMENT, alive, marks, program, started

pytestmark = pytest.mark.slow
RAY = ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}  # as all of a cluster have

# A process of its own: the runtime's threads and warnings are not those of the tests
CLUSTER = """
import sys
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster with two CPUs."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'multitower[ray]'")
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=RAY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()


def search(cluster, command, study, *options):
    arguments = [sys.executable, "-m", "multitower.cli", "trials", "--ray", cluster, "--run-dir", str(study), "--json"]
    words = command if command[0] == "digits" else ["--", *command]
    done = subprocess.run([*arguments, *options, *words], env=RAY, capture_output=True, text=True, timeout=90)
    return done, json.loads(done.stdout.splitlines()[-1]) if "{" in done.stdout else None


def test_results_have_the_same_form_as_on_the_machine(cluster, tmp_path):
    text = "mark('ran'); print('seen', os.environ['CUDA_VISIBLE_DEVICES'])"
    text += "; if {x} == 3:;     sys.exit('bad'); print(json.dumps({'loss': ({x} - 2) ** 2}))"
    command = program(text)(tmp_path)
    done, found = search(cluster, command, tmp_path / "study", "--set", "x=1,2,3,4", "--metric", "loss")
    assert done.returncode == 1, done.stderr
    assert [trial["status"] for trial in found["trials"]] == ["done", "done", "failed", "done"]
    assert found["trials"][2]["reason"] == "exit code 1: bad"
    assert found["best"]["params"] == {"x": 2}
    assert all(trial["device"].endswith(" CPU") and trial["seconds"] > 0 for trial in found["trials"])
    assert Path(found["best"]["logs"], "stdout.log").read_text().startswith("seen -1\n")
    assert len(marks(tmp_path)) == 4


def test_hangs_and_early_ends_are_found_there_too(cluster, tmp_path):
    text = "mark('ran'); print(json.dumps({'loss': {x}}), flush=True); time.sleep(60)"
    options = ["--set", "x=1", "--metric", "loss", "--hang-seconds", "2"]
    _, found = search(cluster, program(text)(tmp_path), tmp_path / "study", *options)
    assert found["trials"][0]["reason"] == "hangs: no output for 2 s"
    assert not any(map(alive, started(tmp_path)))


def test_a_job_on_a_cluster(cluster, tmp_path):
    options = ["--set", "width=4", "--set", "lr=0.01,0.001", "--epochs", "1", "--metric", "val_accuracy"]
    done, found = search(cluster, ["digits"], tmp_path / "study", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Path(found["best"]["logs"]) / "run"
    assert (run / "model.keras").stat().st_size > 1000
    report = json.loads((run / "logs" / "report.json").read_text())
    assert report["accuracy"] == found["best"]["metric"]


def test_no_cluster_is_one_line_and_exit_code_2(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'multitower[ray]'")
    done, _ = search("127.0.0.1:1", ["true", "{x}"], tmp_path / "study", "--set", "x=1")
    assert done.returncode == 2
    assert "no Ray cluster there" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "study").exists()
