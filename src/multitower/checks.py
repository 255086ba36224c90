"""What a Trainer refuses before it trains."""

import keras
import tensorflow as tf

from .errors import ModelError

_MEANS = ("sum_over_batch_size", "mean")


def check_count(name, value, of):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name}={value!r}: expected a whole number of {of}, 1 or more")


def check_option(name, value, known):
    if value not in known:
        raise ModelError(f"{name}={value!r} is unknown; expected {' or '.join(map(repr, known))}")


def check_model(model, loss_over):
    if keras.backend.backend() != "tensorflow":
        raise ModelError(
            f"Keras runs on the backend {keras.backend.backend()!r}; multitower needs 'tensorflow': "
            f"set KERAS_BACKEND=tensorflow before keras is imported"
        )
    if not isinstance(model, keras.Model):
        raise ModelError(f"Trainer got {model!r} of type {type(model).__name__}; expected a compiled keras.Model")
    if not model.compiled:
        raise ModelError(f"model {model.name!r} is not compiled; call model.compile(optimizer, loss) first")
    strategy = type(model.distribute_strategy).__name__
    if not strategy.startswith("_Default"):
        raise ModelError(
            f"model {model.name!r} was made under {strategy}; make it outside any tf.distribute strategy: "
            f"multitower places the variables itself"
        )
    if model.run_eagerly:
        raise ModelError(
            f"model {model.name!r} is compiled with run_eagerly=True, and towers run in a graph; compile it with "
            f"run_eagerly=False (to debug step by step, use model.fit without multitower)"
        )
    not_means = [loss for loss in _losses(model) if getattr(loss, "reduction", "mean") not in _MEANS]
    if loss_over == "shard" and not_means:
        raise ModelError(
            f"loss_over='shard' needs losses that are means over rows; {not_means[0].name!r} has "
            f"reduction={not_means[0].reduction!r}: use 'sum_over_batch_size', or loss_over='batch'"
        )


def check_variables(model, device):
    """Whether the variables that the model has are where "shared:DEVICE" says."""
    elsewhere = [v.path for v in model.variables if device and not v.value.device.endswith(device)]
    if elsewhere:
        raise ModelError(
            f"placement='shared:{device.removeprefix('/device:')}': {len(elsewhere)} variables of model {model.name!r} "
            f"are on another device, {elsewhere[0]} among them; make the model under tf.device({device!r})"
        )


def _losses(model):
    """The loss objects the model was compiled with."""
    return [loss for loss in tf.nest.flatten(model.loss) if isinstance(loss, keras.Loss)]
