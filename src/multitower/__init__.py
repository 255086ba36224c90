"""multitower: Keras and TensorFlow code for one device, trained on all devices, with the result of one device."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import checkpoint, schedule, trials
    from .device import devices
    from .exchange import all_gather, all_reduce
    from .norm import BatchNormalization
    from .reduce import average_gradients
    from .scaling import measure
    from .timeline import Timeline, TraceSteps, trace
    from .tower import rows, tower_count, tower_index
    from .towers import replicate
    from .trainer import Trainer
    from .verification import verify, verify_step

__version__ = "0.1.0"

_EXPORTS = {
    "BatchNormalization": "norm",
    "Timeline": "timeline",
    "TraceSteps": "timeline",
    "Trainer": "trainer",
    "all_gather": "exchange",
    "all_reduce": "exchange",
    "average_gradients": "reduce",
    "checkpoint": "",
    "devices": "device",
    "measure": "scaling",
    "replicate": "towers",
    "rows": "tower",
    "schedule": "",
    "tower_count": "tower",
    "tower_index": "tower",
    "trace": "timeline",
    "trials": "",
    "verify": "verification",
    "verify_step": "verification",
}

__all__ = [
    "BatchNormalization",
    "Timeline",
    "TraceSteps",
    "Trainer",
    "all_gather",
    "all_reduce",
    "average_gradients",
    "checkpoint",
    "devices",
    "measure",
    "replicate",
    "rows",
    "schedule",
    "tower_count",
    "tower_index",
    "trace",
    "trials",
    "verify",
    "verify_step",
]


def __getattr__(name):
    """Load a public name when it is first used: `multitower --help` must not wait for TensorFlow."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'multitower' has no attribute {name!r}")
    if not _EXPORTS[name]:  # a module is a public name itself
        return importlib.import_module(f".{name}", __name__)
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
