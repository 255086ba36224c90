"""Where the time goes, critical path, lanes and categories, on forged operations and graphs with known answers."""

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.core.framework import graph_pb2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from multitower.timeline.advice import advise
from multitower.timeline.breakdown import SHARES, breakdown, slowest_tower
from multitower.timeline.categories import categories_of
from multitower.timeline.chrome import chrome_events
from multitower.timeline.critical import critical_path, in_one_line
from multitower.timeline.graph import graph_that_ran, read_graphs, short_device
from multitower.timeline.intervals import difference, intersection, seconds, union
from multitower.timeline.lanes import lanes
from multitower.timeline.meetings import meetings
from multitower.timeline.pairs import misplaced
from multitower.timeline.picture import picture
from multitower.timeline.profile import Operation, Step, read_operations, read_steps

MOMENTS = st.integers(0, 40)
SPANS = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda pair: tuple(map(float, sorted(pair)))))


def points(intervals):
    """The middles of unit intervals that lie in a set whose ends are whole numbers."""
    return {i for i in range(41) if any(start <= i + 0.5 <= end for start, end in intervals)}


@given(SPANS, SPANS)
def test_sets_of_moments_are_those_of_their_points(a, b):
    first, second = union(a), union(b)
    assert points(first) == points(a)
    assert seconds(first) == len(points(a))
    assert points(intersection(first, second)) == points(a) & points(b)
    assert points(difference(first, second)) == points(a) - points(b)
    assert all(x[1] < y[0] for x, y in pairwise(first))


def operation(name, device, start, end, op="MatMul", category="forward", **more):
    return Operation(name, op, device, category, float(start), float(end), 0, **more)


PREFIX = {"CPU:0": "zero", "CPU:1": "one"}


def collective(device, start, end, ready, last):
    more = {"ready_seconds": float(ready), "last_device": last, "meeting": (0, "sum", 0)}
    return operation(f"{PREFIX[device]}/sum", device, start, end, "CollectiveReduceV2", "reduce", **more)


STEP = Step(0, 0.0, 19.0, 20.0)
# seconds     0  input  2   forward  6   backward  10      14 sum 16   update 17        20
# CPU:0       ····IIII  ████████████  ████████████  wait    ▓▓▓▓▓     ████         host
# CPU:1       ····IIII  ██████████████████████████████████  ▓▓▓▓▓     ████  19     host
OPERATIONS = [
    operation("next", "CPU:0", 0, 2, "IteratorGetNext", "input"),
    operation("zero/f", "CPU:0", 2, 6),
    operation("zero/b", "CPU:0", 6, 10, category="backward"),
    operation("one/f", "CPU:1", 2, 9),
    operation("one/b", "CPU:1", 9, 14, category="backward"),
    collective("CPU:0", 10, 16, 14, "CPU:1"),
    collective("CPU:1", 14, 16, 14, "CPU:1"),
    operation("one/late", "CPU:1", 15, 15.5, category="backward"),
    operation("zero/u", "CPU:0", 16, 17, category="update"),
    operation("one/u", "CPU:1", 16, 19, category="update"),
]


def test_every_moment_is_counted_once():
    first, second = breakdown(OPERATIONS, meetings(GRAPH, OPERATIONS), [STEP], ["CPU:0", "CPU:1"])
    assert [getattr(first, name) for name in SHARES] == [9.0, 2.0, 0.0, 2.0, 6.0, 1.0]  # waits 10–14 and 17–19
    assert [getattr(second, name) for name in SHARES] == [15.5, 1.5, 0.0, 2.0, 0.0, 1.0]
    assert (first.hidden, second.hidden) == (0.0, 0.5)
    assert sum(first.percent(name) for name in SHARES) == pytest.approx(100)
    assert slowest_tower([first, second]) == ("CPU:1", 4.0)


def test_waiting_for_input_in_python_and_for_copies():
    step = Step(0, 0.0, 10.0, 10.0, input_waits=((0.0, 3.0),))
    ops = [
        operation("f", "CPU:0", 3, 5),
        operation("send", "CPU:0", 5, 6, "_Send", "copy"),
        operation("receive", "CPU:1", 3, 6, "_Recv", "copy"),
        operation("g", "CPU:1", 6, 10),
    ]
    first, second = breakdown(ops, [], [step], ["CPU:0", "CPU:1"])
    assert [getattr(first, name) for name in SHARES] == [2.0, 0.0, 1.0, 3.0, 4.0, 0.0]
    assert [getattr(second, name) for name in SHARES] == [4.0, 0.0, 0.0, 3.0, 3.0, 0.0]


