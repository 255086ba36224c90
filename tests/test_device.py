"""Devices: what is asked for (pure), what there is (logical CPU devices; GPUs forged), what a fresh process can make.

Every test process has 8 logical CPU devices, configured by conftest.py. No machine of ours has a GPU: the GPU tests
forge physical GPUs in a Context of TensorFlow of their own, so that TensorFlow's own rules about memory growth,
visibility and splitting apply. Only its runtime is never started.
"""

import importlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.eager import context as eager  # to forge GPUs: tf.config keeps no state of its own

from multitower.device_spec import FORMS, Count, parse
from multitower.errors import DeviceError

# `multitower.device` is the module, `multitower.devices` the function
mod = importlib.import_module("multitower.device")
devices = mod.devices

CPUS = [f"CPU:{i}" for i in range(8)]
Logical = tf.config.LogicalDeviceConfiguration
Device = tf.config.LogicalDevice
HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
no_gpu = pytest.mark.skipif(HAS_GPU, reason="asks for what a machine without GPUs gives")


# What was asked for


@pytest.mark.parametrize(
    ("spec", "wish"),
    [
        (None, Count("all", 1)),
        ("all", Count("all", "all")),
        (" ALL ", Count("all", "all")),
        (4, Count(4, 4)),
        (np.int64(4), Count(4, 4)),
        ("4", Count(4, 4)),  # the command line has text only
        ("gpu", Count("all", 0)),
        ("GPU", Count("all", 0)),
        ("gpu:2", ("GPU:2",)),
        ("gpu:0,2", ("GPU:0", "GPU:2")),
        ("gpu:2,0", ("GPU:2", "GPU:0")),  # the order of the towers is the user's
        ("GPU: 0 , 02", ("GPU:0", "GPU:2")),
        ("gpu:0,gpu:2", ("GPU:0", "GPU:2")),
        ("cpu", Count(0, 1)),
        ("cpu:4", Count(0, 4)),
        ("CPU:4", Count(0, 4)),
        ("/CPU:4", ("CPU:4",)),  # after a slash an index, as TensorFlow reads it
        ("/device:cpu:4", ("CPU:4",)),
        (["cpu:4"], ("CPU:4",)),
        (["GPU:0", "GPU:1"], ("GPU:0", "GPU:1")),
        (("/GPU:1", "/device:GPU:0"), ("GPU:1", "GPU:0")),
        (["/job:localhost/replica:0/task:0/device:CPU:1"], ("CPU:1",)),
        ([Device("/device:CPU:1", "CPU"), "CPU:0"], ("CPU:1", "CPU:0")),
        (Device("/device:CPU:1", "CPU"), ("CPU:1",)),
        (SimpleNamespace(name="GPU:3"), ("GPU:3",)),
    ],
)
def test_parse(spec, wish):
    assert parse(spec) == wish


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (0, "devices=0: expected at least 1 device; the device with index 0 is"),
        (-2, "devices=-2: expected at least 1 device; "),
        ("-2", "devices='-2': expected at least 1 device; "),
        ("cpu:0", "devices='cpu:0': expected at least 1 device; "),
        ("cpu:-1", "devices='cpu:-1': expected at least 1 device; "),
        ([], "devices=[]: expected at least 1 device; give None"),
        ((), "devices=(): expected at least 1 device; give None"),
        (True, f"devices=True: expected {FORMS}; give one of these"),
        (2.0, f"devices=2.0: expected {FORMS}; give one of these"),
        (np.ones(2), f"devices=array([1., 1.]): expected {FORMS}; give one of these"),
        ({"GPU:0"}, f"devices={{'GPU:0'}}: expected {FORMS}; give one of these"),  # a set has no order
        ("", f"devices='': expected {FORMS}; give one of these"),
        ("xyz", f"devices='xyz': expected {FORMS}; give one of these"),
        ("gpus", 'did you mean "gpu"?'),
        ("gup:0,2", 'did you mean "gpu:0,2"?'),
        ("gpu0", 'did you mean "gpu:0"?'),
        ("cuda:1", 'did you mean "gpu:1"?'),
        ("CPU4", 'did you mean "cpu:4"?'),
        ("cpus=4", 'did you mean "cpu:4"?'),
        ("al", 'did you mean "all"?'),
        ("all:3", 'did you mean "all"?'),
        ("cpu:", "devices='cpu:': expected the number of logical CPU devices after \"cpu:\"; "),
        ("cpu:0,1", 'name single ones in a list, such as ["CPU:0", "CPU:1"]'),
        ("cpu:two", "devices='cpu:two': expected the number of logical CPU devices"),
        ("gpu:", 'devices=\'gpu:\': expected indices of GPUs after "gpu:", such as "gpu:0,2"; all GPUs are "gpu"'),
        ("gpu:-1", "devices='gpu:-1': expected indices of GPUs"),
        ("gpu:0,,1", "devices='gpu:0,,1': expected indices of GPUs"),
        ("gpu:²", "expected indices of GPUs"),  # a digit for str.isdigit, none for int()
        ("gpu:0,0", "devices='gpu:0,0': expected a different device for each tower; name GPU:0 once"),
        (["GPU:0", "/device:gpu:0"], "name GPU:0 once"),
        (["GPU:0", "CPU:0"], "expected devices of one kind; name only GPUs or only CPUs"),
        (["GPU"], 'expected names such as "GPU:0" or "/device:CPU:1"; \'GPU\' is no name of a device'),
        (["GPU:0", 1], 'devices=[\'GPU:0\', 1]: expected names such as "GPU:0" or "/device:CPU:1"; 1 is no name'),
        (["GPU:-1"], "'GPU:-1' is no name of a device"),
        (["TPU:0"], "'TPU:0' is no name of a device"),
        (SimpleNamespace(name=3), "3 is no name of a device"),
        (["/job:worker/replica:0/task:1/device:GPU:0"], "device:GPU:0' is not a device of this process"),
        (tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU"), "'/physical_device:GPU:0' is no name of a device"),
    ],
)
def test_what_cannot_be_parsed_is_told_on_one_line(spec, message):
    with pytest.raises(DeviceError) as caught:
        parse(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_long_specification_is_cut_in_the_message():
    with pytest.raises(DeviceError) as caught:
        parse(["GPU:0"] * 1000)
    assert len(str(caught.value)) < 250
    assert "...: expected a different device for each tower" in str(caught.value)


indices = st.lists(st.integers(0, 999), min_size=1, max_size=20)
space = st.sampled_from(["", " ", "  "])


@given(indices=indices, space=space, word=st.sampled_from(["gpu:", "GPU:", "Gpu:"]))
def test_gpu_indices_keep_their_order_and_refuse_repeats(indices, space, word):
    text = word + f"{space},{space}".join(map(str, indices))
    if len(set(indices)) < len(indices):
        with pytest.raises(DeviceError, match="a different device for each tower"):
            parse(text)
    else:
        assert parse(text) == tuple(f"GPU:{i}" for i in indices) == parse([f"/device:GPU:{i}" for i in indices])


@given(st.text(max_size=12) | st.lists(st.text(max_size=12), max_size=3) | st.integers() | st.floats())
def test_anything_is_parsed_or_refused_with_our_error(spec):
    with suppress(DeviceError):
        assert isinstance(parse(spec), Count | tuple)


# What there is: 8 logical CPU devices


@no_gpu
@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (None, CPUS[:1]),
        ("all", CPUS),
        ("cpu", CPUS[:1]),
        ("cpu:4", CPUS[:4]),
        (3, CPUS[:3]),
        (8, CPUS),
        (["CPU:7", "CPU:1"], ["CPU:7", "CPU:1"]),
    ],
)
def test_devices_of_the_cpu(spec, names):
    assert devices(spec) == names


