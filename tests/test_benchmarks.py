"""benchmarks/: texts of competitors, when a claim counts as reached, and that a failure does not end a race."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replicate", "replicate@2"),
        ("plain", "plain@1"),
        ("fit:steps_per_execution=4", "fit:steps_per_execution=4@1"),
        ("trainer:placement=shared:reduce=host@8", "trainer:placement=shared:reduce=host@8"),
    ],
)
def test_texts_of_competitors(text, expected):
    from entrants import parse

    assert str(parse(text, 2)) == expected


@pytest.mark.parametrize("text", ["", "mirror", "trainer@0", "trainer@x", "trainer:placement", "trainer:a=b@2@2"])
def test_texts_that_name_no_competitor(text):
    from entrants import parse

    with pytest.raises(ValueError, match=r"expected NAME\[:OPTION=VALUE …\]\[@N\] with NAME one of replicate"):
        parse(text)


def test_everybody_takes_the_same_batch_statistics():
    from entrants import parse

    assert str(parse("trainer", 2).like_the_others("digits")) == "trainer:batch_norm=tower@2"
    assert str(parse("trainer:batch_norm=global", 2).like_the_others("digits")) == "trainer:batch_norm=global@2"
    for text, network in (("trainer", "cifar10"), ("mirrored", "digits")):
        assert str(parse(text, 2).like_the_others(network)) == f"{text}@2"


def result(network, text, *seconds, losses=(1.0, 0.9, 0.8), first=1.0):
    from entrants import parse
    from race import Result

    return Result(network, parse(text, 2).like_the_others(network), first, list(losses), list(seconds))


def figures(network, *results):
    from claims import Table, claims

    return [(c.figure and round(c.figure, 3), c.reached) for c in claims(Table(network, results, 2))]


def test_claims_of_a_network():
    found = figures(
        "digits",
        result("digits", "plain", 1.0),
        result("digits", "replicate@1", 1.03),
        result("digits", "replicate", 0.8, 0.9, 5.0),
        result("digits", "mirrored", 2.0),
        result("digits", "classic", 0.9),
        result("digits", "trainer", 1.0),
        result("digits", "fit-mirrored", 1.5),
        result("digits", "fit-mirrored-one", 1.1),
    )
    assert found == [(1.03, False), (1.0, True), (1.1, False), (None, False)]


def test_claims_of_one_network_alone():
    sparse = figures("embedding", result("embedding", "mirrored", 2.1), result("embedding", "replicate", 1.0))
    assert sparse[-1] == (2.1, True)
    many = figures("cifar10", result("cifar10", "replicate@8", 1.4), result("cifar10", "replicate@1", 1.0))
    assert many[-1] == (1.4, False)
    first = figures("deep", result("deep", "replicate@8", first=5.0), result("deep", "mirrored@8", first=10.0))
    assert first == [(0.5, True)]


def test_losses_that_are_not_those_of_the_others_are_told():
    from steps import different_losses

    same = [result("lstm", "plain"), result("lstm", "mirrored", losses=(1.0005, 0.9, 0.8))]
    assert different_losses(same) == []
    wrong = result("lstm", "classic", losses=(1.0, 0.9, 0.81))
    apart = result("lstm", "trainer:placement=independent", losses=(5.0, 5.0, 5.0))
    assert different_losses([*same, wrong, apart]) == [wrong.competitor]
    # batch normalisation over each tower's rows: another loss than that of one device, but the same for all of N
    of_two = [result("resnet50", t, losses=(3.0, 2.0, 1.0)) for t in ("trainer", "mirrored", "classic")]
    assert different_losses([result("resnet50", "plain"), *of_two]) == []


def test_median_and_quartiles():
    r = result("lstm", "plain", 1.0, 2.0, 3.0, 4.0, 50.0)
    assert (r.median, r.quartiles) == (3.0, (2.0, 4.0))
    assert result("lstm", "plain").median is None


@pytest.mark.parametrize("program", ["steps", "claims"])
def test_unknown_networks_are_told_at_once(program):
    command = [sys.executable, str(BENCHMARKS / f"{program}.py"), "--networks", "digit"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no network 'digit'; expected digits, cifar10" in done.stderr


@pytest.mark.slow
def test_a_race(tmp_path):
    names = ["plain", "replicate", "trainer", "mirrored", "classic", "fit-mirrored", "trainer:reduce=rings"]
    options = ["--networks", "embedding", "--competitors", ",".join(names), "--rounds", "2"]
    command = [sys.executable, str(BENCHMARKS / "steps.py"), *options, "--seconds-per-round", "0.1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "losses: the same for all" in done.stdout
    *good, bad = json.loads(done.stdout.splitlines()[-1])
    assert "reduce='rings' is unknown" in bad["error"]
    for r in good:
        assert r["error"] is None, r
        assert r["first_step_seconds"] > 0
        assert r["peak_bytes"] > 2**20
        assert len(r["step_seconds"]) == 2
        assert min(r["step_seconds"]) > 0
