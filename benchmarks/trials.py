"""What a parameter search costs: gaps between trials, and 8 trials on 2 devices against one after another.

    python benchmarks/trials.py [--rounds 3] [--epochs 5] [--gap-trials 40] [--json]

Gaps: the seconds a device is idle between the end of one trial and the start of the next one's process, for trials of a
tenth of a second. Wall clock: `multitower trials digits` with 8 settings on cpu:2, which gives each trial half of the
cores, and on cpu:1, where trials run one after another with all cores; the two take turns.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from multitower import trials
from multitower.trials.store import Store


def gaps(count):
    """Seconds between trials on two devices."""
    command = [sys.executable, "-c", "import time; time.sleep(0.1)", "{x}"]
    with tempfile.TemporaryDirectory() as folder:
        trials.run(command, {"x": list(range(count))}, "cpu:2", run_dir=folder)
        with closing(Store(Path(folder) / "study.db")) as store:
            return store.gaps()


def search_seconds(devices, epochs):
    """Wall clock of a search with 8 settings."""
    settings = {"lr": [1e-3, 3e-3], "width": [16, 24], "dropout": [0.2, 0.4]}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        found = trials.run("digits", settings, devices, epochs=epochs, run_dir=folder)
        seconds = time.perf_counter() - began
    if found.exit_code:
        raise SystemExit(f"a trial failed: {found.as_json()}")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--gap-trials", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    idle = gaps(options.gap_trials)
    print(f"gap between two trials on a device: median {statistics.median(idle):.3f} s, largest {max(idle):.3f} s")
    rounds = [
        {devices: search_seconds(devices, options.epochs) for devices in ("cpu:2", "cpu:1")}
        for _ in range(options.rounds)
    ]
    medians = {devices: statistics.median(times[devices] for times in rounds) for devices in ("cpu:2", "cpu:1")}
    ratio = statistics.median(times["cpu:1"] / times["cpu:2"] for times in rounds)
    print(f"8 trials of {options.epochs} epochs: {medians['cpu:2']:.1f} s on two devices, {medians['cpu:1']:.1f} s one")
    print(f"after another: {ratio:.2f} x as fast (median over {options.rounds} rounds)")
    if options.json:
        gap = {"median": statistics.median(idle), "largest": max(idle)}
        print(json.dumps({"gap_seconds": gap, "seconds": medians, "ratio": ratio, "rounds": options.rounds}))


if __name__ == "__main__":
    main()