def test_names_place_operations_where_they_say():
    for name, logical in zip(devices("cpu:8"), tf.config.list_logical_devices("CPU"), strict=True):
        with tf.device(name):
            assert tf.random.uniform([]).device.endswith(logical.name)
    assert devices(tf.config.list_logical_devices("CPU")) == CPUS


@no_gpu
def test_more_than_there_are(monkeypatch):
    tf.constant(0)  # the runtime has started
    with pytest.raises(DeviceError) as caught:
        devices(["CPU:0", "CPU:8"])
    assert 'expected CPU indices from 0 to 7; call multitower.devices("cpu:9") before any tensor' in str(caught.value)
    # conftest's split is a user's: it is not redone
    with pytest.raises(DeviceError, match="at most 8 logical CPU devices, the number tf"):
        devices("cpu:9")
    # were it ours, TensorFlow would still refuse, and must leave everything as it was
    monkeypatch.setattr(mod, "_own_split", 8)
    with pytest.raises(DeviceError, match="as TensorFlow has already started with 8; call") as caught:
        devices(9)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert devices("all") == CPUS


@no_gpu
@pytest.mark.parametrize("spec", ["gpu", "gpu:0", ["GPU:0"]])
def test_a_gpu_where_there_is_none(spec):
    with pytest.raises(DeviceError, match='expected a GPU that TensorFlow sees, and it sees none; give "cpu:2"'):
        devices(spec)


