"""The parts of a parameter search: settings, devices and who has them, snapshots, early ends, tables and pictures."""

import importlib
import io
import itertools
import json
import math
import os
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import settings as run_with
from hypothesis import strategies as st

from multitower.errors import DeviceError, JobError
from multitower.trials import (
    gpus,
    lease,
    live,
    machine,
    picture,
    readout,
    results,
    slots,
    snapshot,
    space,
    store,
    study,
)
from multitower.trials.early import Rule
from multitower.trials.process import LocalAttempt, Order, read_result
from multitower.trials.search import Asked

# Settings


def settings(*texts, **options):
    return Asked(job="digits", space=space.parse_space(texts), **options).settings()


def test_a_grid_has_every_combination_once():
    found = settings("lr=0.1,1e-2,0.10", "shape=(8, 8),(4,)", "kind=wide,'a,b'", "n=int:1..2", "flag=True,1")
    expected = itertools.product([0.1, 0.01], [(8, 8), (4,)], ["wide", "a,b"], [1, 2], [True, 1])
    assert [repr(list(setting.values())) for setting in found] == [repr(list(values)) for values in expected]


@run_with(deadline=None)  # seconds say nothing on a busy machine
@given(st.integers(0, 1000), st.integers(1, 40))
def test_random_settings_are_different_in_their_range_and_come_again(seed, count):
    texts = ["lr=log:1e-4..1e-1", "width=int:16..19", "depth=logint:1..64", "drop=float:0..0.5", "kind=a,b"]
    found = settings(*texts, count=count, seed=seed)
    assert len({space.key(setting) for setting in found}) == count
    for setting in found:
        assert 1e-4 <= setting["lr"] <= 1e-1
        assert setting["width"] in range(16, 20)
        assert setting["depth"] in range(1, 65)
        assert 0 <= setting["drop"] <= 0.5
    assert settings(*texts, count=count + 3, seed=seed)[:count] == found


def test_log_ranges_are_even_over_the_logarithm():
    drawn = settings("lr=log:1e-4..1e-1", count=3000)
    decades = [math.floor(math.log10(setting["lr"])) for setting in drawn]
    assert all(900 < decades.count(decade) < 1100 for decade in (-4, -3, -2))


def test_random_settings_of_few_are_all_of_them():
    assert sorted(setting["x"] for setting in settings("x=1,2,3", count=10)) == [1, 2, 3]
    assert len(settings("x=int:1..50", count=50)) == 50


# Early ends


def verdict(steps, number, seen=0, larger=False, halving=None, hopeless=False, min_steps=1):
    return Rule(halving, hopeless, min_steps, larger).verdict(number, steps, seen)


def test_halving_keeps_the_best_of_each_rung():
    steps = {i: [float(i)] * 3 for i in range(9)}
    kept = [number for number in steps if not verdict({**steps}, number, halving=3)]
    assert kept == [0, 1, 2]
    assert [n for n in steps if not verdict(steps, n, halving=3, larger=True)] == [6, 7, 8]
    assert verdict(steps, 8, halving=3, min_steps=3) == "halving: not among the best 3 of 9 at step 3"
    assert verdict({0: [1.0, 9.0], 1: [2.0, 3.0]}, 0, halving=3) is None  # 2 is no rung: 1, 3, 9
    assert verdict({0: [math.nan], 1: [2.0]}, 0, halving=2)
    assert verdict({0: [5.0]}, 0, halving=2) is None  # the first to come
    assert verdict({0: [5.0, 5.0, 5.0], 1: [1.0]}, 0, seen=1, halving=3) is None  # judged at 1 when it was alone


def test_the_median_rule_needs_others_and_their_mean():
    others = {1: [1.0, 3.0], 2: [2.0, 2.0], 3: [5.0, 5.0]}
    assert verdict({0: [4.0, 2.5], **others}, 0, hopeless=True, min_steps=2)
    assert verdict({0: [4.0, 1.9], **others}, 0, hopeless=True, min_steps=2) is None
    assert verdict({0: [9.0], 1: [1.0], 2: [1.0]}, 0, hopeless=True) is None


# Devices


