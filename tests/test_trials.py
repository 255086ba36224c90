"""Parameter searches: the settings that run, what their processes see, and that no bad trial stops the others."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from statistics import median

import pytest

from multitower import trials
from multitower.errors import DeviceError, JobError
from multitower.trials.live import Lines
from multitower.trials.store import Store
from test_cli import JOB, last_json
from trial_programs import ENVIRONMENT, alive, marks, program, started

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def own_devices(tmp_path, monkeypatch):
    """Locks of devices in a folder of the test's own, and an empty working directory."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def search(tmp_path):
    """A function that searches x with a small program, and where the study is."""

    def call(text, settings=None, **options):
        options = {"devices": "cpu:2", "metric": "loss", "run_dir": tmp_path / "study"} | options
        return trials.run(program(text)(tmp_path), settings or {"x": [1, 2, 3]}, **options)

    return call


def rows(folder, query):
    with closing(sqlite3.connect(folder / "study" / "study.db")) as db:
        return db.execute(query).fetchall()


LOSS = "print(json.dumps({'loss': ({x} - 2) ** 2}))"


def test_every_setting_runs_once_and_the_best_is_found(search, tmp_path):
    found = search(f"mark('ran'); {LOSS}", {"x": [3, 1, 2, 1]})
    assert sorted(x for _, x, _ in marks(tmp_path)) == ["1", "2", "3"]
    assert [trial["params"] for trial in found.trials] == [{"x": 3}, {"x": 1}, {"x": 2}]
    assert [trial["metric"] for trial in found.trials] == [1.0, 1.0, 0.0]
    assert found.best == found.trials[2]
    assert found.exit_code == 0
    assert all(trial["seconds"] > 0 and trial["device"] in ("CPU:0", "CPU:1") for trial in found.trials)
    assert Path(str(found.picture)).read_bytes().startswith(b"\x89PNG")
    assert rows(tmp_path, "SELECT param_x, status, metric FROM results ORDER BY metric, number")[0] == (2, "done", 0.0)
    assert json.loads((tmp_path / "study" / "ranking.json").read_text()) == json.loads(found.as_json())
    files = {path.name for path in (tmp_path / "study").iterdir()}
    assert files == {"study.db", "runner.lock", "trials", "ranking.json", "trials.png"}  # one file of results


def test_a_larger_metric_can_be_better(search):
    assert search("print(json.dumps({'accuracy': {x}}))", metric="accuracy").best["params"] == {"x": 3}


def test_whether_large_is_good_has_to_be_told_where_the_name_does_not(search):
    with pytest.raises(JobError, match="its name does not tell whether small or large is good; give --mode"):
        search(LOSS, metric="goodness")
    found = search("print(json.dumps({'goodness': {x}}))", metric="goodness", mode="max", run_dir="other")
    assert found.best["params"] == {"x": 3}


def test_repetitions_have_seeds_of_their_own_and_count_by_their_mean(tmp_path):
    code = "import json, sys; print(json.dumps({'loss': int(sys.argv[1]) + int(sys.argv[2])}))"
    command = [sys.executable, "-c", code, "{x}", "{seed}"]
    found = trials.run(command, {"x": [1, 2]}, "cpu:2", repeat=3, seed=5, metric="loss", run_dir=tmp_path / "study")
    assert [trial["metric"] for trial in found.trials] == [7.0, 8.0]
    assert [repeat["seed"] for repeat in found.trials[0]["repeats"]] == [5, 6, 7]
    assert found.best["params"] == {"x": 1}


def test_what_a_trial_sees_of_the_machine(search, tmp_path):
    seen = "print(json.dumps({'loss': 0, 'cores': sorted(os.sched_getaffinity(0)), **dict(os.environ)}))"
    found = search(seen, {"x": [1, 2, 3, 4]}, devices=f"cpu:{min(2, len(CORES))}")
    half = len(CORES) // 2 or 1
    cores = {"CPU:0": CORES[:half], "CPU:1": CORES[half:]}
    recorded = rows(tmp_path, "SELECT environment FROM attempts ORDER BY trial")
    for trial, (environment,) in zip(found.trials, recorded, strict=True):
        printed = json.loads((Path(trial["logs"]) / "stdout.log").read_text())
        assert printed["cores"] == cores[trial["device"]]
        assert printed["CUDA_VISIBLE_DEVICES"] == "-1"
        assert printed["TF_NUM_INTRAOP_THREADS"] == printed["OMP_NUM_THREADS"] == str(half)
        assert printed["MULTITOWER_TRIAL"] == str(found.trials.index(trial))
        assert all(printed[name] == value for name, value in json.loads(environment).items())


