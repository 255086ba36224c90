"""measure: the advice for each kind of result, what is counted and timed, and that a failure is reported."""

import itertools
import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

import multitower as mt
from multitower.errors import BatchError, DeviceError, JobError, MultitowerError, TowerError
from multitower.job import Job
from multitower.scaling import plot as plot_module
from multitower.scaling import study
from multitower.scaling.advice import advise
from multitower.scaling.child import Data, Windows
from multitower.scaling.exchanges import meetings
from multitower.scaling.report import Point, Scaling, Spread, Trials, spread


def point(devices, rate, speedup, *, removed=None, placement="auto", **values):
    """A measured configuration."""
    return Point(
        devices,
        "strong",
        placement,
        "auto",
        batch_size=64,
        examples_per_second=Spread(rate, rate - 1, rate + 1),
        input_removed=removed and Spread(removed, removed, removed),
        one_device=Spread(rate / speedup, 1.0, 1.0),
        speedup=speedup,
        **values,
    )


ALONE = point(1, 1000.0, 1.0, removed=1050.0)

# Advice


def test_train_on_the_number_that_is_fastest():
    points = [ALONE, point(2, 1900.0, 1.9), point(4, 3400.0, 3.4), point(8, 3000.0, 3.0)]
    advice = advise(points, [Trials(8, 3500.0, 3.5)])
    assert (advice.action, advice.devices) == ("train", 4)
    assert advice.text == "Train on 4 devices, with a global batch of 64: 3,400 examples/s, 3.40 × one device (1,000)."
    assert advice.numbers == {
        "one_device": 1000.0,
        "train_on_4": 3400.0,
        "speedup": 3.4,
        "8_trials": 3500.0,
        "trials_speedup": 3.5,
    }


def test_train_names_placement_and_trials_that_do_more():
    advice = advise([ALONE, point(2, 1500.0, 1.5, placement="shared")], [Trials(2, 1990.0, 1.99)])
    assert advice.action == "train"
    assert "with placement=shared, reduce=auto" in advice.text
    assert "For a search over many trainings, 2 trials side by side do more: 1,990 examples/s together" in advice.text


def test_trials_where_one_training_does_not_gain():
    advice = advise([ALONE, point(2, 1050.0, 1.05)], [Trials(2, 1800.0, 1.8), Trials(4, 1700.0, 1.7)])
    assert (advice.action, advice.devices) == ("trials", 2)
    assert advice.text == (
        "Run 2 trials side by side, one per device: 1,800 examples/s together, 1.80 × one alone (1,000); "
        "one training on 2 is 1.05 × as fast."
    )


def test_the_input_comes_first():
    slow = replace(ALONE, input_removed=Spread(1260.0, 1250.0, 1270.0))
    advice = advise([slow, point(2, 1900.0, 1.9, removed=1900.0)], [])
    assert (advice.action, advice.devices) == ("input", 1)
    assert "1,000 examples/s with its input and 1,260 with a batch that is there already (1.26 ×)" in advice.text
    assert advice.numbers["input_removed"] == 1260.0


def test_an_input_whose_cost_is_within_the_spread_is_no_advice():
    varying = replace(ALONE, input_removed=Spread(1500.0, 900.0, 1600.0))
    assert advise([varying], []).action == "one"


def test_the_input_that_only_many_devices_wait_for():
    advice = advise([ALONE, point(4, 1100.0, 1.1, removed=3900.0)], [])
    assert (advice.action, advice.devices) == ("input", 4)


def test_one_device_where_nothing_pays():
    advice = advise([ALONE, point(2, 900.0, 0.9)], [Trials(2, 1000.0, 1.0)], "CPU", 2)
    assert (advice.action, advice.devices) == ("one", 1)
    assert advice.text == (
        "Train on one device (1,000 examples/s); one training on 2 is 0.90 × as fast; 2 trials at once do 1,000 "
        "examples/s together, 1.00 × one alone; the 2 cores are shared by all."
    )


def test_one_device_where_nothing_else_was_measured():
    assert advise([ALONE], []).text == "Train on one device (1,000 examples/s)."