def forged(*nodes):
    """A graph of (name, op, device number, inputs)."""
    graph = graph_pb2.GraphDef()
    for name, op, device, *inputs in nodes:
        device = f"/job:localhost/replica:0/task:0/device:CPU:{device}"
        graph.node.add(name=name, op=op, device=device, input=inputs)
    return read_graphs([[graph]])


GRAPH = forged(
    ("next", "IteratorGetNext", 0),
    ("zero/f", "MatMul", 0, "next"),
    ("one/f", "MatMul", 1, "next"),
    ("zero/b", "MatMul", 0, "zero/f"),
    ("one/b", "MatMul", 1, "one/f"),
    ("zero/sum", "CollectiveReduceV2", 0, "zero/b"),
    ("one/sum", "CollectiveReduceV2", 1, "one/b"),
    ("zero/u", "Sub", 0, "shape"),
    ("shape", "Reshape", 0, "zero/sum"),
    ("one/u", "Sub", 1, "one/sum"),
)


def test_the_critical_path_leads_through_the_slow_tower():
    path = critical_path(GRAPH, OPERATIONS, STEP)
    assert [(s.name, s.seconds) for s in path] == [
        *(("next", 2.0), ("one/f", 7.0), ("one/b", 5.0), ("one/sum", 2.0), ("one/u", 3.0), ("", 1.0))
    ]
    assert in_one_line(path) == (
        "input CPU:0 2000.0 ms → forward CPU:1 7000.0 ms → backward CPU:1 5000.0 ms → reduction CPU:1 2000.0 ms → "
        "update CPU:1 3000.0 ms → host 1000.0 ms"
    )


def test_the_critical_path_crosses_a_collective_to_the_last_tower_and_looks_through_what_is_not_timed():
    ops = [o for o in OPERATIONS if o.name != "one/u"] + [operation("zero/u", "CPU:0", 17, 20, category="update")]
    names = [s.name for s in critical_path(GRAPH, ops, STEP)]
    assert names[:4] == ["next", "one/f", "one/b", "one/sum"]
    assert names[-1] == "zero/u"


def test_an_operation_that_was_ready_waited_for_what_ran_where_it_could_have_run():
    graph = forged(("a", "MatMul", 0), ("b", "MatMul", 1), ("c", "MatMul", 0, "a"))
    ops = [operation("a", "CPU:0", 0, 2), operation("b", "CPU:1", 2, 8), operation("c", "CPU:0", 8, 10)]
    step = Step(0, 0.0, 10.0, 10.0)
    assert [s.name for s in critical_path(graph, ops, step)] == ["a", "b", "c"]
    at_once = [ops[0], ops[1], operation("c", "CPU:0", 2, 10)]
    assert [s.name for s in critical_path(graph, at_once, step)] == ["a", "c"]


def advice(operations, step=STEP):
    return advise(
        breakdown(operations, meetings(GRAPH, operations), [step], ["CPU:0", "CPU:1"]),
        critical_path(GRAPH, operations, step),
        operations,
    )


def test_advice_names_the_tower_waited_for_and_its_operation():
    text = advice(OPERATIONS)
    assert text.startswith("CPU:1 is the tower the others wait for, 4000.0 ms a step, 20 % of the time, where one/f ")


def test_advice_for_busy_devices_and_for_idle_ones():
    busy = [operation("zero/f", "CPU:0", 0, 19.5), operation("one/f", "CPU:1", 0, 19.5)]
    assert advice(busy).startswith("The devices compute 98 % of the step, most of it forward on CPU:")
    idle = [operation("zero/f", "CPU:0", 9, 10), operation("one/f", "CPU:1", 9, 10)]
    assert advice(idle).startswith("No operation runs 95 % of the time")
    copying = [operation(f"{PREFIX[d]}/send", d, 0, 15, "_Send", "copy") for d in ("CPU:0", "CPU:1")]
    assert advice(copying).startswith("Copies between devices take 75 % of the time")


@given(st.lists(st.tuples(MOMENTS, MOMENTS).filter(lambda pair: pair[0] < pair[1])))
def test_operations_of_a_lane_never_overlap_and_lanes_are_few(spans):
    found = lanes(operation("f", "CPU:0", *span) for span in spans).get("CPU:0", {}).get("operations", [])
    assert sorted((o.start_seconds, o.end_seconds) for lane in found for o in lane) == sorted(spans)
    assert all(a.end_seconds < b.start_seconds for lane in found for a, b in pairwise(lane))
    most = max((sum(start <= i <= end for start, end in spans) for i in range(41)), default=0)
    assert len(found) == most