KEYS = ["devices", "python", "tensorflow", "keras", "multitower", "cuda", "memory_growth", "cpu_cores"]


def test_describe_is_plain_data():
    told = mod.describe("cpu:2")
    cpu = {"kind": "CPU", "physical": "CPU", "memory_bytes": None}
    assert told["devices"] == [{"name": "CPU:0", **cpu}, {"name": "CPU:1", **cpu}]
    assert told["tensorflow"] == tf.__version__
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["keras"].startswith("3.")
    assert 1 <= told["cpu_cores"] <= (os.cpu_count() or 1)
    assert json.loads(json.dumps(told)) == told
    assert list(told) == KEYS


def test_a_version_of_what_is_not_installed_is_none():
    assert mod._version("no-such-distribution-of-anyone") is None


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_gpus_of_this_machine():
    names = devices("gpu")
    assert devices() == names == devices(tf.config.list_logical_devices("GPU"))
    for name in names:
        with tf.device(name):
            assert tf.random.uniform([]).device.endswith(name)
    assert mod.physical_gpu_count(names) == len(tf.config.get_visible_devices("GPU"))


# GPUs, forged


@pytest.fixture
def machine(monkeypatch):
    """A function that puts a forged machine under devices.py: a Context of TensorFlow with n physical GPUs."""
    monkeypatch.setenv(mod._FORCE_GROWTH, "")  # remembers the variable, and takes back what devices.py sets
    monkeypatch.delenv(mod._FORCE_GROWTH)
    monkeypatch.setattr(mod, "_own_split", 0)

    def build(gpus):
        context = eager.Context()
        kinds = ["CPU:0", *(f"GPU:{i}" for i in range(gpus))]
        context._physical_devices = [tf.config.PhysicalDevice(f"/physical_device:{k}", k[:3]) for k in kinds]
        context._visible_device_list = list(context._physical_devices)
        context._pluggable_devices = []
        context._memory_growth_map = dict.fromkeys(context._physical_devices[1:])
        context.get_device_details = lambda device: {"device_name": f"card of {device.name}"}
        vars(context).update(experimental=context, LogicalDeviceConfiguration=Logical)  # so it passes for tf.config
        monkeypatch.setattr(mod, "tf", SimpleNamespace(config=context, sysconfig=tf.sysconfig, __version__="2.21"))
        return context

    return build


def started(context):
    context._context_handle = object()  # what the setters look at


def growth(context):
    """The memory growth each GPU is set to, and what TensorFlow will tell its C++ side."""
    gpus = context.list_physical_devices("GPU")
    return [context.get_memory_growth(gpu) for gpu in gpus], context.config.gpu_options.allow_growth


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (None, ["GPU:0", "GPU:1", "GPU:2"]),
        ("all", ["GPU:0", "GPU:1", "GPU:2"]),
        ("gpu", ["GPU:0", "GPU:1", "GPU:2"]),
        (2, ["GPU:0", "GPU:1"]),
        ("gpu:2,0", ["GPU:2", "GPU:0"]),
        (["/device:GPU:1"], ["GPU:1"]),
        ("cpu", ["CPU:0"]),
        ("cpu:4", CPUS[:4]),
        (["CPU:0"], ["CPU:0"]),
    ],
)
def test_devices_of_a_machine_with_gpus(machine, spec, names):
    machine(gpus=3)
    assert devices(spec) == names
    assert mod.physical_gpu_count(names) == len([name for name in names if name.startswith("GPU")])


