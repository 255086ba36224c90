"""Recording steps while they run: which graphs they run, and when each operation ran.

    collect() … collected()   one step, not timed: TensorFlow makes new instances of the step's functions and shows
                              their graphs
    start() … stop()          a few steps, timed by tf.profiler, each of them inside step()

Where the times come from: tf.profiler names every operation and says when it ran, on a CPU not on which device; the
graphs say on which device the operation of that name runs. Both are of the very steps that were asked for, in the
running process.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from .. import upstream
from ..device import functions_instantiated_anew
from ..errors import TraceError

STEP = "multitower_step"
INPUT = "multitower_next_batch"

_LAST_EVENTS_SECONDS = 0.05  # an event is recorded when it ends, in a thread that may end after the step it served
# Operations and what runs them (2), no Python calls (0), kernels on accelerators (1)
_OPTIONS = {"host_tracer_level": 2, "python_tracer_level": 0, "device_tracer_level": 1}


class Recording:
    """The graphs of a step, and the profile of a few runs of it. Give it up with `close`, which can be called twice."""

    def __init__(self):
        self.graphs: list[Any] = []
        self.space: Any = None
        self._numbers = itertools.count()
        self._open = ExitStack()
        self._directory: tempfile.TemporaryDirectory | None = None  # not None: the profiler runs

    def collect(self) -> None:
        """From here to `collected` the graphs of functions are kept; functions run as new instances until `close`."""
        self._open.enter_context(functions_instantiated_anew())
        upstream.collect_graphs()
        self._open.callback(upstream.collected_graphs)

    def collected(self) -> None:
        """The step whose graphs are wanted has run."""
        self.graphs = upstream.collected_graphs()
        if not self.graphs:
            raise TraceError(
                "the step ran no tf.function, and only what runs in graphs can be traced: decorate it with "
                "tf.function, or give multitower.replicate(step, devices)"
            )

    def start(self) -> None:
        """From here on, operations are timed."""
        directory = tempfile.TemporaryDirectory(prefix="multitower_trace_")
        try:
            tf.profiler.experimental.start(directory.name, tf.profiler.experimental.ProfilerOptions(**_OPTIONS))
        except tf.errors.AlreadyExistsError as error:
            directory.cleanup()
            raise TraceError(
                "TensorFlow is being profiled already, and can be only once at a time: leave out "
                "keras.callbacks.TensorBoard(profile_batch=…) or tf.profiler while steps are traced"
            ) from error
        self._directory = directory

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step, whose operations have ended on all devices when this is left."""
        with tf.profiler.experimental.Trace(STEP, step_num=next(self._numbers)):
            yield
            tf.test.experimental.sync_devices()

    def stop(self) -> None:
        """Timing ends."""
        if self._directory is not None:
            time.sleep(_LAST_EVENTS_SECONDS)
            tf.profiler.experimental.stop()
            directory, self._directory = self._directory, None
            with directory as path:
                self.space = upstream.read_profile(next(Path(path).rglob("*.xplane.pb")))

    def close(self) -> None:
        """End everything that is still going on: nothing of TensorFlow's is left changed."""
        if self._directory is not None:
            tf.profiler.experimental.stop(save=False)
            self._directory.cleanup()
            self._directory = None
        self._open.close()


def next_batch() -> Any:
    """A context in which Python takes the next batch from a dataset: the step waits for its input."""
    return tf.profiler.experimental.Trace(INPUT)
