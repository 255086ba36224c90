"""One TensorFlow with eight logical CPU devices serves all tests of a process."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)


@pytest.fixture
def run(capsys):
    """A function that runs the command line in this process: exit code, stdout, stderr."""

    from multitower import cli

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call
