"""What tracing a large step costs: ResNet-50 on small pictures, two towers.

    python benchmarks/trace.py [--pixels 64] [--batch-size 16] [--steps 3] [--json]

Prints the seconds of a step without tracing and of a traced one, those of making and writing the timeline, and the
bytes of the files.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import multitower as mt


class StepSeconds(keras.callbacks.Callback):
    """The seconds of every step of a fit."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self._start)


class Timed(mt.TraceSteps):
    """TraceSteps that notes how long the timeline takes to make and to write."""

    seconds = 0.0

    def _finish(self):
        start = time.perf_counter()
        super()._finish()
        self.seconds = time.perf_counter() - start


def measure(pixels, batch_size, steps):
    devices = mt.devices("cpu:2")
    model = keras.applications.ResNet50(weights=None, input_shape=(pixels, pixels, 3), classes=10)
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    first = 6
    rows = batch_size * (first + steps + 7)
    x = np.random.default_rng(0).standard_normal((rows, pixels, pixels, 3), dtype="float32")
    folder = Path(tempfile.mkdtemp(prefix="multitower_"))
    clock, traced = StepSeconds(), Timed(folder, first=first, steps=steps)
    trainer = mt.Trainer(model, devices)
    trainer.fit(x, np.zeros(rows, int), batch_size=batch_size, verbose=0, callbacks=[clock, traced])
    timeline = traced.timeline
    return {
        "operations": len(timeline.graph),
        "step_seconds": statistics.median([*clock.seconds[1:first], *clock.seconds[first + steps + 1 :]]),
        "graphs_step_seconds": clock.seconds[first],
        "traced_step_seconds": statistics.median(clock.seconds[first + 1 : first + steps]),
        "timeline_seconds": traced.seconds,
        "bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "advice": timeline.advice,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.pixels, arguments.batch_size, arguments.steps)
    for name, value in found.items():
        print(f"{name.replace('_', ' '):>20}  {value:.3f}" if isinstance(value, float) else f"{name:>20}  {value}")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
