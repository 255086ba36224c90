"""Copies of the user's model for `multitower.verify`: made from its configuration, or by the user's own function.

A copy differs from the model in three things, none of which changes what towers have to do: random layers of Keras run
as in inference (`silence`), XLA is off, and every execution is one step.
"""

import functools
import inspect
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from ..errors import ModelError
from .inventory import inventory, layers_of, optimizers_of


def builder_of(model: Any, seed: int) -> Callable[[], keras.Model]:
    """A function that makes equal, compiled models: copies of a keras.Model, or what the user's function builds.

    Raises:
        ModelError: neither a compiled keras.Model nor a function; when called, see `copy_of`.
    """
    if isinstance(model, keras.Model):
        if not model.compiled:
            raise ModelError(f"model {model.name!r} is not compiled; call model.compile(optimizer, loss) first")
        return functools.partial(copy_of, model)
    if not callable(model):
        raise ModelError(
            f"verify got {type(model).__name__}; expected a compiled keras.Model or a function that builds one"
        )

    def build() -> keras.Model:
        keras.utils.set_random_seed(seed)
        built = model()
        if not isinstance(built, keras.Model) or not built.compiled:
            raise ModelError(f"the function given to verify returned {built!r}; expected a compiled keras.Model")
        return built

    return build


def copy_of(model: keras.Model) -> keras.Model:
    """A compiled model with the configuration, weights and optimizer state of this one, which is left as it is.

    Raises:
        ModelError: the model cannot be made from its configuration.
    """
    replaced = [name for name in ("call", "train_step", "compute_loss", "compute_metrics") if name in vars(model)]
    if replaced:
        raise _not_copied(model, f"its {', '.join(replaced)} was replaced on the object, which a copy does not have")
    if not model.built and any(layer.built and layer.variables for layer in layers_of(model)):
        raise _not_copied(model, "a layer has variables, but the model is not built: call it on a batch first")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a compile of the user's own: found below
            copy = keras.models.clone_model(model)
            if not copy.compiled:
                copy.compile_from_config(model.get_compile_config())
            if model.built and not copy.built:
                copy.build_from_config(model.get_build_config() or {})
            if model.built:
                _copy_weights(model, copy)
    except Exception as error:
        raise _not_copied(model, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    if not copy.compiled:
        raise _not_copied(model, "its compile() is its own, and a copy cannot call it")
    _copy_state(model, copy)
    return copy


def _not_copied(model: keras.Model, problem: str) -> ModelError:
    return ModelError(
        f"model {model.name!r} cannot be copied ({problem}); give verify a function that builds and compiles it "
        f"instead: verify(build_model, batch, devices)"
    )


def _copy_weights(model: keras.Model, copy: keras.Model) -> None:
    """By way of a file, as layers such as Normalization hold more than variables and restore it when they load."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "copy.weights.h5")
        model.save_weights(path)
        copy.load_weights(path)


def _copy_state(model: keras.Model, copy: keras.Model) -> None:
    """Optimizer slots, random seeds and variables that Keras does not list."""
    for (_, _, own), (_, _, other) in zip(optimizers_of(model), optimizers_of(copy), strict=True):
        if own.built:
            if not other.built:
                other.build(copy.trainable_variables)
            _assign(model, own.variables, other.variables)
    held = [[e.variable for e in inventory(m) if e.kind not in ("optimizer", "metric")] for m in (model, copy)]
    if model.built:
        _assign(model, *held)


def _assign(model: keras.Model, values: Sequence[Any], variables: Sequence[Any]) -> None:
    if [tuple(v.shape) for v in values] != [tuple(v.shape) for v in variables]:
        raise _not_copied(model, f"a copy has {len(variables)} variables for {len(values)}, or others")
    for value, variable in zip(values, variables, strict=True):
        variable.assign(value)


def plain_execution(model: keras.Model) -> None:
    """One step for each execution, without XLA: what is compared is the towers, not the compiler."""
    model.steps_per_execution = 1
    model.jit_compile = False


# Random layers


def silence(root: Any) -> list[str]:
    """Let Keras' own random layers (Dropout, noise, augmentation, recurrent dropout) run as in inference.

    Towers draw other masks than one device by intention, so their results could not be compared. Random layers of the
    user's own are left alone: what they do in inference is not known to be the same without the randomness.

    Returns:
        Names of these layers.
    """
    layers = [layer for layer in layers_of(root) if _is_random(layer)]
    for layer in layers:
        if hasattr(layer, "recurrent_dropout"):  # the cell of a recurrent layer draws its masks before it is called
            layer.dropout = layer.recurrent_dropout = 0.0
        else:
            in_inference(layer)
    return [layer.name for layer in layers]


def _is_random(layer: keras.Layer) -> bool:
    """Whether this is a layer of Keras' own that draws random numbers in training."""
    seeds = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return seeds and type(layer).call.__module__.startswith("keras.") and any(_rates(layer))


def _rates(layer: keras.Layer) -> list[Any]:
    """The layer's rates of randomness, all zero if it is switched off; [True] where it has none by these names."""
    names = ("rate", "stddev", "dropout", "recurrent_dropout")
    rates = [getattr(layer, name) for name in names if isinstance(getattr(layer, name, None), int | float)]
    return rates or [True]


def in_inference(layer: keras.Layer) -> None:
    """Make this layer run with training=False, whatever it is called with."""
    original = layer.call
    signature = inspect.signature(original)
    if "training" not in signature.parameters:
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["training"] = False
        return original(*bound.args, **bound.kwargs)

    layer.call = call