def test_failures_and_towers_without_reduction_are_no_advice():
    points = [ALONE, Point(2, "strong", "auto", "auto", error="broken"), point(2, 2000.0, 2.0, placement="independent")]
    assert advise(points, [Trials(2, error="broken")]).action == "one"
    with pytest.raises(ValueError, match="no measurement on one device"):
        advise(points[1:], [])


# Numbers


def test_spread_is_median_and_quartiles():
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert spread([1.0, 2.0]) == Spread(1.5, 1.25, 1.75)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_comparison_is_with_one_device_measured_in_turns():
    fast, slow = Spread(1000.0, 1.0, 1.0), Spread(500.0, 1.0, 1.0)
    points = [
        Point(1, "strong", "auto", "auto", examples_per_second=fast, one_device=fast),
        Point(2, "strong", "auto", "auto", examples_per_second=Spread(900.0, 1.0, 1.0), one_device=slow),
        Point(2, "strong", "independent", "auto", examples_per_second=Spread(2000.0, 1.0, 1.0), one_device=fast),
        Point(2, "weak", "auto", "auto", error="broken"),
    ]
    one, two, bound, broken = study.compared(points)
    assert (one.speedup, one.efficiency, one.of_bound) == (1.0, 1.0, None)
    assert (two.speedup, two.efficiency, two.of_bound) == (1.8, 0.9, 0.9)
    assert bound.of_bound == 1.0
    assert (broken.speedup, broken.efficiency, broken.of_bound) == (None, None, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("1,2,4", (False, [1, 2, 4])), ("cpu:4,2", (True, [2, 4])), ([2, 2, 1], (False, [1, 2])), (" 3 ", (False, [3]))],
)
def test_numbers_of_devices(given, expected):
    assert study.parse_counts(given) == expected


@pytest.mark.parametrize("given", ["", "0", "1,,2", "gpu:0,2", "cpu", "cpu:", "-1", "1.5", [True], "99999"])
def test_numbers_of_devices_that_are_none(given):
    with pytest.raises(DeviceError, match=r"expected numbers of devices such as 1,2,4, or cpu:1,2,4"):
        study.parse_counts(given)


def test_the_plan_has_every_way_and_the_upper_bound():
    plan = study.plan([1, 2], ["shared", "independent"], ["host", "ring"])
    assert [(p.devices, p.scaling, p.placement, p.reduce) for p in plan] == [
        (2, scaling, *way)
        for way in [("shared", "host"), ("shared", "ring"), ("independent", "auto")]
        for scaling in ("strong", "weak")
    ]


# What is timed


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("multitower.scaling.child.time.perf_counter", lambda: self.now)

    def run(self, windows, batches, seconds):
        """An epoch: batches of these numbers end, after so many seconds each."""
        windows.on_epoch_begin(0)
        for batch, passed in zip(batches, seconds, strict=True):
            self.now += passed
            windows.on_train_batch_end(batch, {"loss": 1.0})
        windows.on_epoch_end(0)


def windows_of(count, seconds):
    windows = Windows(count, seconds)
    windows.set_model(keras.Sequential())
    windows.model.stop_training = False
    return windows


def test_windows_leave_out_the_start_of_an_epoch_and_what_is_between(monkeypatch):
    clock, windows = Clock(monkeypatch), windows_of(3, 2.0)
    for _ in range(3):
        clock.now += 100.0  # validation
        clock.run(windows, range(5), [50.0, 1.0, 1.0, 0.5, 0.5])
    assert windows.rates(10) == [15.0, 15.0, 10.0]  # 3 steps in 2 s, 3 in 2 s, 2 in 2 s
    assert windows.model.stop_training


def test_windows_count_all_steps_of_an_execution(monkeypatch):
    clock, windows = Clock(monkeypatch), windows_of(2, 1.0)
    clock.run(windows, [3, 7, 11], [9.0, 2.0, 2.0])
    assert windows.rates(10) == [10 * 4 / 2.0]


def test_windows_with_epochs_of_one_execution(monkeypatch):
    clock, windows = Clock(monkeypatch), windows_of(2, 2.0)
    for _ in range(4):
        clock.run(windows, [0], [1.0])
    assert windows.rates(6) == [6.0]
    assert windows.model.stop_training