class Nvml(SimpleNamespace):
    """A driver with two cards, the second in two MIG instances; its functions are those of pynvml used here."""

    class NVMLError(Exception):
        pass

    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, names=("H", "H"), mig=(1,), used=None, pids=None):
        super().__init__(names=names, mig=mig, used=used or {}, pids=pids or {}, open=0)

    def nvmlInit(self):  # noqa: N802
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return f"GPU-{index}aa"

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return uuid

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self.names[int(handle[4])].encode()

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        if not self.mig:
            raise self.NVMLError
        return int(int(handle[4]) in self.mig), 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):  # noqa: N802
        if index not in (0, 3):
            raise self.NVMLError
        return f"MIG-{handle[4]}{index}"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        used = self.used.get(handle, 0)
        return SimpleNamespace(used=used << 30, free=(80 - used) << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids.get(handle, [])]


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A function that puts a driver in the place of NVML, and the value of CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def install(visible=None, order=None, **facts):
        nvml = Nvml(**facts)
        monkeypatch.setattr(gpus, "pynvml", nvml)
        for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        return nvml

    return install


def test_the_names_used_of_nvml_exist():
    real = importlib.import_module("pynvml")
    used = {name for name in vars(Nvml) if name.lower().startswith("nvml")}
    assert all(hasattr(real, name) for name in used)


@pytest.mark.parametrize(
    ("visible", "facts", "tokens"),
    [
        (None, {}, ["GPU-0aa", "MIG-10", "MIG-13"]),
        (None, {"mig": ()}, ["GPU-0aa", "GPU-1aa"]),
        ("1,0", {"mig": ()}, ["GPU-1aa", "GPU-0aa"]),
        ("1", {}, ["MIG-10", "MIG-13"]),
        ("MIG-13, GPU-0", {}, ["MIG-13", "GPU-0aa"]),
        ("0,5,1", {"mig": ()}, ["GPU-0aa"]),  # CUDA stops at the first it does not know
        ("", {}, []),
        ("-1", {}, []),
        ("1", {"mig": (), "names": ("A", "B")}, ["1"]),  # CUDA may count in another order
        ("1", {"mig": (), "names": ("A", "B"), "order": "PCI_BUS_ID"}, ["GPU-1aa"]),
    ],
)
def test_each_gpu_has_a_token_that_shows_it_alone(driver, visible, facts, tokens):
    nvml = driver(visible, **facts)
    assert [card.token for card in gpus.cards()] == tokens
    assert nvml.open == 0


def test_without_a_driver_there_are_no_gpus(driver, monkeypatch):
    nvml = driver()

    def fail():
        raise nvml.NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert gpus.cards() == []
    assert [device.name for device in slots.find_devices(None)] == ["CPU:0"]
    with pytest.raises(DeviceError, match="a GPU that NVML sees, and it sees none"):
        slots.find_devices("gpu")


def test_free_gpus_come_first_and_the_environment_shows_one(driver):
    driver(mig=(), used={"GPU-0aa": 3}, pids={"GPU-0aa": [77]})
    first, second = slots.find_devices("all")
    assert (first.name, second.name) == ("GPU:1", "GPU:0")
    assert first.environment({"A": "1"}) == {"A": "1", "CUDA_VISIBLE_DEVICES": "GPU-1aa"}
    assert first.environment({}, 2)["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert [device.name for device in slots.find_devices("gpu:0")] == ["GPU:0"]
    assert [device.name for device in slots.find_devices(1)] == ["GPU:1"]


def test_a_gpu_that_others_use_is_not_taken_unless_told(driver):
    driver(mig=(), used={"GPU-0aa": 3}, pids={"GPU-0aa": [77]})
    with closing(machine.Machine("gpu", 1, False, "me")) as place:
        obstacles = {slot.device: place.obstacle(slot, 0) for slot in place.slots}
        assert obstacles == {"GPU:1": None, "GPU:0": "GPU:0 is used by processes 77, 3072 MiB"}
    with closing(machine.Machine("gpu", 1, True, "me")) as place:
        assert [place.obstacle(slot, 0) for slot in place.slots] == [None, None]
    with pytest.raises(DeviceError, match=r"all are in use .GPU:0 by processes 77"):
        machine.Machine("gpu:0", 1, False, "me")


def test_one_more_trial_on_a_gpu_only_where_memory_allows(driver):
    nvml = driver(mig=())
    with closing(machine.Machine("gpu:0", 3, False, "me")) as place:
        slot = place.slots[0]
        assert place.obstacle(slot, 0) is None
        nvml.used["GPU-0aa"] = 50
        assert place.obstacle(slot, 2) is None  # 25 GiB each, 30 left
        assert place.obstacle(slot, 1) == "GPU:0 has no memory for one more trial"


def test_two_runners_take_a_gpu_one_after_the_other(driver):
    driver(mig=())
    one, two = (machine.Machine("gpu:1", 2, False, f"runner {i}") for i in (1, 2))
    assert one.obstacle(one.slots[0], 0) is None
    assert one.obstacle(one.slots[1], 1) is None
    assert two.obstacle(two.slots[0], 0) == "GPU:1 is used by runner 1"
    one.release(one.slots[0])
    assert two.obstacle(two.slots[0], 0) is None
    two.close()


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 6, 9})
    assert [device.cores for device in slots.find_devices("cpu:2")] == [(3, 4), (5, 6, 9)]
    assert [device.cores for device in slots.find_devices("cpu:7")] == [(3,), (4,), (5,), (6,), (9,), (3,), (4,)]
    assert slots.find_devices("cpu:2")[1].environment({"OMP_NUM_THREADS": "9"}, 2) == {
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": "9",
        "CUDA_VISIBLE_DEVICES": "-1",
    }