@pytest.mark.parametrize(
    ("gpus", "spec", "message"),
    [
        (2, 3, 'devices=3: expected at most 2, the number of GPUs; give "gpu" for all, "cpu:3" for logical CPUs'),
        (2, "gpu:2", "devices='gpu:2': expected GPU indices from 0 to 1; give 2 for the first 2, or count from 0"),
        (1, "gpu:1", "devices='gpu:1': expected GPU:0, the only GPU device; give 1 for the first 1, or count from 0"),
        (0, "gpu", "devices='gpu': expected a GPU that TensorFlow sees, and it sees none; give \"cpu:2\""),
    ],
)
def test_gpus_that_are_not_there(machine, gpus, spec, message):
    machine(gpus)
    with pytest.raises(DeviceError) as caught:
        devices(spec)
    assert str(caught.value).startswith(message)


def test_hidden_gpus_do_not_count(machine):
    context = machine(gpus=3)
    context.set_visible_devices(context.list_physical_devices("GPU")[1:], "GPU")
    assert devices("gpu") == ["GPU:0", "GPU:1"]
    assert growth(context)[0] == [None, True, True]


def test_logical_gpus_count_and_share_their_card(machine):
    context = machine(gpus=3)
    gpus = context.list_physical_devices("GPU")
    context.set_logical_device_configuration(gpus[1], [Logical(memory_limit=1000), Logical(memory_limit=500)])
    assert devices("gpu") == ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]
    assert mod.physical_gpu_count(devices("gpu")) == 3
    assert mod.physical_gpu_count(["GPU:1", "/device:GPU:2"]) == 1
    told = mod.describe("gpu:0,2")
    assert [device["physical"][-5:] for device in told["devices"]] == ["GPU:0", "GPU:1"]
    assert [device["memory_bytes"] for device in told["devices"]] == [None, 500 * 2**20]
    # TensorFlow lets no memory grow as soon as one GPU has limits; these are the user's, so that stays
    assert told["memory_growth"] == {f"GPU:{i}": False for i in range(4)}
    assert mod._FORCE_GROWTH not in os.environ
    with pytest.raises(DeviceError, match="expected GPU indices from 0 to 3"):
        mod.physical_gpu_count(["GPU:4"])


def test_an_ordinal_goes_before_the_order_of_the_cards(machine):
    context = machine(gpus=2)
    for gpu in context.list_physical_devices("GPU"):  # one fast, one slow part on each card: GPU:0 and GPU:2 share one
        parts = [Logical(memory_limit=9, experimental_device_ordinal=i) for i in range(2)]
        context.set_logical_device_configuration(gpu, parts)
    assert mod.physical_gpu_count(["GPU:0", "GPU:2"]) == 1
    assert mod.physical_gpu_count(["GPU:0", "GPU:1"]) == 2


def test_memory_grows_on_every_gpu(machine):
    context = machine(gpus=2)
    assert mod.describe()["memory_growth"] == {"GPU:0": True, "GPU:1": True}
    assert growth(context) == ([True, True], True)
    assert mod._FORCE_GROWTH not in os.environ  # not needed where nothing is split


@pytest.mark.parametrize("chosen", [True, False])
def test_the_memory_growth_of_the_user_holds_for_all_gpus(machine, chosen):
    # one GPU set and the others not is "Memory growth cannot differ between GPU devices" when the runtime starts
    context = machine(gpus=3)
    context.set_memory_growth(context.list_physical_devices("GPU")[1], chosen)
    devices()
    assert growth(context) == ([chosen] * 3, chosen)


def test_memory_growth_after_the_start_is_left_and_reported(machine):
    context = machine(gpus=2)
    started(context)
    assert devices() == ["GPU:0", "GPU:1"]
    assert mod.describe()["memory_growth"] == {"GPU:0": False, "GPU:1": False}
    with pytest.raises(DeviceError, match="at most 1 logical CPU device, as TensorFlow has already started with 1"):
        devices("cpu:2")
    assert mod._FORCE_GROWTH not in os.environ  # too late, and describe() would believe it


