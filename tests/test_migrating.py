"""docs/migrating.md: every program on it runs, and before and after end with the same weights."""

import linecache
import re
import runpy
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest

from oracle import BOUND, assert_close

DOCUMENT = (Path(__file__).parent.parent / "docs" / "migrating.md").read_text()
COMMON, *SECTIONS = re.split(r"^## From ", DOCUMENT, flags=re.MULTILINE)
SECTIONS = {section.split("\n")[0].strip("`"): section for section in SECTIONS}


def programs(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def weights_of(tmp_path):
    """A function that runs a program as a file, and returns what is in its `weights` when it is done."""

    def run(program):
        file = tmp_path / "program.py"
        file.write_text("\n".join([*programs(COMMON), program]))
        linecache.checkcache()  # TensorFlow reads the source of what it traces
        return [np.asarray(value) for value in runpy.run_path(str(file))["weights"]]

    return run


@pytest.fixture
def stand_ins(monkeypatch):
    """Horovod as one process of one, and multi_gpu_model as one GPU: what both are where there is one device."""
    hvd = types.ModuleType("horovod.keras")
    hvd.init = lambda: None
    hvd.size = lambda: 1
    hvd.rank = lambda: 0
    hvd.DistributedOptimizer = lambda optimizer: optimizer
    hvd.callbacks = types.SimpleNamespace(BroadcastGlobalVariablesCallback=lambda root: keras.callbacks.Callback())
    horovod = types.ModuleType("horovod")
    horovod.keras = hvd
    monkeypatch.setitem(sys.modules, "horovod", horovod)
    monkeypatch.setitem(sys.modules, "horovod.keras", hvd)
    monkeypatch.setattr(keras.utils, "multi_gpu_model", lambda model, gpus: model, raising=False)


def one_device(batch_size, rate, decay=None):
    """Plain Keras on one device with the layers and data of the page."""
    names = {}
    exec(programs(COMMON)[0], names)
    model = names["make_model"](decay and keras.regularizers.L2(decay))
    model.compile(keras.optimizers.SGD(rate), "mse")
    model.fit(names["x"], names["y"], batch_size=batch_size, shuffle=False, verbose=0)
    return model.get_weights()


EXPECTED = {
    "towers written by hand": (16, 0.1, 0.01),
    "multi_gpu_model": (16, 0.1),
    "MirroredStrategy": (16, 0.1),
    "Horovod": (16, 0.1),
}
CASES = [(section, i) for section, text in SECTIONS.items() for i in range(len(programs(text)))]


def test_every_section_is_here():
    assert SECTIONS.keys() == EXPECTED.keys()
    assert [CASES.count((section, 1)) for section in SECTIONS] == [1, 1, 1, 1]


@pytest.mark.parametrize(("section", "number"), CASES)
def test_before_and_after_end_with_the_weights_of_one_device(section, number, stand_ins, weights_of):
    got = weights_of(programs(SECTIONS[section])[number])
    alone = (8, 0.05) if section == "Horovod" and number == 0 else EXPECTED[section]  # the stand-in is one process
    assert_close(got, one_device(*alone), BOUND)


def test_the_weights_tell_a_wrong_program(weights_of):
    """Control: half the rate, or a regulariser left out, shows."""
    program = programs(SECTIONS["towers written by hand"])[1]
    for wrong in (program.replace("SGD(0.1)", "SGD(0.05)"), program.replace("L2(0.01)", "L2(0.0)")):
        assert wrong != program
        with pytest.raises(AssertionError, match="apart, allowed are"):
            assert_close(weights_of(wrong), one_device(16, 0.1, 0.01), BOUND)
