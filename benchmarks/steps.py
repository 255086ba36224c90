"""Ways to train the same networks on the same devices, in one run: step time, first step, peak memory.

    python benchmarks/steps.py [--networks cifar10,lstm] [--competitors plain,replicate,trainer@1] [--devices 2]
                               [--rounds 9] [--seconds-per-round 1] [--json]

entrants.py and competitors.py say what the names mean, networks.py what the networks are, race.py how they take turns.
Weights and batches are the same for all: the losses of the first three steps are compared (roughly, where dropout draws
random numbers; not for placement=independent, which trains N models).
"""

import argparse
import json
import sys
from dataclasses import asdict

from entrants import NETWORKS, parse
from race import race

NAMES = ["digits", "cifar10", "resnet50", "lstm", "embedding"]
COMPETITORS = [
    "plain",
    "replicate@1",
    "replicate",
    "trainer@1",
    "trainer",
    "trainer:placement=independent",
    "mirrored",
    "classic",
    "fit-mirrored",
    "fit-mirrored-one",
]


def different_losses(results):
    """Competitors whose first losses are not those of the others that compute the same."""
    groups, different = {}, []
    for r in results:
        if r.losses and r.competitor.comparable:
            groups.setdefault(r.competitor.statistics_over(r.network), []).append(r)
    for first, *others in groups.values():
        bound = 0.5 if first.network == "digits" else 1e-3
        for r in others:
            if any(abs(a - b) > bound * abs(b) for a, b in zip(r.losses, first.losses, strict=True)):
                different.append(r.competitor)
    return different


def show(network, results):
    """Print a table and what went wrong."""
    plain = next((r.median for r in results if r.competitor.way == "plain"), None)
    width = max(len(str(r.competitor)) for r in results)
    print(f"\n{network}")
    print(f"  {'':{width}}  ms/step (quartiles)        × plain   first step s   peak MiB")
    for r in results:
        print(
            f"  {r.competitor!s:{width}}  {_times(r):25}{_ratio(r.median, plain)}{_start(r)}   {r.error or ''}".rstrip()
        )
    different = different_losses(results)
    print(
        "  losses: "
        + (f"NOT THOSE OF THE OTHERS: {', '.join(map(str, different))}" if different else "the same for all")
    )
    sys.stdout.flush()


def _times(r):
    if r.median is None:
        return "–"
    first, third = r.quartiles
    return f"{1e3 * r.median:9.2f} ({1e3 * first:.2f}–{1e3 * third:.2f})"


def _ratio(seconds, plain):
    return f"{seconds / plain:9.2f}" if seconds and plain else f"{'–':>9}"


def _start(r):
    first = f"{r.first_step_seconds:15.2f}" if r.first_step_seconds else f"{'–':>15}"
    return first + (f"{r.peak_bytes / 2**20:11.0f}" if r.peak_bytes else f"{'–':>11}")


def as_dict(result):
    """For JSON."""
    first, third = result.quartiles
    return asdict(result) | {
        "competitor": str(result.competitor),
        "median_seconds": result.median,
        "quartile_seconds": [first, third],
    }


def arguments(description, rounds=9, seconds=1.0):
    """The options that this program and claims.py have in common."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--networks", metavar="NAME,…", type=lambda s: s.split(","), help="of networks.py")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="logical CPU devices (default 2)")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each competitor (default {rounds})")
    parser.add_argument("--seconds-per-round", type=float, default=seconds, help=f"of each turn (default {seconds})")
    parser.add_argument("--json", action="store_true", help="print a line of JSON at the end")
    return parser


def competitors_of(parser, texts, devices):
    """The competitors of a list of texts; a mistake ends the program."""
    try:
        return [parse(text, devices) for text in texts]
    except ValueError as error:
        parser.error(str(error))


def networks_of(parser, names):
    """The names, all of them known; a mistake ends the program."""
    for name in names:
        if name not in NETWORKS:
            parser.error(f"no network {name!r}; expected {', '.join(NETWORKS)}")
    return names


def main():
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--competitors", metavar="TEXT,…", type=lambda s: s.split(","), default=COMPETITORS)
    options = parser.parse_args()
    networks = networks_of(parser, options.networks or NAMES)
    competitors = competitors_of(parser, options.competitors, options.devices)
    everything = []
    for network in networks:
        results = race(
            network, [c.like_the_others(network) for c in competitors], options.rounds, options.seconds_per_round
        )
        show(network, results)
        everything += results
    if options.json:
        print(json.dumps([as_dict(r) for r in everything]))


if __name__ == "__main__":
    main()