def test_memory_limits_of_the_user_are_not_turned_into_growth(machine):
    context = machine(gpus=1)
    devices()
    context.set_logical_device_configuration(context.list_physical_devices("GPU")[0], [Logical(memory_limit=1000)])
    assert mod.describe("cpu:2")["memory_growth"] == {"GPU:0": False}
    assert mod._FORCE_GROWTH not in os.environ


@pytest.mark.parametrize("user_splits_first", [True, False])
def test_memory_still_grows_where_the_cpu_is_split(machine, user_splits_first):
    context = machine(gpus=2)
    if user_splits_first:
        context.set_logical_device_configuration(context.list_physical_devices("CPU")[0], [Logical()] * 4)
    assert devices("cpu:4") == CPUS[:4]
    # TensorFlow forgets the growth that is set. When this fails it no longer does, and _keep_memory_growth can go.
    assert growth(context) == ([True, True], False)
    assert os.environ[mod._FORCE_GROWTH] == "true"
    assert mod.describe()["memory_growth"] == {"GPU:0": True, "GPU:1": True}


def test_the_environment_of_the_user_wins(machine, monkeypatch):
    machine(gpus=1)
    monkeypatch.setenv(mod._FORCE_GROWTH, "false")
    assert mod.describe("cpu:2")["memory_growth"] == {"GPU:0": False}
    assert os.environ[mod._FORCE_GROWTH] == "false"


# What a fresh process can make


def run(script):
    """Run a script in a process of its own, with this process' multitower."""
    path = os.pathsep.join([str(Path(str(mod.__file__)).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-c", PREAMBLE + script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


PREAMBLE = """
import importlib
import tensorflow as tf
mod = importlib.import_module("multitower.device")
devices = mod.devices

def refused(spec, *parts):
    try:
        devices(spec)
    except mod.DeviceError as error:
        assert all(part in str(error) for part in parts), error
    else:
        raise AssertionError(spec)
"""


def test_a_fresh_process_splits_the_cpu_until_it_starts():
    run("""
assert devices() == devices("all") == devices("cpu") == devices(1) == ["CPU:0"]
refused(["CPU:1"], "expected CPU:0, the only CPU device", 'multitower.devices("cpu:2") before any tensor')
mod.describe()
# none of these has started the runtime
assert devices("cpu:2") == ["CPU:0", "CPU:1"]
assert devices(4) == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]  # its own split can still be raised
assert devices("cpu:2") == ["CPU:0", "CPU:1"]              # and is not lowered
assert len(devices("all")) == 4
with tf.device(devices("all")[3]):
    assert tf.constant(1.0).device.endswith("CPU:3")
assert len(tf.config.list_logical_devices("CPU")) == 4
refused("cpu:8", "at most 4 logical CPU devices, as TensorFlow has already started with 4", "command line")
assert len(devices("all")) == len(devices("cpu:4")) == 4
""")


def test_a_process_that_has_started_with_one():
    run("""
tf.constant(0)
assert devices() == devices("all") == devices("cpu:1") == ["CPU:0"]
refused("cpu:2", "devices='cpu:2': expected at most 1 logical CPU device, as TensorFlow has already started with 1; "
        'call multitower.devices("cpu:2") before any tensor or model is created, or use the command line')
refused(2, "devices=2: expected at most 1")
""")


def test_a_split_of_the_user_is_kept():
    run("""
cpu, = tf.config.list_physical_devices("CPU")
part = tf.config.LogicalDeviceConfiguration()
assert devices("cpu:2") == ["CPU:0", "CPU:1"]
tf.config.set_logical_device_configuration(cpu, [part] * 3)  # overrides ours
assert devices("cpu:2") == ["CPU:0", "CPU:1"]
assert len(devices("all")) == 3
refused("cpu:4", "at most 3 logical CPU devices, the number tf.config.set_logical_device_configuration was called with",
        "call it with 4, or not at all")
assert len(tf.config.list_logical_devices("CPU")) == 3
""")
