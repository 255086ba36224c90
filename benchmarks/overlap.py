"""Whether gradients are summed while backward goes on: a timeline of a network whose reduction is worth hiding.

    python benchmarks/overlap.py [--devices 2] [--width 2000] [--layers 4] [--json]

For every way of reducing: milliseconds of a step, of its reduction behind compute ("hidden") and of the reduction that
the devices wait for ("exposed"), and how much of the hidden part lies before the end of the backward pass.
"""

import argparse
import json
import os
import statistics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def overlap(names, reduce, width, count):
    import keras
    import numpy as np

    import multitower as mt

    hidden = [keras.layers.Dense(width, "relu") for _ in range(count)]
    model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((256, width), dtype="float32"), np.zeros((256, 1), "float32")
    trainer = mt.Trainer(model, names, placement="replicated", reduce=reduce)
    timeline = mt.trace(trainer, batch, steps=5)
    runs = [(o, timeline.categories[o.name]) for o in timeline.operations]
    early = 0.0
    for step in timeline.steps:
        backward = [o.end_seconds for o, category in runs if o.step == step.number and category == "backward"]
        early += sum(
            max(0.0, min(o.end_seconds, max(backward)) - o.start_seconds)
            for o, category in runs
            if o.step == step.number and category == "reduce"
        )
    mean = {name: 1e3 * statistics.mean(getattr(s, name) for s in timeline.shares) for name in ("hidden", "exposed")}
    return {
        "reduce": reduce,
        "step_ms": 1e3 * timeline.step_seconds,
        "hidden_ms": mean["hidden"],
        "exposed_ms": mean["exposed"],
        "before_backward_ends_ms": 1e3 * early / len(timeline.steps) / len(names),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import multitower as mt

    names = mt.devices(f"cpu:{options.devices}")
    rows = [overlap(names, reduce, options.width, options.layers) for reduce in ("host", "gather", "ring")]
    print(f"{'reduce':>8} {'step ms':>9} {'hidden':>8} {'exposed':>8} {'before backward ends':>21}")
    for row in rows:
        line = "{reduce:>8} {step_ms:>9.1f} {hidden_ms:>8.1f} {exposed_ms:>8.1f} {before_backward_ends_ms:>21.1f}"
        print(line.format(**row))
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