def job_with(load_data, batch_size=4):
    return Job("job", None, lambda: None, load_data, batch_size=batch_size)


X, Y = np.arange(10.0, dtype="float32")[:, None], np.arange(10)


def test_data_of_arrays_is_whole_batches():
    data = Data(job_with(lambda: ((X, Y), (X, Y))), {}, None, times=2)
    assert data.batch_size == 8
    assert (len(data.own["x"]), len(data.own["y"]), data.own["batch_size"]) == (8, 8, 8)
    for x, y in itertools.islice(data.repeated["x"], 2):
        np.testing.assert_array_equal(x, X[:8])
        np.testing.assert_array_equal(y, Y[:8])


def test_data_of_a_dataset_is_its_batches_of_full_size():
    def load_data(batch_size=4):
        return [tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)] * 2

    data = Data(job_with(load_data), {}, None, times=1)
    assert [len(y) for _, y in data.own["x"]] == [4, 4]
    assert Data(job_with(load_data), {}, 2, times=2).batch_size == 4


def test_data_that_does_not_do():
    with pytest.raises(BatchError, match="a global batch of 16 rows, and the job has 10 to train on"):
        Data(job_with(lambda: ((X, Y), (X, Y))), {}, None, times=4)
    fixed = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with pytest.raises(JobError, match="no parameter batch_size"):
        Data(job_with(lambda: (fixed, fixed)), {}, None, times=2)


@pytest.mark.parametrize("reduce", ["host", "gather", "ring"])
def test_meetings_of_a_step(reduce):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    trainer = mt.Trainer(model, ["CPU:0", "CPU:1"], reduce=reduce)
    trainer.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=8, verbose=0)
    met, met_bytes = meetings(trainer.graphs[-1], 4)
    gradients, outputs = 4 * (3 * 5 + 5 + 5 + 1), 4 * 4
    assert met == 1 + {"ring": 1}.get(reduce, 4)  # the outputs; gradients in one bucket, or by edges one by one
    assert met_bytes == gradients + outputs


def test_meetings_in_a_loop_are_found():
    @tf.function
    def step():
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, x: (i + 1, tf.raw_ops.PlaceholderWithDefault(input=x, shape=[2], name="multitower_sum")),
            (0, tf.zeros([2])),
        )

    assert meetings(step.get_concrete_function().graph, 1)[0] >= 1


# The study, with processes that are made up


class FakeChild:
    """Answers like a process of `child`; `broken` maps what is wanted to an error or None."""

    kind = "CPU"
    broken = staticmethod(lambda wanted: None)
    alive, most = 0, 3  # processes at once

    def __init__(self, wanted):
        self.wanted = wanted

    def __enter__(self):
        type(self).alive += 1
        return self

    def __exit__(self, *exception):
        type(self).alive -= 1

    def start(self):
        error = self.broken(self.wanted)
        if error:
            raise study.ChildError(*error)
        told = ("placement_used", "reduce_used", "first_step_seconds", "meetings", "meeting_bytes")
        batch_size = 64 * self.wanted["times"]
        self.ready = dict.fromkeys(told) | {"names": [f"{self.kind}:0"], "batch_size": batch_size}

    def go_on(self):
        assert FakeChild.alive <= FakeChild.most

    def answer(self):
        rate = 100.0 if self.wanted["devices"] in (1, "cpu:1", ["CPU:0"], ["GPU:0"], ["GPU:1"]) else 150.0
        removed = [rate] if self.wanted["remove_input"] else []
        return {"rates": [rate, rate], "removed_rates": removed, "peak_bytes": {"process": 1}}


@pytest.fixture
def processes(monkeypatch):
    """The class of made-up processes, which stand in for the real ones."""
    monkeypatch.setattr(study, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "most", 3)
    yield FakeChild
    assert FakeChild.alive == 0


@pytest.fixture
def fail(processes, monkeypatch):
    """Has processes fail: takes a function of what is wanted that gives the error, or None."""
    return lambda function: monkeypatch.setattr(processes, "broken", staticmethod(function))


