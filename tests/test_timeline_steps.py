"""Real steps, traced: networks of known structure, a slow tower, slow input, a large reduction, gradients misplaced."""

import functools
import gzip
import json
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import multitower as mt
from multitower.errors import JobError, TraceError
from multitower.timeline.breakdown import SHARES, is_compute
from multitower.timeline.categories import CATEGORIES
from multitower.timeline.critical import by_category
from small_models import classification, compiled, features, numbers, sequential
from test_timeline import Page

TWO = ["CPU:0", "CPU:1"]


@functools.cache
def network(placement="replicated", reduce="ring"):
    """Dense, batch norm, dense on two towers."""
    batch = classification(64)
    trainer = mt.Trainer(sequential(), TWO, placement=placement, reduce=reduce)
    return mt.trace(trainer, (batch["x"], batch["y"]))


WAYS = [("replicated", "ring"), ("shared", "host")]


def nodes(timeline, category, op, device="CPU:1"):
    categories = timeline.categories
    return [n for n in timeline.graph.values() if (categories[n.name], n.op, n.device) == (category, op, device)]


@pytest.mark.parametrize("device", TWO)
def test_categories_of_a_known_network(device):
    timeline = network()
    assert len(nodes(timeline, "forward", "_FusedMatMul", device)) == 2  # with their bias
    assert len(nodes(timeline, "backward", "MatMul", device)) == 3  # both kernels, and the input of the second layer
    assert len(nodes(timeline, "forward", "Tanh", device)) == 1
    assert len(nodes(timeline, "backward", "TanhGrad", device)) == 1
    assert len(nodes(timeline, "batch_norm", "CollectiveGatherV2", device)) == 1  # moments
    assert len(nodes(timeline, "batch_norm", "CollectiveReduceV2", device)) == 1  # their gradient
    assert len(nodes(timeline, "reduce", "CollectiveReduceV2", device)) == 1  # one bucket of gradients
    assert len(nodes(timeline, "reduce", "CollectiveGatherV2", device)) == 1  # outputs
    changed = sum(len(nodes(timeline, "update", op, device)) for op in ("AssignVariableOp", "AssignAddVariableOp"))
    assert changed >= 2 * 6  # six weights and their momentum
    assert len(nodes(timeline, "input", "IteratorGetNext", device)) == (device == "CPU:0")


def test_categories_where_sums_are_made_on_the_host_and_weights_are_shared():
    timeline = network("shared", "host")
    for device in TWO:
        assert len(nodes(timeline, "forward", "_FusedMatMul", device)) == 2
        assert len(nodes(timeline, "backward", "MatMul", device)) == 3
    assert not [n for n in timeline.graph.values() if n.op.startswith("Collective")]
    assert len(nodes(timeline, "reduce", "AddN", "CPU:0")) == 6  # one for each weight
    assert len(nodes(timeline, "batch_norm", "AddN", "CPU:0")) == 1  # the gradient of the moments
    assert timeline.placement["CPU:0"]["update"] > 12
    assert timeline.placement["CPU:1"]["update"] == 0


@pytest.mark.parametrize("way", WAYS)
def test_operations_ran_on_their_devices_in_order(way):
    timeline = network(*way)
    assert timeline.devices == TWO
    assert len(timeline.steps) == 3
    for step in timeline.steps:
        own = {o.name: o for o in timeline.operations if o.step == step.number}
        for tower in ("/tower_0/", "/tower_1/"):
            (forward,) = (o for n, o in own.items() if tower in n and o.op == "Tanh")
            (backward,) = (o for n, o in own.items() if tower in n and o.op == "TanhGrad")
            assert forward.device == backward.device == timeline.graph[forward.name].device
            assert step.start_seconds <= forward.start_seconds < forward.end_seconds <= backward.start_seconds
            assert backward.end_seconds <= step.called_seconds
    assert {o.category for o in timeline.operations} == set(CATEGORIES)


