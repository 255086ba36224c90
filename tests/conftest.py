"""One TensorFlow with eight logical CPU devices serves all tests of a process."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

import oracle

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)


def pytest_addoption(parser):
    """The oracle's tests once more for another placement or another way to meet."""
    parser.addoption("--placement", default="auto", help="placement of the oracle's Trainers")
    parser.addoption("--reduce", default="auto", help="reduce of the oracle's Trainers")


def pytest_configure(config):
    oracle.OPTIONS.update(placement=config.getoption("--placement"), reduce=config.getoption("--reduce"))


@pytest.fixture
def run(capsys):
    """A function that runs the command line in this process: exit code, stdout, stderr."""

    from multitower import cli

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call