def test_two_trials_on_a_device_share_its_threads(search):
    seen = "print(json.dumps({'loss': 0, 'threads': os.environ['OMP_NUM_THREADS']})); time.sleep(0.5)"
    found = search(seen, {"x": [1, 2]}, devices="cpu:1", per_device=2)
    texts = [(Path(trial["logs"]) / "stdout.log").read_text() for trial in found.trials]
    assert all(json.loads(text)["threads"] == str(max(1, len(CORES) // 2)) for text in texts)
    assert {trial["device"] for trial in found.trials} == {"CPU:0"}


def test_the_gap_between_two_trials_is_short(search, tmp_path):
    search(LOSS, {"x": list(range(8))})
    with closing(Store(tmp_path / "study" / "study.db")) as store:
        gaps = store.gaps()
    assert len(gaps) == 6
    assert 0 <= median(gaps) < 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("print('halfway'); sys.exit('no such number')", "exit code 1: no such number"),
        ("os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("time.sleep(60)", "hangs: no output for 1 s"),
        ("import signal; signal.signal(15, signal.SIG_IGN); os.close(1); time.sleep(60)", "hangs: no output for 1 s"),
        ("os.write(1, os.urandom(100000)); print('{')", "no metric 'loss' on stdout, which has no line of JSON"),
        ("print(json.dumps({'lost': 1}))", "no metric 'loss' on stdout, which has lines of JSON with lost"),
        ("print(json.dumps({'loss': float('nan')}))", "loss is nan; expected a finite number"),
        ("print(json.dumps({'loss': [1]}))", "loss is [1]; expected a finite number"),
    ],
    ids=["crash", "signal", "hang", "stubborn", "garbage", "other-name", "nan", "no-number"],
)
def test_a_bad_trial_fails_alone(search, tmp_path, bad, reason):
    bad = "; ".join(f"    {line}" for line in bad.split("; "))
    found = search(f"mark('ran'); if {{x}} == 2:; {bad}; else:; {LOSS.join(['    ', ''])}", hang_seconds=1)
    assert [trial["status"] for trial in found.trials] == ["done", "failed", "done"]
    assert found.trials[1]["reason"].startswith(reason)
    assert found.trials[1]["metric"] is None
    assert found.best["params"] in ({"x": 1}, {"x": 3})
    assert found.exit_code == 1
    assert not any(map(alive, started(tmp_path)))


def test_what_a_trial_leaves_running_is_ended(search, tmp_path):
    found = search(
        f"p = subprocess.Popen(['sleep', '60'], start_new_session=True); x = p.pid; mark('x'); x = '2'; {LOSS}"
    )
    assert found.exit_code == 0
    assert not any(alive(pid) for _, pid, _ in marks(tmp_path))


def test_a_program_that_cannot_be_started(tmp_path):
    names = [sys.executable, str(tmp_path / "nothing")]
    found = trials.run(["{program}", "-c", ""], {"program": names}, "cpu:1", run_dir=tmp_path / "study")
    assert [trial["status"] for trial in found.trials] == ["done", "failed"]
    assert "could not be started" in found.trials[1]["reason"]
    assert "No such file" in found.trials[1]["reason"]


@pytest.mark.parametrize("says", ["raise MemoryError", "os.kill(os.getpid(), 9)"], ids=["message", "killed"])
def test_out_of_memory_is_tried_once_more_alone(search, tmp_path, says):
    text = f"mark('begin'); if {{x}} == 1:; {says.join(['    ', ''])}; time.sleep(0.5); mark('end'); {LOSS}"
    found = search(text, {"x": [1, 2, 3, 4]})
    assert [trial["status"] for trial in found.trials] == ["failed", "done", "done", "done"]
    assert found.trials[0]["reason"].startswith("out of memory, alone on the device too: ")
    alone = [i for i, (kind, x, _) in enumerate(marks(tmp_path)) if (kind, x) == ("begin", "1")]
    assert len(alone) == 2
    before = marks(tmp_path)[: alone[1]]  # every other trial that began had ended
    assert sum(kind == "begin" for kind, x, _ in before if x != "1") == sum(kind == "end" for kind, *_ in before)


def test_out_of_memory_that_passes_alone_is_done(search, tmp_path):
    text = f"mark('begin'); if {{x}} == 1 and open({str(tmp_path / 'marks.txt')!r}).read().count('begin 1') == 1:"
    found = search(f"{text}; raise MemoryError; {LOSS}".replace("; raise", "\n    raise"))
    assert [trial["status"] for trial in found.trials] == ["done"] * 3
    assert rows(tmp_path, "SELECT status FROM attempts WHERE trial = 0 ORDER BY attempt") == [("failed",), ("done",)]


STEPS = "print(json.dumps({'loss': {x} + 1 / i}), flush=True); time.sleep(0.6)"


def test_halving_ends_the_worse_ones(search, tmp_path):
    found = search(f"for i in range(1, 5):; {STEPS.join(['    ', '']).replace('; ', '; ' + ' ' * 4)}; mark('end')",
                   {"x": [1, 8, 2, 9]}, halving=2)  # fmt: skip
    assert [trial["status"] for trial in found.trials] == ["done", "stopped", "stopped", "stopped"]
    assert found.trials[1]["reason"] == "halving: not among the best 1 of 2 at step 1"
    assert found.exit_code == 0
    assert found.best["params"] == {"x": 1}
    assert [x for _, x, _ in marks(tmp_path)] == ["1"]
    assert rows(tmp_path, "SELECT count(*) FROM steps WHERE trial = 0") == [(4,)]


def test_finished_and_failed_trials_are_not_started_again(search, tmp_path):
    text = f"mark('ran'); if {{x}} == 2:;     sys.exit(1); {LOSS}"
    search(text)
    found = search(text, resume=True)
    assert [trial["status"] for trial in found.trials] == ["done", "failed", "done"]
    assert len(marks(tmp_path)) == 3
    search(text, resume=True, retry_failed=True)
    assert sorted(x for _, x, _ in marks(tmp_path)) == ["1", "2", "2", "3"]


def test_resuming_with_other_arguments_is_refused(search, tmp_path):
    search(LOSS)
    for options, told in [
        ({"settings": {"x": [1, 2]}}, "3 settings, the arguments describe 2"),
        ({"metric": "val_loss"}, "metric was 'loss' and is 'val_loss' now"),
        ({"repeat": 2}, "repeat was 1 and is 2 now"),
    ]:
        with pytest.raises(JobError, match=told):
            search(LOSS, resume=True, **options)
    with pytest.raises(JobError, match="holds a study; give --resume"):
        search(LOSS)
    with pytest.raises(JobError, match="holds no study; give what to run"):
        trials.run(resume=True, run_dir=tmp_path / "none")
    with pytest.raises(JobError, match="--resume needs --run-dir"):
        trials.run(resume=True)


def test_the_program_in_the_document_runs(capsys):
    from test_package import python_blocks

    (block,) = python_blocks("docs/trials.md")
    exec(block, {})
    assert capsys.readouterr().out.startswith("{'x': 2} runs/trials-python")


def test_events_are_told_a_line_each(search):
    told = []
    search("time.sleep(0.1); sys.exit(3)", {"x": [1]}, watch=Lines(told.append))
    assert told[0] == "trial 0 started on CPU:0: x=1"
    assert told[1].startswith("trial 0 failed after ")
    assert told[1].endswith("(exit code 3)")


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ((None, {"x": [1]}), JobError, "nothing to run"),
        (("digit", {"x": [1]}), JobError, "did you mean 'digits'"),
        (("digits", {}), JobError, "nothing to search"),
        (("digits", {"rate": [1]}), JobError, "no parameter 'rate'; build_model and load_data accept: dropout, lr"),
        ((["true", "{x}"], {"y": [1]}), JobError, r"parameter y is not in the command; write \{y\}"),
        ((["no-such-program", "{x}"], {"x": [1]}), JobError, "no program 'no-such-program'"),
        ((["true", "{x}"], {"x": []}), JobError, "parameter x has no values"),
        ((["true", "{x}"], {"x": [object()]}), JobError, "expected numbers, texts, lists"),
        ((["true", "{x}"], {"x": "log:1..2"}), JobError, "give --random N"),
        ((["true", "{x}"], {"x": [1]}, "gpu:77"), DeviceError, "GPUs of this machine"),
        ((["true", "{x}"], {"x": [1]}, "tpu:1"), DeviceError, "tpu:1"),
        ((["true", "{x}"], {"x": [1]}, "cpu:0"), DeviceError, "at least 1 device"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(arguments, error, told):
    with pytest.raises(error, match=told):
        trials.run(*arguments)
    assert not list(Path.cwd().iterdir())


# The command line


def test_the_command_line(run, tmp_path):
    command = program(LOSS)(tmp_path)
    options = ["--set", "x=1,2,3", "--metric", "loss", "--devices", "cpu:2", "--run-dir", "study", "--json"]
    code, out, err = run("trials", *options, "--", *command)
    assert (code, err) == (0, "")
    found = last_json(out)
    assert found.keys() >= {"trials", "best"}
    assert found["best"]["params"] == {"x": 2}
    assert "trial 0 done after" in out
    assert " 1 │ 2 │ 0" in out  # the ranked table
    assert "study/trials.png" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "x"], "expected NAME=VALUES"),
        (["--set", "x=1", "--set", "x=2"], "given twice"),
        (["--set", "x=1,,2"], "has an empty value"),
        (["--set", "x=log:0..1"], "two numbers, the smaller one first and above 0"),
        (["--set", "x=int:1..2.5"], "expected whole numbers"),
        (["digits", "--set", "lr=1", "--", "true"], "give one of JOB and, after --, a command"),
        (["--set", "lr=1", "--"], "there is no command after --"),
        (["--set", "lr=1", "--random", "0"], "Invalid value for '--random'"),
        (["--set", "lr=1", "--resume"], "--resume needs --run-dir"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, told):
    code, out, err = run("trials", *arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert not list(Path.cwd().iterdir())


def test_a_runner_does_not_import_tensorflow(tmp_path):
    code = (
        "import sys; from multitower import cli; code = cli.main(sys.argv[1:]); "
        "sys.exit(code or bool({'tensorflow', 'keras'} & sys.modules.keys()))"
    )
    options = ["trials", "--set", "x=1,2", "--run-dir", str(tmp_path / "study"), "--", "true", "{x}"]
    environment = ENVIRONMENT | {"XDG_RUNTIME_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, *options], env=environment, check=True, capture_output=True)


# Jobs


@pytest.fixture
def job(tmp_path):
    """A small job with a module and a file beside it, and the folder they are in."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "job.py").write_text(
        "from pathlib import Path\nimport rates\n" + JOB.replace("lr=0.1", "lr=0.1, shape=()")
        + "\nassert Path(__file__).with_name('rows.txt').read_text() == 'ten'\n"
        "def check(): return rates.FACTOR\n"
    )  # fmt: skip
    (folder / "rates.py").write_text("FACTOR = 1\n")
    (folder / "rows.txt").write_text("ten")
    return folder / "job.py"


def test_a_job_is_searched_as_it_was_at_the_start(job, tmp_path):
    class Edit(Lines):
        """The job's file and its module are spoilt as soon as the first trial runs."""

        def started(self, running):
            job.write_text("raise ValueError")
            job.with_name("rates.py").write_text("raise ValueError")

    found = trials.run(
        job, {"lr": [0.1, 1e-6]}, "cpu:1", metric="val_mae", run_dir=tmp_path / "study", epochs=2, watch=Edit(print)
    )
    assert [trial["status"] for trial in found.trials] == ["done", "done"], found.trials
    assert found.best["params"] == {"lr": 0.1}
    run = Path(found.best["logs"]) / "run"
    assert (run / "model.keras").is_file()
    report = json.loads((run / "logs" / "report.json").read_text())
    assert report["metrics"]["validation"]["mae"] == found.best["metric"]
    assert (report["epochs"], report["devices"]) == (2, ["CPU:0"])
    assert [row[0] for row in rows(tmp_path, "SELECT step FROM steps WHERE trial = 1")] == [1, 2]


@pytest.mark.slow
def test_a_job_with_a_bad_setting_and_a_metric_it_does_not_report(job, tmp_path):
    found = trials.run(job, {"lr": [0.1, "'fast'"]}, "cpu:2", metric="val_error", run_dir=tmp_path / "study")
    assert [trial["status"] for trial in found.trials] == ["failed", "failed"]
    assert found.trials[0]["reason"].startswith("no metric 'val_error'; the job reports ")
    assert "val_mae" in found.trials[0]["reason"]
    assert "build_model raised" in found.trials[1]["reason"]
