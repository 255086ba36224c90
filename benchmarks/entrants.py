"""The texts that name competitors and networks. Imports no TensorFlow: the process that measures must not wait for it.

NAME[:OPTION=VALUE …][@N]      replicate      trainer:placement=shared:reduce=host@2      mirrored@8
"""

import re
from dataclasses import dataclass, field

NETWORKS = ("digits", "cifar10", "resnet50", "lstm", "embedding", "deep")
WITH_BATCH_NORM = ("digits", "resnet50", "deep")
OURS = ("replicate", "trainer")
ON_ONE_DEVICE = ("plain", "fit")
WAYS = (*OURS, *ON_ONE_DEVICE, "mirrored", "fit-mirrored", "fit-mirrored-one", "classic")


@dataclass(frozen=True)
class Competitor:
    """A way to train, its options, and N; `str` gives the text."""

    way: str
    devices: int
    options: dict = field(default_factory=dict)

    def __str__(self):
        return f"{self.way}{''.join(f':{k}={v}' for k, v in self.options.items())}@{self.devices}"

    def like_the_others(self, network):
        """multitower too takes the batch statistics of each tower's rows, as the others do, where nothing is said."""
        if self.way not in OURS or network not in WITH_BATCH_NORM or "batch_norm" in self.options:
            return self
        return Competitor(self.way, self.devices, self.options | {"batch_norm": "tower"})

    def statistics_over(self, network):
        """Over how many parts of the batch batch normalisation takes its statistics: losses differ with that."""
        if network not in WITH_BATCH_NORM or (self.way in OURS and self.options.get("batch_norm") != "tower"):
            return 1
        return self.devices

    @property
    def comparable(self):
        """Whether it trains the one model that the others train, and tells the loss of every step."""
        return self.options.get("placement") != "independent" and "steps_per_execution" not in self.options


def parse(text, devices=1):
    """A `Competitor` from its text.

    Args:
        text: as above.
        devices: N where the text names none and the way is not one for one device.

    Raises:
        ValueError: no such way, or not of this form.
    """
    match = re.fullmatch(r"([\w-]+)((?::\w+=\w+)*)(?:@([1-9]\d*))?", text)
    if not match or match[1] not in WAYS:
        raise ValueError(f"competitor {text!r}; expected NAME[:OPTION=VALUE …][@N] with NAME one of {', '.join(WAYS)}")
    options = dict(option.split("=") for option in match[2].split(":")[1:])
    options = {k: int(v) if v.isdigit() else v for k, v in options.items()}
    return Competitor(match[1], int(match[3] or (1 if match[1] in ON_ONE_DEVICE else devices)), options)