@pytest.mark.parametrize("way", WAYS)
def test_shares_add_up_and_compute_is_that_of_the_operations(way):
    timeline = network(*way)
    for share in timeline.shares:
        assert sum(share.percent(name) for name in SHARES) == pytest.approx(100, abs=2)
        spans = [
            (o.start_seconds, o.end_seconds)
            for o in timeline.operations
            if o.device == share.device and is_compute(o) and o.category != "reduce"
        ]
        grid = np.arange(0, timeline.steps[-1].end_seconds, 2e-6)
        busy = np.zeros(len(grid), bool)
        for start, end in spans:
            busy[np.searchsorted(grid, start) : np.searchsorted(grid, end)] = True
        assert share.compute * len(timeline.steps) == pytest.approx(
            busy.sum() * 2e-6,
            rel=0.05,
            abs=2e-6 * len(spans),  # the grid cuts off up to a step of each
        )
    assert timeline.step_seconds == pytest.approx(timeline.steps[-1].end_seconds / 3)
    path = sum(stretch.seconds for stretch in timeline.critical_path)
    assert path == pytest.approx(timeline.typical_step.seconds, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_backward_runs_where_forward_runs(way):
    timeline = network(*way)
    assert timeline.misplaced == []
    assert timeline.compared >= 2 * 10
    assert timeline.placement["CPU:0"]["backward"] == pytest.approx(timeline.placement["CPU:1"]["backward"], abs=3)
    assert timeline.placement["CPU:1"]["input"] == 0


def test_files_chrome_lanes_and_arrows(tmp_path):
    timeline = network()
    files = timeline.save(tmp_path / "new")
    trace = json.loads(gzip.decompress(Path(files["trace.json.gz"]).read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert list(processes.values()) == ["host: Python", "tower 0 on CPU:0", "tower 1 on CPU:1"]
    slices = [e for e in trace if e["ph"] == "X" and processes[e["pid"]] != "host: Python"]
    assert len(slices) == len(timeline.operations)
    for e in slices:
        device = timeline.graph[e["name"]].device
        assert processes[e["pid"]].endswith(device)
        assert e["cat"] == timeline.categories[e["name"]]
    lanes: dict = {}
    for e in sorted(slices, key=lambda e: e["ts"]):
        assert lanes.get((e["pid"], e["tid"]), -1) < e["ts"]
        lanes[e["pid"], e["tid"]] = e["ts"] + e["dur"]
    arrows = [[e for e in trace if e["ph"] in "sf" and e["id"] == n] for n in range(sum(e["ph"] == "s" for e in trace))]
    for start, finish in arrows:
        assert start["ph"] + finish["ph"] == "sf"
        assert start["pid"] != finish["pid"]
        assert start["ts"] <= finish["ts"]
        for end in (start, finish):
            lane = [e for e in slices if (e["pid"], e["tid"]) == (end["pid"], end["tid"])]
            assert any(e["ts"] - 0.01 <= end["ts"] <= e["ts"] + e["dur"] + 0.01 for e in lane)
    assert {start["cat"] for start, _ in arrows} == {"copy", "reduce", "batch_norm"}
    with pytest.raises(JobError, match="not empty"):
        timeline.save(tmp_path / "new")


def test_the_report_is_one_page_that_refers_to_nothing(tmp_path):
    timeline = network()
    text = timeline.html()
    page = Page(text)
    assert page.open == page.references == []
    assert "url(" not in text
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert page.tags.count("svg") == 1
    assert page.tags.count("table") == 3
    assert timeline.advice.split(":")[0] in text


def step_with(extra, **how):
    """A linear regression, one update, on towers; `extra` is added to what the model predicts."""
    w = tf.Variable(tf.ones([6, 1]))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w + extra() - y) ** 2)
        w.assign_sub(0.1 * mt.all_reduce(tape.gradient(loss, w), "mean"))
        return loss

    return mt.replicate(step, TWO, **how)


@pytest.mark.parametrize("how", [{"placement": p, "reduce": r} for p, r in WAYS], ids=["ring", "host"])
def test_the_slow_tower_is_named(how):
    def work():
        """60 multiplications of 500 × 500 matrices on tower 1, none on tower 0."""
        start = (tf.constant(0), tf.eye(500) * tf.cast(mt.rows(), tf.float32))
        rounds = 60 * mt.tower_index()
        return tf.while_loop(lambda i, _: i < rounds, lambda i, m: (i + 1, m @ m / 4.0), start)[1][0, 1]

    timeline = mt.trace(step_with(work, **how), (features(8), numbers(8)))
    first, second = timeline.shares
    assert timeline.slowest == "CPU:1"
    assert timeline.advice.startswith("CPU:1 is the tower the others wait for")
    assert "takes" in timeline.advice
    assert first.percent("waiting") > 50 > 15 > second.percent("waiting")
    assert second.percent("compute") > 50
    assert next(iter(by_category(timeline.critical_path))) == ("forward", "CPU:1")


def _load(_):
    time.sleep(0.06)
    return np.ones([8, 6], "float32")


def sleeping_input():
    def element(i):
        return tf.reshape(tf.numpy_function(_load, [i], tf.float32), [8, 6]), tf.ones([8, 1])

    return tf.data.Dataset.range(4).map(element)


@pytest.mark.parametrize("of", ["step", "fit"])
def test_slow_input_is_named(of):
    traced = step_with(lambda: 0.0) if of == "step" else mt.Trainer(compiled([keras.layers.Dense(1)]), TWO)
    timeline = mt.trace(traced, sleeping_input())
    assert timeline.advice.startswith("The step waits for its input ")
    assert all(share.percent("input") > 60 for share in timeline.shares)
    assert max(timeline.critical_path, key=lambda s: s.seconds).category == "input"


@pytest.mark.parametrize("reduce", ["ring", "host"])
@pytest.mark.parametrize("elements", [8_000_000, pytest.param(100_000_000, marks=pytest.mark.slow)])
def test_a_large_reduction_dominates(elements, reduce):
    large = tf.Variable(tf.zeros([elements]))

    def step(x):
        large.assign(mt.all_reduce(large, "sum"))
        return tf.reduce_sum(x)

    timeline = mt.trace(mt.replicate(step, TWO, placement="replicated", reduce=reduce), features(8))
    # on the host one device adds up and the others wait for it, or all of them are at it: it depends on the sizes
    told = ("The reduction over towers takes ", "most of all in reduction on CPU:0")
    assert any(words in timeline.advice for words in told[: 2 if reduce == "host" else 1])
    assert max(s.percent("exposed") for s in timeline.shares) > 40
    assert max(timeline.critical_path, key=lambda s: s.seconds).category == "reduce"


def naive_step(*, outside):
    """Towers by hand: forward on each device; gradients all outside the scopes of the devices, or each inside."""
    w = tf.Variable(tf.ones([6, 1]))

    @tf.function
    def step(x, y):
        gradients, losses = [], []
        with tf.GradientTape(persistent=True) as tape:
            for i, device in enumerate(TWO):
                with tf.device(device), tf.name_scope(f"tower_{i}"):
                    losses.append(tf.reduce_mean((tf.tanh(x[4 * i : 4 * i + 4] @ w) - y[4 * i : 4 * i + 4]) ** 2))
        for device, loss in zip(TWO, losses, strict=True):
            with tf.device(None if outside else device):
                gradients.append(tape.gradient(loss, w))
        w.assign_sub(0.1 * tf.add_n(gradients))
        return losses

    return step


def test_gradients_taken_outside_the_device_are_found():
    batch = tf.constant(features(8)), tf.constant(numbers(8))
    wrong = mt.trace(naive_step(outside=True), batch, steps=1)
    assert {(m.device, m.forward_devices) for m in wrong.misplaced} == {("CPU:0", ("CPU:1",))}
    assert {m.op for m in wrong.misplaced} >= {"MatMul", "TanhGrad"}
    assert dict(wrong.summary())["colocated"].startswith(f"no: {len(wrong.misplaced)} of {wrong.compared} ")
    right = mt.trace(naive_step(outside=False), batch, steps=1)
    assert right.misplaced == []
    assert right.compared > 0


def test_the_same_step_can_be_traced_again_and_one_device_too():
    model = compiled([keras.layers.Dense(1)])
    trainer = mt.Trainer(model, "cpu:1")
    data = features(8), numbers(8)
    for _ in range(2):
        timeline = mt.trace(trainer, data, steps=2)
        assert timeline.devices == ["CPU:0"]
        assert len(timeline.steps) == 2
        assert timeline.placement["CPU:0"]["update"] > 0
        assert timeline.slowest is None
    plain = compiled([keras.layers.Dense(1)], jit_compile=False)
    assert mt.trace(plain, data, steps=1, batch_size=4).devices == ["CPU:0"]


def trained(*callbacks, epochs=2):
    """(history, weights) of a fit of 12 steps."""
    keras.utils.set_random_seed(0)
    model = sequential()
    trainer = mt.Trainer(model, TWO)
    history = trainer.fit(**classification(48), batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return history.history, model.get_weights()


def test_steps_of_a_running_fit_are_traced_and_the_fit_is_the_same(tmp_path):
    options = tf.config.optimizer.get_experimental_options()
    callback = mt.TraceSteps(tmp_path / "traced", first=4, steps=3)
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(callback.timeline is not None)
    )
    history, weights = trained(callback, watch)
    assert seen == [False] * 8 + [True] * 4  # traced over the end of an epoch, and there before the fit ends
    assert len(callback.timeline.steps) == 3
    assert sorted(p.name for p in (tmp_path / "traced").iterdir()) == ["report.html", "timeline.json", "trace.json.gz"]
    expected_history, expected_weights = trained()
    assert history == expected_history
    assert all(np.array_equal(a, b) for a, b in zip(weights, expected_weights, strict=True))
    assert tf.config.optimizer.get_experimental_options() == options


def test_nothing_is_done_outside_the_traced_steps(tmp_path, monkeypatch):
    done = []
    callback = mt.TraceSteps(tmp_path, first=2, steps=1)
    for name in ("collect", "collected", "start", "step", "stop"):
        original = getattr(mt.timeline.recording.Recording, name)

        def noted(self, original=original, name=name):
            done.append((name, callback._executions))
            return original(self)

        monkeypatch.setattr(mt.timeline.recording.Recording, name, noted)
    trained(callback)
    assert done == [("collect", 2), ("collected", 3), ("start", 3), ("step", 3), ("stop", 4)]


def test_training_that_ends_early_leaves_what_there_is(tmp_path):
    some = mt.TraceSteps(tmp_path / "some", first=9, steps=5)
    none = mt.TraceSteps(tmp_path / "none", first=20)
    trained(some)
    assert len(some.timeline.steps) == 2
    assert (tmp_path / "some" / "report.html").exists()
    trained(none)
    assert none.timeline is None
    assert not (tmp_path / "none").exists()


def test_a_fit_that_breaks_off_does_not_keep_the_next_one_from_tracing(tmp_path):
    def fail(batch, logs):
        if batch == 3:
            raise KeyboardInterrupt

    callback = mt.TraceSteps(tmp_path / "again", first=1, steps=4)
    with pytest.raises(KeyboardInterrupt):
        trained(callback, keras.callbacks.LambdaCallback(on_train_batch_begin=fail))
    trained(callback)
    assert len(callback.timeline.steps) == 4


def test_mistakes_are_told_before_training(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(JobError, match="not empty and is not overwritten"):
        mt.TraceSteps(tmp_path)
    with pytest.raises(JobError, match="is a file"):
        mt.TraceSteps(tmp_path / "file")
    with pytest.raises(TraceError, match=r"first=0: expected a whole number, 1 or more"):
        mt.TraceSteps(tmp_path / "new", first=0)
    with pytest.raises(TraceError, match=r"steps=True: expected a whole number"):
        mt.trace(step_with(lambda: 0.0), (features(8), numbers(8)), steps=True)
    with pytest.raises(TypeError, match="batch_size"):
        mt.trace(step_with(lambda: 0.0), (features(8), numbers(8)), batch_size=4)


def test_what_cannot_be_traced_is_told(tmp_path):
    with pytest.raises(TraceError, match=r"ran no tf\.function"):
        mt.trace(lambda x: x + 1, tf.ones([2]))
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.raises(TraceError, match="profiled already"):
            mt.trace(step_with(lambda: 0.0), (features(8), numbers(8)))
    finally:
        tf.profiler.experimental.stop(save=False)