def test_chrome_events_of_known_operations():
    events = chrome_events(GRAPH, OPERATIONS, [STEP], {"CPU:0": "tower 0 on CPU:0"})
    json.dumps(events)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"host: Python", "tower 0 on CPU:0", "CPU:1"}
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert (slices["zero/b"]["cat"], slices["zero/b"]["ts"], slices["zero/b"]["dur"]) == ("backward", 6e6, 4e6)
    assert slices["zero/sum"]["args"] == {"op": "CollectiveReduceV2", "step": 0, "waited_ms": 4000.0, "last": "CPU:1"}
    start, finish = (e for e in events if e["ph"] in "sf")
    assert (start["pid"], start["ts"]) == (slices["one/sum"]["pid"], 14e6)
    assert (finish["pid"], finish["ts"], finish["bp"]) == (slices["zero/sum"]["pid"], 14e6, "e")


def test_the_picture_is_svg_with_a_row_for_each_category_of_each_device():
    text = picture(OPERATIONS, STEP, critical_path(GRAPH, OPERATIONS, STEP), ["CPU:0", "CPU:1"])
    root = ElementTree.fromstring(text)
    told = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    rows = [t for t in told if t in ("CPU:0", "CPU:1", "input", "forward", "backward", "reduction", "update")]
    rest = ["forward", "backward", "reduction", "update"]
    assert rows == ["CPU:0", "input", *rest, "CPU:1", *rest]
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "zero/sum: 4000.000 ms waiting" in titles


def test_categories_from_scopes_types_and_values():
    graph = forged(
        ("multitower_input/split", "Split", 0),
        ("Call/x", "Const", 0),
        ("Call/StatefulPartitionedCall/tower_0/dense/MatMul", "MatMul", 0, "multitower_input/split", "Call/x"),
        ("Call/StatefulPartitionedCall/tower_0/norm/multitower_batch_norm/Mean", "Mean", 0),
        ("Call/StatefulPartitionedCall/tower_0/gradient_tape/Const", "Const", 0),
        (
            "Call/StatefulPartitionedCall/tower_0/loss",
            "Sum",
            0,
            "Call/StatefulPartitionedCall/tower_0/dense/MatMul",
            "Call/x",
        ),
        (
            "Call/StatefulPartitionedCall/tower_0/gradient_tape/dense/MatMul",
            "MatMul",
            0,
            "Call/StatefulPartitionedCall/tower_0/loss",
        ),
        (
            "Call/StatefulPartitionedCall/tower_0/AddN",
            "AddN",
            0,
            "Call/StatefulPartitionedCall/tower_0/gradient_tape/dense/MatMul",
        ),
        (
            "Call/StatefulPartitionedCall/tower_0/CollectiveReduceV2",
            "CollectiveReduceV2",
            0,
            "Call/StatefulPartitionedCall/tower_0/AddN",
        ),
        (
            "Call/StatefulPartitionedCall/tower_0/mul",
            "Mul",
            0,
            "Call/StatefulPartitionedCall/tower_0/CollectiveReduceV2:0",
        ),
        ("Call/StatefulPartitionedCall/tower_0/after", "Mul", 0, "^Call/StatefulPartitionedCall/tower_0/mul"),
        ("Call/StatefulPartitionedCall/tower_0/send", "_Send", 0, "Call/StatefulPartitionedCall/tower_0/mul"),
    )
    assert list(categories_of(graph).values()) == [
        *("input", "forward", "forward", "batch_norm", "backward", "forward", "backward", "backward", "reduce"),
        *("update", "forward", "copy"),
    ]


def test_an_optimizer_of_one_tower_is_known_by_the_variables_it_changes():
    graph = forged(
        ("sgd/lr", "ReadVariableOp", 0),
        ("gradient_tape/dense/MatMul", "MatMul", 0),
        ("sgd/mul", "Mul", 0, "gradient_tape/dense/MatMul", "sgd/lr"),
        ("sgd/AssignSub", "AssignSubVariableOp", 0, "sgd/mul"),
    )
    assert list(categories_of(graph).values()) == ["update", "backward", "update", "update"]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("tower_1/dense/MatMul", "gradient_tape/tower_1/dense/MatMul/MatMul_1"),
        ("tower_1/dense/Relu", "gradient_tape/tower_1/dense/ReluGrad"),
        ("tower_1/dense/MatMul", "gradient_tape/tower_1/dense/MatMul_3/MatMul"),
        ("tower_1/dense/MatMul", "gradients/tower_1/dense/MatMul_grad/MatMul_1"),
        (
            "Call/StatefulPartitionedCall/tower_1/dense/MatMul",
            "Call/StatefulPartitionedCall/tower_1/gradient_tape/dense/MatMul/MatMul",
        ),
        (
            "Call/StatefulPartitionedCall/tower_1/dense/MatMul",
            "Call/StatefulPartitionedCall/tower_1/gradient_tape/elsewhere/Mul",
        ),
    ],
)
def test_a_backward_operation_is_known_by_its_forward_operation(forward, backward):
    for device, found in ((1, 0), (0, 1)):
        graph = forged((forward, "MatMul", 1), ("tower_0/dense/MatMul", "MatMul", 0), (backward, "MatMul", device))
        wrong, compared = misplaced(graph, categories_of(graph))
        assert (len(wrong), compared) == (found, 1)
    assert (wrong[0].device, wrong[0].forward_devices) == ("CPU:0", ("CPU:1",))


