"""The input pipeline of the cifar10 job alone, and what two devices consume of it: examples/s.

    python benchmarks/input.py [--batch-size 128] [--rows 5000] [--rounds 5] [--data DIR] [--json]

One round is one epoch of each in turn: the pipeline without training, and the job's network trained from memory, so
that it waits for nothing, by a Trainer on two logical CPU devices. The first round is left out. Without --data random
pictures of 32×32×3 take the place of CIFAR-10's, which cost the pipeline the same.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import multitower as mt
from multitower.cifar10_files import read_folder
from multitower.jobs import cifar10
from multitower.pictures import distorted_batches


def pictures(data, rows):
    if data:
        return read_folder(Path(data))[0]
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (rows, 32, 32, 3), np.uint8), rng.integers(0, 10, rows, np.int32)


def seconds(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def consume(dataset):
    for _ in dataset:
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    devices = mt.devices("cpu:2")
    images, labels = pictures(options.data, options.rows)
    rows = len(labels)
    dataset = distorted_batches(images, labels, options.batch_size, cifar10.SIDE)
    x, y = (np.concatenate(part) for part in zip(*dataset.as_numpy_iterator(), strict=True))
    model = cifar10.build_model(batch_size=options.batch_size, examples=rows)
    trainer = mt.Trainer(model, devices)
    rounds = []
    for _ in range(options.rounds + 1):
        alone = seconds(lambda: consume(dataset))
        trained = seconds(lambda: trainer.fit(x, y, batch_size=options.batch_size, shuffle=False, verbose=0))
        rounds.append((alone, trained))
    report(options, rows, rounds[1:])


def report(options, rows, rounds):
    alone, trained = (rows / statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(trained / alone for alone, trained in rounds)
    print(f"cifar10 input: {rows} rows, batch {options.batch_size}, {options.rounds} rounds, TF {tf.__version__}")
    print(f"  the pipeline alone            {alone:9.0f} examples/s")
    print(f"  two devices, data in memory   {trained:9.0f} examples/s")
    print(f"  the pipeline gives {ratio:.1f} x what two devices consume (has to be more than 1)")
    if options.json:
        print(json.dumps({"pipeline": alone, "two_devices": trained, "ratio": ratio}))


if __name__ == "__main__":
    main()
