"""Starting TensorFlow for the command line, where standard error is for errors.

TensorFlow logs about CUDA while it is imported and while it looks for GPUs, before its log levels are in force
(https://github.com/abseil/abseil-cpp/pull/1957, https://github.com/tensorflow/tensorflow/pull/102212).
"""

import os
import sys
import tempfile
from contextlib import contextmanager


def start_tensorflow():
    """Import TensorFlow and have it look for devices; what its C++ side writes to standard error is not shown.

    It is shown where starting fails, and where TF_CPP_MIN_LOG_LEVEL asks for more than errors (0 or 1).
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") in ("0", "1"):
        _start()
        return
    with _standard_error_held_back():
        _start()


def _start():
    from .device import load_drivers

    load_drivers()


@contextmanager
def _standard_error_held_back():
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(shown, held.read())
            raise
        finally:
            os.dup2(shown, 2)
            os.close(shown)
