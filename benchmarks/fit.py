"""Trainer against Keras' own fit, in one run: what towers cost on one device and what they gain on two.

    python benchmarks/fit.py [--network digits|cifar10] [--rounds 7] [--batch-size 128] [--json]

Four ways to train the same network on the same arrays take turns: plain `fit` on one device, Trainer on one device,
Trainer on two logical CPU devices, and Keras' `fit` under MirroredStrategy on the same two. Each is warmed up first;
a round times one call of `fit` for each. Printed are the median seconds of a round and the medians over rounds of the
ratios within a round.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import multitower as mt
from multitower.jobs import digits


def digits_network():
    (x, y), _ = digits.load_data()
    return digits.build_model, np.tile(x, (4, 1, 1, 1)), np.tile(y, 4)


def cifar10_network():
    """The layers of the CIFAR-10 tutorial on random 24 × 24 × 3 pictures."""

    def build():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((24, 24, 3)),
                layers.Conv2D(64, 5, padding="same", activation="relu"),
                layers.MaxPooling2D(3, 2, padding="same"),
                layers.Conv2D(64, 5, padding="same", activation="relu"),
                layers.MaxPooling2D(3, 2, padding="same"),
                layers.Flatten(),
                layers.Dense(384, activation="relu"),
                layers.Dense(192, activation="relu"),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
        return model

    rng = np.random.default_rng(0)
    return build, rng.standard_normal((2048, 24, 24, 3), dtype="float32"), rng.integers(0, 10, 2048)


NETWORKS = {"digits": digits_network, "cifar10": cifar10_network}


def contenders(build):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        mirrored = build()
    return {
        "fit, 1 device": build().fit,
        "Trainer, 1 device": mt.Trainer(build(), ["CPU:0"]).fit,
        "Trainer, 2 devices": mt.Trainer(build(), ["CPU:0", "CPU:1"]).fit,
        "fit, MirroredStrategy, 2 devices": mirrored.fit,
    }


def time_all(fits, x, y, batch_size):
    """Seconds of one epoch for each contender, one after another."""
    seconds = {}
    for name, fit in fits.items():
        began = time.perf_counter()
        fit(x, y, batch_size=batch_size, epochs=1, verbose=0)
        seconds[name] = time.perf_counter() - began
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, default="digits")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    mt.devices("cpu:2")
    build, x, y = NETWORKS[options.network]()
    fits = contenders(build)
    first = time_all(fits, x, y, options.batch_size)
    rounds = [time_all(fits, x, y, options.batch_size) for _ in range(options.rounds)]
    report(options, len(x), first, rounds)


def report(options, rows, first, rounds):
    names = list(first)
    plain, one, two, mirrored = names
    steps = -(-rows // options.batch_size)
    medians = {name: statistics.median(r[name] for r in rounds) for name in names}
    print(f"{options.network}: {rows} rows, batch {options.batch_size}, {options.rounds} rounds, TF {tf.__version__}")
    for name in names:
        print(
            f"  {name:<34} {1e3 * medians[name] / steps:8.2f} ms/step {rows / medians[name]:9.0f} examples/s"
            f"   first epoch {first[name]:6.2f} s"
        )
    cost = statistics.median(r[one] / r[plain] for r in rounds)
    gain = statistics.median(r[mirrored] / r[two] for r in rounds)
    print(f"  cost of Trainer on one device: {cost:.3f} x the time of fit (goal: at most 1.05)")
    print(f"  gain on two devices: {gain:.2f} x the examples/s of MirroredStrategy (goal: at least 1.1)")
    if options.json:
        result = {"network": options.network, "cost_1": cost, "gain_2": gain, "seconds": medians, "first": first}
        print(json.dumps(result))


if __name__ == "__main__":
    main()
