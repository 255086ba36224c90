"""Batch normalisation over two towers against Keras' synchronized layer under MirroredStrategy, in one run.

    python benchmarks/batch_norm.py [--layers 6] [--rounds 30] [--json] [--plot FILE]

Two tables. Cost: forward and backward of a stack of BatchNormalization layers, with the stack and without it; the
difference divided by the number of layers is what one layer costs. The candidates take turns, each is warmed up first;
printed are medians over rounds and the ratio of the first two. Error: the largest relative error of the variance over
16 channels against float64, for growing mean/std.

The two logical CPU devices are the same for both. --plot draws the second table; it needs matplotlib.
"""

import argparse
import functools
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import multitower as mt

DEVICES = ["CPU:0", "CPU:1"]
SHAPES = [(32, 24, 24, 64), (128, 8, 8, 64), (512, 256), (16, 4, 4, 16)]  # of one tower's shard
SPREADS = [(1, 1), (10, 1), (100, 1), (1000, 1), (4096, 1), (1000, 0.1)]  # (mean, std)
OURS, KERAS, ONE = "multitower", "Keras, synchronized", "Keras, one device"


def forward_and_backward(layers):
    """A step that uses every gradient of a stack of layers and returns one number."""

    def step(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for layer in layers:
                y = layer(y, training=True)
            loss = tf.reduce_mean(y * weights)
        gradients = tape.gradient(loss, [x, *(v.value for layer in layers for v in layer.trainable_variables)])
        return tf.add_n([tf.reduce_sum(g) for g in gradients])

    return step


def stack(count, shape, **options):
    layers = [keras.layers.BatchNormalization(**options) for _ in range(count)]
    for layer in layers:
        layer.build((None, *shape[1:]))
    return layers


def on_towers(count, arrays):
    """A function of nothing that runs the step on two towers."""
    step = mt.replicate(forward_and_backward(stack(count, arrays[0].shape)), DEVICES)
    tensors = [tf.constant(a) for a in arrays]
    return lambda: step(*tensors)


@functools.cache
def mirrored():
    """The one strategy of the process: collectives of a second one would take the first one's keys."""
    return tf.distribute.MirroredStrategy(DEVICES)


def per_replica(halves):
    return mirrored().experimental_distribute_values_from_function(lambda c: halves[c.replica_id_in_sync_group])


def on_mirrored(count, arrays):
    """The same under MirroredStrategy, each replica's half of the rows being on its device already."""
    strategy = mirrored()
    with strategy.scope():
        step = forward_and_backward(stack(count, arrays[0].shape, synchronized=True))
    inputs = [per_replica(tf.split(a, 2)) for a in arrays]
    run = tf.function(lambda *args: strategy.run(step, args=args), autograph=False)
    return lambda: strategy.experimental_local_results(run(*inputs))[0]


def on_one_device(count, arrays):
    step = tf.function(forward_and_backward(stack(count, arrays[0].shape)), autograph=False)
    tensors = [tf.constant(a) for a in arrays]
    return lambda: step(*tensors)


CANDIDATES = {OURS: on_towers, KERAS: on_mirrored, ONE: on_one_device}


def seconds(function):
    start = time.perf_counter()
    float(function())
    return time.perf_counter() - start


def layer_costs(shape, layers, rounds):
    """Milliseconds of one layer for each candidate: a list with an entry for each round."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2 * shape[0], *shape[1:]), dtype="float32") for _ in range(2)]
    functions = {name: (make(layers, arrays), make(0, arrays)) for name, make in CANDIDATES.items()}
    for with_layers, without in functions.values():
        for _ in range(3):
            with_layers(), without()
    costs = {name: [] for name in functions}
    for _ in range(rounds):
        for name, (with_layers, without) in functions.items():
            costs[name].append((seconds(with_layers) - seconds(without)) / layers * 1e3)
    return costs


def cost_row(shape, layers, rounds):
    costs = layer_costs(shape, layers, rounds)
    row = {f"{name} ms": statistics.median(times) for name, times in costs.items()}
    return {"shard": shape, **row, "ratio": row[f"{OURS} ms"] / row[f"{KERAS} ms"]}


def variances(x):
    """The variance of each channel of the batch x, by candidate: with momentum 0 it is the moving variance."""
    with mirrored().scope():
        (replicated,) = stack(1, x.shape, momentum=0.0, synchronized=True)
    (tower,), (single,) = stack(1, x.shape, momentum=0.0), stack(1, x.shape, momentum=0.0)
    run = tf.function(lambda x: mirrored().run(lambda x: replicated(x, training=True), args=(x,)), autograph=False)
    run(per_replica(tf.split(x, 2)))
    mt.replicate(lambda x: tower(x, training=True), DEVICES)(x)
    tf.function(lambda x: single(x, training=True), autograph=False)(x)
    layers = {OURS: tower, KERAS: replicated, ONE: single}
    return {name: layer.moving_variance.numpy().astype("float64") for name, layer in layers.items()}


def error_row(mean, std):
    x = np.random.default_rng(1).normal(mean, std, (64, 24, 24, 16)).astype("float32")
    true = np.var(x.astype("float64"), (0, 1, 2))
    errors = {name: float(np.max(np.abs(found / true - 1))) for name, found in variances(x).items()}
    return {"mean": mean, "std": std, **errors}


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    rows = sorted(rows, key=lambda row: row["mean"] / row["std"])
    for name, marker in ((KERAS, "s"), (ONE, "^"), (OURS, "o")):
        label = f"{name}, 2 towers" if name == OURS else f"{name}, 2 replicas" if name == KERAS else name
        axes.loglog([row["mean"] / row["std"] for row in rows], [row[name] for row in rows], marker=marker, label=label)
    axes.axhline(1e-5, color="grey", linestyle=":", label="1e-5")
    axes.set(xlabel="mean / standard deviation", ylabel="relative error of the variance", title="float32")
    axes.legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="layers in the stack")
    parser.add_argument("--rounds", type=int, default=30, help="timed runs of each candidate")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, too")
    parser.add_argument("--plot", metavar="FILE", help="draw the error against mean/std into this file")
    options = parser.parse_args()
    tf.get_logger().setLevel("ERROR")  # every candidate is traced for every shape, which TensorFlow warns of
    mt.devices("cpu:2")  # makes the two logical devices, before anything uses TensorFlow

    print(f"cost of one layer, forward and backward, ms ({options.layers} layers, {options.rounds} rounds)")
    print(f"{'shard of a tower':<20}{OURS:>22}{KERAS:>22}{ONE:>22}{'ratio':>8}")
    costs = []
    for shape in SHAPES:
        row = cost_row(shape, options.layers, options.rounds)
        costs.append(row)
        times = "".join(f"{row[f'{name} ms']:>22.2f}" for name in CANDIDATES)
        print(f"{' × '.join(map(str, shape)):<20}{times}{row['ratio']:>8.2f}")

    print("\nrelative error of the variance, float32, 2 × 18432 elements a channel")
    print(f"{'mean':>8}{'std':>6}{'mean/std':>10}{OURS:>22}{KERAS:>22}{ONE:>22}")
    errors = []
    for mean, std in SPREADS:
        row = error_row(mean, std)
        errors.append(row)
        print(f"{mean:>8}{std:>6}{mean / std:>10.0f}" + "".join(f"{row[name]:>22.1e}" for name in CANDIDATES))

    if options.plot:
        plot(errors, options.plot)
    if options.json:
        print(json.dumps({"cost": costs, "error": errors}))


if __name__ == "__main__":
    main()
