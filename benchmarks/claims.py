"""What multitower claims of its speed, measured in one run: a table of claim, figure and whether it is reached.

    python benchmarks/claims.py [--networks digits,cifar10,resnet50,lstm,embedding] [--devices 2] [--rounds 5]
                                [--seconds-per-round 1] [--json]

Every figure is a ratio of medians over the same rounds, see steps.py; more than 1 means that multitower is faster. The
tables behind it are printed first. About 16 minutes on 2 idle cores.
"""

import json
from dataclasses import asdict, dataclass

from entrants import parse
from race import race
from steps import NAMES, arguments, as_dict, networks_of, show

COMPETITORS = [
    "plain",
    "replicate@1",
    "replicate",
    "trainer",
    "trainer:placement=independent",
    "mirrored",
    "classic",
    "fit-mirrored",
    "fit-mirrored-one",
]
MORE = {"cifar10": ["replicate@8"], "deep": ["replicate@8", "mirrored@8"]}


@dataclass
class Claim:
    """A ratio that has to be at least `goal`, or at most where `at_most` says so; figure is None if it failed."""

    text: str
    network: str
    goal: float
    figure: float | None
    at_most: bool = False

    @property
    def reached(self):
        """Whether the figure is what was claimed."""
        if self.figure is None:
            return False
        return self.figure <= self.goal if self.at_most else self.figure >= self.goal


class Table:
    """The results of one network, found by the text of a competitor."""

    def __init__(self, network, results, devices):
        self.network, self._devices = network, devices
        self._results = {str(r.competitor): r for r in results}

    def seconds(self, text):
        """Median seconds of a step; None where it failed."""
        found = self._find(text)
        return found and found.median

    def first_step(self, text):
        """Seconds of the first step; None where it failed."""
        found = self._find(text)
        return found and found.first_step_seconds

    def fastest(self, *texts):
        """The least median of several; None where all failed."""
        return min(filter(None, map(self.seconds, texts)), default=None)

    def _find(self, text):
        return self._results.get(str(parse(text, self._devices).like_the_others(self.network)))


def claims(table):
    """The claims that the results of a network speak of."""
    name, at, fastest = table.network, table.seconds, table.fastest

    def claim(text, goal, above, below, at_most=False):
        return Claim(text, name, goal, above / below if above and below else None, at_most)

    if name == "deep":
        first, others = table.first_step("replicate@8"), table.first_step("mirrored@8")
        return [claim("first step at N=8 / MirroredStrategy's", 0.6, first, others, at_most=True)]
    found = [
        claim("time of N=1 / plain tf.function loop", 1.02, at("replicate@1"), at("plain"), at_most=True),
        claim(
            "speed / better of Mirrored loop and classic graph", 1.0, fastest("mirrored", "classic"), at("replicate")
        ),
        claim("speed / Keras fit under Mirrored", 1.15, fastest("fit-mirrored", "fit-mirrored-one"), at("trainer")),
        claim("speed / towers without reduction", 0.95, at("trainer:placement=independent"), at("trainer")),
    ]
    if name == "embedding":
        found.append(claim("speed / MirroredStrategy loop, sparse", 2.0, at("mirrored"), at("replicate")))
    if name == "cifar10":
        found.append(claim("time at N=8 / N=1", 1.3, at("replicate@8"), at("replicate@1"), at_most=True))
    return found


def show_claims(found):
    """Print the final table."""
    width = max(len(c.text) for c in found)
    print(f"\n{'claim':{width}}  {'network':10} {'goal':>7} {'figure':>7}  reached")
    for c in found:
        goal = f"{'≤' if c.at_most else '≥'} {c.goal:.2f}"
        figure = "–" if c.figure is None else f"{c.figure:.2f}"
        print(f"{c.text:{width}}  {c.network:10} {goal:>7} {figure:>7}  {'yes' if c.reached else 'NO'}")
    print(f"{sum(c.reached for c in found)} of {len(found)} reached")


def main():
    parser = arguments(__doc__.splitlines()[0], rounds=5)
    options = parser.parse_args()
    results, found = [], []
    for network in networks_of(parser, options.networks or [*NAMES, "deep"]):
        texts = ([] if network == "deep" else COMPETITORS) + MORE.get(network, [])
        competitors = [parse(text, options.devices).like_the_others(network) for text in texts]
        measured = race(network, competitors, 0 if network == "deep" else options.rounds, options.seconds_per_round)
        show(network, measured)
        results += measured
        found += claims(Table(network, measured, options.devices))
    show_claims(found)
    if options.json:
        lines = [asdict(c) | {"reached": c.reached} for c in found]
        print(json.dumps({"claims": lines, "results": [as_dict(r) for r in results]}))


if __name__ == "__main__":
    main()
