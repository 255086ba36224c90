"""multitower: Keras and TensorFlow code for one device, trained on all devices, with the result of one device."""

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "BatchNormalization": "norm",
    "Trainer": "trainer",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "devices": "device",
    "replicate": "towers",
    "rows": "collectives",
    "tower_count": "collectives",
    "tower_index": "collectives",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name):
    """Load a public name when it is first used: `multitower --help` must not wait for TensorFlow."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'multitower' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
