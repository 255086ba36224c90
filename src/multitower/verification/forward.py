"""Which layer looks at other rows: what it makes of a row in its shard is not what it makes of it in the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .inventory import layers_of
from .row_batches import take


def first_mixing_layer(model: keras.Model, batch: Any, shards: Sequence[np.ndarray], tolerance: float) -> int | None:
    """The first layer, in the order of calls, whose output for a row depends on the other rows of the batch.

    The model runs in training mode, eagerly, on all rows and on the rows of each shard.

    Args:
        model: a copy that nobody else needs.
        batch: what a train_step gets; its x goes through the model.
        shards: row numbers of each tower.
        tolerance: relative difference that is no difference.

    Returns:
        Its number in `layers_of(model)`. None where there is none, and where the model has no forward pass of its own
        (a GAN) or fails outside a graph.
    """
    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    try:
        whole, *parts = [_outputs(model, take(x, rows)) for rows in [np.concatenate(shards), *shards]]
    except Exception:
        return None
    for number, output in whole.items():
        pieces = [part[number] for part in parts if number in part]
        if len(pieces) == len(parts) and _differ(output, np.concatenate(pieces), tolerance):
            return number
    return None


def _differ(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype.kind != "f":
        return False
    return bool(np.max(np.abs(a - b), initial=0.0) > tolerance * np.max(np.abs(a), initial=0.0))


def _outputs(model: keras.Model, x: Any) -> dict[int, np.ndarray]:
    """The first output of every layer inside the model, by its number, in the order in which layers finish."""
    outputs: dict[int, np.ndarray] = {}
    layers = layers_of(model)
    calls = [layer.call for layer in layers]
    for number, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        if layer is not model:
            layer.call = _keeping(number, call, outputs)
    try:
        model(x, training=True)
    finally:
        for layer, call in zip(layers, calls, strict=True):
            layer.call = call
    return outputs


def _keeping(number: int, call: Callable[..., Any], outputs: dict[int, np.ndarray]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        first = next((v for v in keras.tree.flatten(result) if isinstance(v, tf.Tensor)), None)
        if first is not None and first.shape.rank:
            outputs.setdefault(number, np.asarray(tf.cast(first, tf.float64) if first.dtype.is_floating else first))
        return result

    return method