def test_a_lease_is_held_until_the_last_process_has_gone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    mine, other = lease.Leases("mine"), lease.Leases("other")
    assert mine.take(["core-0", "core-1"]) is None
    assert other.take(["core-2", "core-1"]) == "mine"
    assert mine.take(["core-2"]) is None  # all or none: the other one kept nothing
    order = Order(["sleep", "60"], str(tmp_path), [], None, None)
    attempt = LocalAttempt(tmp_path, order, os.environ, mine.files(["core-0"]))
    while not (tmp_path / "process.json").exists():
        time.sleep(0.01)
    mine.release()
    assert other.take(["core-1"]) is None
    assert other.take(["core-0"]) == "mine"
    attempt.close()
    assert attempt.ended()
    assert other.take(["core-0"]) is None
    assert read_result(tmp_path)["ended_by"] == "orphan"
    other.release()


# Studies


def test_a_snapshot_has_copies_of_what_is_imported_and_links_to_the_rest(tmp_path):
    mine = tmp_path / "mine"
    (mine / "pack").mkdir(parents=True)
    (mine / "runs").mkdir()
    for name, text in {
        "job.py": "import net, sys\nfrom pack.part import a\n",
        "net.py": "import job, rates\n",
        "rates.py": "",
        "pack/part.py": "a = 1",
        "other.py": "",
        "data.txt": "data",
    }.items():
        (mine / name).write_text(text)
    taken = snapshot.take(mine / "job.py", mine / "runs" / "study" / "job")
    links = {path.name: path.is_symlink() for path in taken.parent.iterdir()}
    copies = {"job.py", "net.py", "rates.py", "pack"}
    assert links == {
        name: name not in copies for name in ("job.py", "net.py", "rates.py", "pack", "other.py", "data.txt")
    }
    (mine / "pack" / "part.py").write_text("changed")
    assert (taken.parent / "pack" / "part.py").read_text() == "a = 1"


def test_parameters_of_a_job_are_checked_without_running_it(tmp_path):
    path = tmp_path / "job.py"
    path.write_text("raise SystemExit\ndef build_model(lr, *, width=3): ...\ndef load_data(rows=1): ...\n")
    snapshot.check_names(path, ["lr", "width", "rows"])
    with pytest.raises(JobError, match=r"no parameter 'with'; .* accept: lr, rows, width; did you mean 'width'"):
        snapshot.check_names(path, ["with"])
    path.write_text("def build_model(**any): ...\ndef load_data(): ...\n")
    snapshot.check_names(path, ["with"])
    path.write_text("from elsewhere import build_model, load_data\n")
    snapshot.check_names(path, ["with"])
    path.write_text("def build_model(:\n")
    with pytest.raises(JobError, match="no Python source"):
        snapshot.check_names(path, ["with"])


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *((metric, "min") for metric in ("val_loss", "loss", "val_mae", "test_error", "seconds")),
        *((metric, "max") for metric in ("val_accuracy", "acc", "val_mean_iou", "f1_score", "auc")),
    ],
)
def test_the_name_of_a_metric_tells_which_is_best(metric, mode):
    assert study.mode_of(metric) == mode


def test_values_reach_a_job_as_they_are(tmp_path):
    what = study.Study("digits", None, ".", "val_loss", "min", epochs=3)
    params = {"lr": 0.1, "shape": (8, 8), "kind": "wide", "number": "1", "none": None}
    trial = store.Trial(0, 0, 0, 7, params, "waiting", None, None, None, None, None, 0, False)
    command = what.process_command(trial, "GPU:3", tmp_path, tmp_path / "a")
    given = [command[i + 1] for i, part in enumerate(command) if part == "--set"]
    assert given == ["lr=0.1", "shape=(8, 8)", "kind=wide", "number='1'", "none=None"]
    assert command[command.index("--devices") + 1] == "gpu:0"  # the only one its process sees
    assert study.fill("{x} {lr} {{lr}} $0 {print}", {"lr": 0.1}) == "{x} 0.1 {0.1} $0 {print}"