def test_functions_that_did_not_run_are_left_out():
    ran, other = (graph_pb2.GraphDef() for _ in range(2))
    ran.node.add(name="both", op="Mul")
    ran.node.add(name="only", op="Mul")
    other.node.add(name="both", op="Add")
    other.node.add(name="meeting", op="CollectiveReduceV2")
    assert sorted(graph_that_ran([[ran], [other]], {"both", "only"})) == ["both", "only"]
    assert graph_that_ran([[other], [ran]], {"both", "only"})["both"].op == "Mul"


def test_names_of_devices():
    assert short_device("/job:localhost/replica:0/task:0/device:CPU:1") == "CPU:1"
    assert short_device("/device:GPU:0") == "GPU:0"
    assert short_device("/job:worker/replica:0/task:3/device:GPU:0") == "GPU:0 of worker 3"


class Page(HTMLParser):
    """What a page refers to, and whether its tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.references, self.open, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def forged_profile():
    """A step on a GPU, as TensorFlow's profiler writes it: a plane of the host, one of the GPU with a line a stream."""
    space = xplane_pb2.XSpace()
    host, gpu = space.planes.add(name="/host:CPU"), space.planes.add(name="/device:GPU:0 (a card)")

    def event(plane, line, name, start, end, **told):
        known = {m.name: i for i, m in plane.event_metadata.items()}
        number = known.get(name, len(known) + 1)
        plane.event_metadata[number].name = name
        added = line.events.add(metadata_id=number, offset_ps=int(start * 1e12), duration_ps=int((end - start) * 1e12))
        for key, value in told.items():
            stats = {m.name: i for i, m in plane.stat_metadata.items()}
            stat = stats.get(key, len(stats) + 1)
            plane.stat_metadata[stat].name = key
            kind = {"str_value": value} if isinstance(value, str) else {"int64_value": value}
            added.stats.add(metadata_id=stat, **kind)

    python, pool = host.lines.add(name="python"), host.lines.add(name="tf_Compute")
    stream, derived = gpu.lines.add(name="Stream #13(Compute)"), gpu.lines.add(name="TensorFlow Ops")
    event(host, python, "multitower_step", 0, 10, step_num=0)
    event(host, python, "FunctionRun", 1, 2, id=7)
    event(host, pool, "ExecutorState::Process", 1, 3, id=7)
    event(host, pool, "f:MatMul", 1, 1.5)  # the launch
    event(host, pool, "s:Shape", 2, 2.5)
    event(gpu, stream, "volta_sgemm", 2, 6, tf_op="f:MatMul")
    event(gpu, stream, "MemcpyH2D", 6, 7)
    event(gpu, stream, "ncclDevKernel_AllReduce", 7, 9)
    event(gpu, derived, "MatMul", 2, 6, tf_op="f:MatMul")
    return space


def test_kernels_on_a_gpu_are_its_operations_and_their_launches_are_not():
    graph = graph_pb2.GraphDef()
    graph.node.add(name="f", op="MatMul", device="/job:localhost/replica:0/task:0/device:GPU:0")
    graph.node.add(name="s", op="Shape", device="/job:localhost/replica:0/task:0/device:CPU:0")
    nodes = read_graphs([[graph]])
    found = read_operations(forged_profile(), nodes, categories_of(nodes))
    assert [(o.name, o.device, o.category, o.start_seconds, o.end_seconds) for o in found] == [
        ("s", "CPU:0", "forward", 2.0, 2.5),
        ("f", "GPU:0", "forward", 2.0, 6.0),
        ("MemcpyH2D", "GPU:0", "copy", 6.0, 7.0),
        ("ncclDevKernel_AllReduce", "GPU:0", "reduce", 7.0, 9.0),
    ]
    (share,) = breakdown(found, [], read_steps(forged_profile()), ["GPU:0"])
    assert (share.compute, share.exposed, share.copies, share.host) == (4.0, 2.0, 1.0, 3.0)
