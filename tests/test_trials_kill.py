"""Trials whose runner is killed: nothing is lost, nothing runs twice to its end, nothing is left running."""

import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from multitower import trials
from trial_programs import ENVIRONMENT, alive, marks, program, started

TRIALS = 12


@pytest.fixture(autouse=True)
def own_devices(tmp_path, monkeypatch):
    """Locks of devices in a folder of the test's own: other tests run beside it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def runner():
    """A function that starts a runner in a process of its own, as in a terminal of its own."""
    begun = []

    def start(study, command, *arguments):
        begin = [sys.executable, "-m", "multitower.cli", "trials", "--devices", "cpu:2", "--run-dir", str(study)]
        with open(study.with_suffix(".out"), "w") as out:
            process = subprocess.Popen(
                [*begin, *arguments, "--", *command],
                env=ENVIRONMENT | {"XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.wait()


def output(study, process):
    """What a runner wrote, after its end."""
    process.wait(60)
    return study.with_suffix(".out").read_text()


def statuses(study):
    """Status of each trial as another program reads it."""
    with closing(sqlite3.connect(study / "study.db")) as db:
        return [row[0] for row in db.execute("SELECT status FROM results ORDER BY number")]


SLOW_TRIAL = program("mark('begin'); time.sleep(0.4); mark('end'); print(json.dumps({'loss': {x}}))")
SEARCH = ["--set", f"x={','.join(map(str, range(TRIALS)))}", "--metric", "loss"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_kills_of_the_runner(tmp_path, runner, seed):
    rng, study, kills = random.Random(seed), tmp_path / "study", 0
    command = SLOW_TRIAL(tmp_path)
    search = ["--set", "x=" + ",".join(map(str, range(40))), "--metric", "loss", "--resume"]
    while kills < 20:
        process = runner(study, command, *search)
        time.sleep(rng.uniform(0.0, 1.5))
        process.kill()
        process.wait()
        kills += 1
        done = [n for n, s in enumerate(statuses(study)) if s == "done"] if (study / "study.db").exists() else []
        assert set(done) <= {int(x) for x in ended(tmp_path)}
    process = runner(study, command, *search, "--json")
    out = output(study, process)
    assert process.returncode == 0, out
    found = json.loads(out.splitlines()[-1])
    assert [trial["metric"] for trial in found["trials"]] == list(range(40))
    assert Counter(ended(tmp_path)) == Counter(map(str, range(40)))
    assert not [pid for pid in started(tmp_path) if alive(pid)]


def ended(folder):
    return [trial for kind, trial, _ in marks(folder) if kind == "end"]


def test_a_killed_runner_takes_its_trials_with_it_and_resumes(tmp_path, runner):
    study = tmp_path / "study"
    command = program("mark('begin'); subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)")(
        tmp_path
    )
    process = runner(study, command, "--set", "x=1,2,3")
    wait_until(lambda: len(marks(tmp_path)) == 2)
    children = [child for pid in started(tmp_path) for child in below(pid)]
    assert len(children) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, [*started(tmp_path), *children])), seconds=3)
    quick = program("mark('end')")(tmp_path)
    (tmp_path / "program.py").write_text(Path(quick[1]).read_text())
    found = trials.run(resume=True, run_dir=study, devices="cpu:2")
    assert [trial["status"] for trial in found.trials] == ["done"] * 3
    assert attempts(study) == {0: ["interrupted", "done"], 1: ["interrupted", "done"], 2: ["done"]}


def attempts(study):
    found = {}
    with closing(sqlite3.connect(study / "study.db")) as db:
        for trial, status in db.execute("SELECT trial, status FROM attempts ORDER BY trial, attempt"):
            found.setdefault(trial, []).append(status)
    return found


def below(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def test_a_trial_that_has_printed_its_result_when_the_runner_dies_may_end(tmp_path, runner):
    study = tmp_path / "study"
    text = "print(json.dumps({'loss': 7}), flush=True); mark('printed'); time.sleep(1.0); mark('end')"
    process = runner(study, program(text)(tmp_path), "--set", "x=1,2", "--metric", "loss")
    wait_until(lambda: len(marks(tmp_path)) == 2)
    process.kill()
    process.wait()
    found = trials.run(resume=True, run_dir=study, devices="cpu:2")
    assert [trial["metric"] for trial in found.trials] == [7, 7]
    assert Counter(ended(tmp_path)) == {"1": 1, "2": 1}
    assert attempts(study) == {0: ["done"], 1: ["done"]}


def test_a_killed_guard_does_not_stop_the_others(tmp_path, runner):
    study = tmp_path / "study"
    command = program("mark('begin'); time.sleep(1.0 if {x} else 60)")(tmp_path)
    process = runner(study, command, "--set", "x=0,1,2", "--json")
    wait_until(lambda: (study / "trials" / "0" / "1" / "process.json").exists())
    guard, _ = json.loads((study / "trials" / "0" / "1" / "process.json").read_text())["guard"]
    wait_until(lambda: marks(tmp_path))
    os.kill(guard, signal.SIGKILL)
    out = output(study, process)
    assert process.returncode == 1
    found = json.loads(out.splitlines()[-1])["trials"]
    assert [trial["status"] for trial in found] == ["failed", "done", "done"]
    assert found[0]["reason"] == "its guard was killed"
    assert not any(map(alive, started(tmp_path)))


@pytest.mark.parametrize(("presses", "code", "status"), [(1, 3, "done"), (2, 130, "waiting")])
def test_ctrl_c(tmp_path, runner, presses, code, status):
    study = tmp_path / "study"
    process = runner(study, program("mark('begin'); time.sleep(2.0); mark('end')")(tmp_path), "--set", "x=1,2,3,4")
    wait_until(lambda: len(marks(tmp_path)) == 2)
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    out = output(study, process)
    assert process.returncode == code, out
    assert statuses(study) == [status, status, "waiting", "waiting"]
    assert not any(map(alive, started(tmp_path)))


def test_terminating_the_runner_ends_its_trials(tmp_path, runner):
    process = runner(tmp_path / "study", program("mark('begin'); time.sleep(60)")(tmp_path), "--set", "x=1,2")
    wait_until(lambda: len(marks(tmp_path)) == 2)
    process.terminate()
    process.wait(30)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(map(alive, started(tmp_path)))


def test_one_runner_for_a_study(tmp_path, runner):
    study = tmp_path / "study"
    process = runner(study, program("mark('begin'); time.sleep(60)")(tmp_path), "--set", "x=1,2")
    wait_until(lambda: len(marks(tmp_path)) == 2)
    with pytest.raises(ValueError, match=f"is being run by process {process.pid}"):
        trials.run(resume=True, run_dir=study, devices="cpu:2")
    process.kill()
    process.wait()


def test_two_runners_do_not_share_a_device(tmp_path, runner):
    command = program("mark('begin'); time.sleep(0.3); mark('end')")(tmp_path)
    both = [runner(tmp_path / name, command, "--set", "x=1,2,3,4") for name in ("one", "two")]
    outs = [output(tmp_path / name, process) for name, process in zip(("one", "two"), both, strict=True)]
    assert [process.returncode for process in both] == [0, 0], outs
    times = []
    for name in ("one", "two"):
        with closing(sqlite3.connect(tmp_path / name / "study.db")) as db:
            times += db.execute("SELECT device, began, ended FROM attempts").fetchall()
    assert len(times) == 8
    for device in ("CPU:0", "CPU:1"):
        spans = sorted(span[1:] for span in times if span[0] == device)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert any("is used by process" in out for out in outs)