def test_params_come_back_from_the_database_as_they_were(tmp_path):
    params = {"shape": (8, 8), "kind": "1", "flag": True, "none": None}
    store.create(tmp_path / "study.db", {"a": [1]}, [params], repeat=2, seed=3)
    with closing(store.Store(tmp_path / "study.db")) as database:
        assert [(trial.params, trial.seed) for trial in database.trials()] == [(params, 3), (params, 4)]
        assert database.study() == {"a": [1]}
    assert not list(tmp_path.glob("*.part*"))


def test_what_is_read_of_output(tmp_path):
    (tmp_path / "stdout.log").write_bytes(b'{"loss": 3}\n{"loss"\n\xff\xfe\n[1]\n {"loss": 2, "a": 1}\nlast')
    assert readout.steps(tmp_path, "loss", False) == [3.0, 2.0]
    assert readout.final_metric(tmp_path, "loss", False) == 2.0
    assert readout.final_metric(tmp_path, None, False) is None
    history = tmp_path / readout.HISTORY
    history.parent.mkdir(parents=True)
    history.write_text("epoch,val_loss\n0,0.5\n1,nan\n2,0.")  # the last line is being written
    assert [str(step) for step in readout.steps(tmp_path, "val_loss", True)] == ["0.5", "nan"]
    (tmp_path / readout.REPORT).write_text('{"metrics": {"train": ')
    with pytest.raises(readout.UnreadableError, match="no usable report"):
        readout.final_metric(tmp_path, "val_loss", True)
    (tmp_path / readout.REPORT).write_text('{"metrics": {"train": {"loss": 1}, "validation": {"loss": null}}}')
    with pytest.raises(readout.UnreadableError, match="val_loss is nan"):
        readout.final_metric(tmp_path, "val_loss", True)
    assert readout.final_metric(tmp_path, "loss", True) == 1.0


# Tables and pictures


def entries(*settings, status="done"):
    return [
        {
            "params": p,
            "status": status,
            "metric": float(i),
            "seconds": 1.0,
            "device": "CPU:0",
            "reason": None,
            "logs": "l",
        }
        for i, p in enumerate(settings)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        [{"lr": 0.1}, {"lr": 1e-4}],
        [{"kind": "a"}, {"kind": "b"}],
        [
            {"lr": 0.1, "kind": "a", "same": 1},
            {"lr": 1e-4, "kind": "b", "same": 1},
            {"lr": 1.0, "kind": "a", "same": 1},
        ],
    ],
)
def test_a_picture_is_drawn(tmp_path, settings):
    found = results.Results(entries(*settings), None, "val_loss", "min", "d", "b")
    assert picture.draw(found, tmp_path / "p.png") is None
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_no_picture_of_nothing(tmp_path):
    found = results.Results(entries({"lr": 1}), None, "val_loss", "min", "d", "b")
    assert picture.draw(found, tmp_path / "p.png") == "no picture: a metric of different settings is needed"


def test_the_ranking_puts_done_before_stopped_before_failed():
    trials = [*entries({"x": 0}, status="failed"), *entries({"x": 1}, status="stopped"), *entries({"x": 2}, {"x": 3})]
    found = results.Results(trials, None, "acc", "max", "d", "b")
    assert [trial["params"]["x"] for trial in found.ranked()] == [3, 2, 1, 0]
    assert found.exit_code == 1
    assert json.loads(found.as_json())["trials"] == trials


def test_a_terminal_shows_a_table_with_progress(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    watch = live.watch_terminal(terminal, "val_loss", 4)
    trial = store.Trial(3, 3, 0, 0, {"lr": 0.1}, "done", 0.5, 2.0, "GPU:0", None, None, 1, False)
    now = SimpleNamespace(
        trial=trial, slot=SimpleNamespace(device="GPU:1"), began=0.0, steps=[0.7, 0.6], ending=None
    )  # fmt: skip
    watch.ended(trial)
    watch.tick([trial, trial], [now], ["GPU:2 is used by [process] 7"])
    watch.close()
    shown = terminal.getvalue()
    for text in ("lr=0.1", "2/4", "0.6", "GPU:1", "2 done", "waiting: GPU:2 is used by [process] 7"):
        assert text in shown
