"""`multitower measure`: what it prints, and that a mistake is one line before anything is measured."""

import pytest

from multitower.scaling import study
from test_cli import last_json, run_process
from test_scaling import SCALING


@pytest.fixture
def measured(monkeypatch):
    """The arguments of the calls of `measure`, which returns a made-up result."""
    calls = []

    def measure(*args, **kwargs):
        calls.append((args, kwargs))
        return SCALING

    monkeypatch.setattr(study, "measure", measure)
    return calls


def test_table_json_and_plot(run, measured, tmp_path):
    file = tmp_path / "scaling.png"
    options = ["--placement", "shared, replicated", "--reduce", "host", "--batch-size", 8, "--seconds", 2, "--seed", 3]
    code, out, err = run(
        "measure", "digits", "--devices", "cpu:1,2", *options, "--plot", file, "--json", "--set", "lr=1"
    )
    assert (code, err) == (0, "")
    ((args, kwargs),) = measured
    assert args == ("digits", "cpu:1,2")
    assert kwargs.pop("progress")
    assert kwargs == {
        "placement": ["shared", "replicated"],
        "reduce": ["host"],
        "batch_size": 8,
        "params": {"lr": 1},
        "seed": 3,
        "seconds": 2.0,
    }
    assert all(word in out for word in ("advice", "Train on one device", "examples/s", "efficiency", "1,500"))
    report = last_json(out)
    assert report["advice"]["action"] == "one"
    assert [p["devices"] for p in report["points"]] == [1, 2, 2]
    assert report["points"][1]["examples_per_second"] == {"median": 1500.0, "low": 1499.0, "high": 1501.0}
    assert file.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["digit"], "did you mean 'digits'?"),
        (["--devices", "gpu:0,2"], "expected numbers of devices such as 1,2,4"),
        (["--devices", "0"], "expected numbers of devices"),
        (["--placement", "shard"], "did you mean 'shared'?"),
        (["--reduce", "host,"], "reduce='' is unknown"),
        (["--seconds", "0"], "Invalid value for '--seconds'"),
        (["--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["--plot", "scaling.pdf"], "ends in .png"),
        (["--set", "lr"], "expected NAME=VALUE"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, told):
    code, out, err = run("measure", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("multitower: error: ")
    assert err.count("\n") == 1
    assert told in err


def test_help_tells_every_option(run):
    text = run("measure", "--help")[1]
    options = (
        "--devices",
        "--placement",
        "--reduce",
        "--batch-size",
        "--seconds",
        "--plot",
        "--set",
        "--seed",
        "--json",
    )
    assert all(option in text for option in options)


@pytest.mark.slow
def test_digits_in_processes_of_their_own(tmp_path):
    arguments = ["--devices", "cpu:2", "--seconds", "0.3", "--plot", "scaling.png", "--json"]
    done = run_process("measure", "digits", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = last_json(done.stdout)
    assert all(p["error"] is None and p["examples_per_second"]["median"] > 0 for p in report["points"])
    two = report["points"][1]
    assert (two["devices"], two["batch_size"], report["points"][2]["batch_size"]) == (2, 64, 128)
    assert two["meetings"] > 0
    assert two["meeting_bytes"] > 4 * 20_000  # the network has more weights than that
    assert two["peak_bytes"]["process"] > 2**20
    assert report["points"][3]["meetings"] == 0
    assert report["trials"][0]["examples_per_second"] > 0
    assert report["advice"]["action"] in ("train", "trials", "input", "one")
    assert "share 2 cores" in report["notes"][0] or "cores" in report["notes"][0]
    assert (tmp_path / "scaling.png").exists()


@pytest.mark.slow
def test_a_job_with_a_wrong_parameter_ends_at_its_first_process(tmp_path):
    done = run_process("measure", "digits", "--devices", "cpu:2", "--set", "rate=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no parameter 'rate'" in done.stderr
    assert done.stderr.count("\n") == 1
