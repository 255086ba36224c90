"""Where the time of a first step goes: the trace, graph optimisation, and what TensorFlow does besides.

    python benchmarks/first_step.py [--network deep] [--devices 1,2,8] [--rounds 3] [--json]

Every figure is from a process of its own, with graph optimisation (Grappler) and without, in turns; medians in seconds:

    trace       the step traced once, bound to the towers and wired together
    optimised   what Grappler adds: the whole first step less that of a process without it
    rest        placing and partitioning the graph, making kernels, the step itself
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def first_step(network, count, grappler):
    """Seconds of the trace and of the whole first step, in this process."""
    import tensorflow as tf
    from networks import NETWORKS

    import multitower as mt
    from multitower.step import TowerStep

    names = mt.devices(f"cpu:{count}")
    if not grappler:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    traced, original = [], TowerStep.program

    def program(*args, **kwargs):
        start = time.perf_counter()
        result = original(*args, **kwargs)
        traced.append(time.perf_counter() - start)
        return result

    TowerStep.program = program
    network = NETWORKS[network]
    model, batch = network.model(), next(iter(network.dataset()))
    trainer = mt.Trainer(model, names)
    start = time.perf_counter()
    trainer.train_on_batch(*batch)
    return {"trace": max(traced), "whole": time.perf_counter() - start}


def in_a_process(network, count, grappler):
    arguments = [sys.executable, __file__, "--network", network, "--devices", str(count), "--here"]
    arguments += ["--without-grappler"] if not grappler else []
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(network, count, rounds):
    """Medians for N towers."""
    pairs = [(in_a_process(network, count, True), in_a_process(network, count, False)) for _ in range(rounds)]
    trace = statistics.median(one["trace"] for pair in pairs for one in pair)
    whole, without = (statistics.median(pair[k]["whole"] for pair in pairs) for k in (0, 1))
    optimised = max(0.0, whole - without)
    return {"devices": count, "trace": trace, "optimised": optimised, "rest": whole - trace - optimised, "whole": whole}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="deep")
    parser.add_argument("--devices", default="1,2,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without-grappler", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(first_step(options.network, int(options.devices), not options.without_grappler)))
        return
    rows = [measured(options.network, int(count), options.rounds) for count in options.devices.split(",")]
    print(f"{options.network}, seconds\n{'N':>3} {'trace':>7} {'optimised':>10} {'rest':>7} {'first step':>11}")
    for row in rows:
        print("{devices:>3} {trace:>7.2f} {optimised:>10.2f} {rest:>7.2f} {whole:>11.2f}".format(**row))
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