def test_a_study(processes):
    told = []
    scaling = mt.measure("digits", "cpu:1,2", progress=told.append)
    assert [(p.devices, p.scaling, p.placement, p.batch_size) for p in scaling.points] == [
        (1, "strong", "auto", 64),
        (2, "strong", "auto", 64),
        (2, "weak", "auto", 128),
        (2, "strong", "independent", 64),
        (2, "weak", "independent", 128),
    ]
    assert [p.speedup for p in scaling.points] == [1.0, 1.5, 1.5, 1.5, 1.5]
    assert scaling.trials == [Trials(2, 200.0, 2.0)]
    assert (scaling.advice.action, scaling.kind) == ("train", "CPU")
    assert "share" in scaling.notes[0]
    assert len(told) == 6
    assert told[-1] == "2 trials side by side"


def test_on_gpus_one_process_at_a_time_holds_memory(processes, monkeypatch):
    monkeypatch.setattr(processes, "kind", "GPU")
    monkeypatch.setattr(processes, "most", 2)
    scaling = mt.measure("digits", [1, 2])
    assert (scaling.kind, scaling.notes) == ("GPU", [])
    assert scaling.points[1].efficiency == 0.75


def test_a_configuration_that_fails_is_reported(fail):
    fail(lambda wanted: ("ended", "out of memory") if wanted["times"] == 2 else None)
    scaling = mt.measure("digits", "cpu:2")
    expected = [None, None, "ended: out of memory", None, "ended: out of memory"]
    assert [p.error for p in scaling.points] == expected
    assert ("failed: 2 × weak, auto, auto", "ended: out of memory") in scaling.summary()
    assert json.loads(scaling.as_json())["points"][2]["error"] == "ended: out of memory"
    assert "out of memory" in str(scaling)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(("JobError", "no parameter"), JobError), (("ValueError", "bad"), TowerError), (("ended", "code -9"), TowerError)],
)
def test_one_device_that_fails_ends_the_study(fail, error, expected):
    fail(lambda wanted: error)
    with pytest.raises(expected, match=error[1]):
        mt.measure("digits", "cpu:2")


def test_trials_that_fail_are_reported(fail):
    fail(lambda wanted: ("ended", "x") if isinstance(wanted["devices"], list) else None)
    scaling = mt.measure("digits", "cpu:2")
    assert scaling.trials == [Trials(2, error="ended: x")]
    assert ("2 trials side by side", "failed: ended: x") in scaling.summary()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"placement": ["shard"]}, "placement='shard' is unknown.*did you mean 'shared'"),
        ({"reduce": ["rings"]}, "reduce='rings' is unknown.*did you mean 'ring'"),
        ({"seconds": 0.0}, "expected more than 0"),
        ({"seconds": float("nan")}, "expected more than 0"),
    ],
)
def test_options_that_are_wrong(options, told):
    with pytest.raises(DeviceError, match=told):
        mt.measure("digits", "cpu:2", **options)


# Pictures

SCALING = Scaling(
    "digits",
    "CPU",
    2,
    study.compared([ALONE, point(2, 1500.0, 1.5, peak_bytes={"process": 2**20}), point(2, 1600.0, 1.6)]),
    [Trials(2, 1800.0, 1.8)],
    advise([ALONE], []),
    [],
    1.0,
)


def test_plot(tmp_path):
    file = tmp_path / "scaling.png"
    plot_module.check_plot(str(file))
    plot_module.plot(SCALING, str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert list(plot_module.curves(SCALING)) == ["strong, auto, auto"]
    with pytest.raises(MultitowerError, match="exists and is not overwritten"):
        plot_module.check_plot(str(file))


@pytest.mark.parametrize(("file", "told"), [("a.pdf", "ends in .png"), ("no/such/a.png", "no folder no/such")])
def test_plot_that_cannot_be_written(file, told):
    with pytest.raises(MultitowerError, match=told):
        plot_module.check_plot(file)


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setattr(plot_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MultitowerError, match=r"pip install 'multitower\[plot\]'"):
        plot_module.check_plot("a.png")
