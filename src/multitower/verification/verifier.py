"""verify(): N towers against one device on the user's own model, step by step and variable by variable.

What happens, in order; `_verify` reads like it:

    copies of the model ─┬─ one device   the same start, the same batches: even, uneven, fewer rows than towers
                         └─ N towers     compared after every step: weights, state, slots, metrics, loss; all copies
    one device again, disturbed as rounding would: how large a difference may be (`rounding`)
    single steps of a plain gradient: why it is larger (`diagnosis`)
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ..device import devices as resolve_devices
from ..device import full_precision
from ..errors import ModelError, MultitowerError
from ..towers import replicate
from ..trainer import Trainer
from .comparison import compare, same_start
from .diagnosis import find_reason
from .experiment import Case, Prepare
from .model_copy import builder_of, plain_execution, silence
from .report import Report
from .rounding import measure, record
from .row_batches import as_tensors, choose, count_rows, sizes
from .twins import ModelTwin, StepTwin, Twin

Twins = tuple[Twin, Twin]


_REPLICATED = functools.partial(Trainer, placement="replicated")


def verify(
    model: Any,
    batch: Any,
    devices: Any = None,
    *,
    steps: int = 5,
    seed: int = 0,
    make_trainer: Callable[[keras.Model, list[str]], Any] = _REPLICATED,
) -> Report:
    """Train copies of a model on one device and on N towers, and compare everything a step changes.

        |v_towers − v_one| ≤ bound(v)      for every weight, optimizer slot, metric and returned number v, every step

    and copies of a variable on the towers are equal to the bit. The bound is what rounding does to the same steps on
    one device, see `rounding`. Random layers of Keras run as in inference on both sides; the report names
    them. A random layer of your own cannot be compared, and the report says so.

    Args:
        model: a compiled keras.Model, which is copied and left as it is; or a function without arguments that builds
            and compiles one, for models that cannot be copied (it is called several times, each time after
            `keras.utils.set_random_seed(seed)`).
        batch: what a train_step gets, usually (x, y) or (x, y, sample_weight): arrays or tensors of shape (B, …). The
            batches of all steps are rows of it; twice as many rows as towers and more tell most.
        devices: where the towers run, see `multitower.devices`.
        steps: updates; at least 3, for a batch that is split evenly, one that is not, and one with fewer rows than
            towers.
        seed: for a function that builds the model.
        make_trainer: called with the copy and the device names; to verify other options of Trainer, for instance
            `functools.partial(multitower.Trainer, batch_norm="tower")`. By default a Trainer with
            placement="replicated": what towers write differently then shows in their copies.

    Returns:
        A `Report`: `equal` is True, False, or None where it could not be compared; `print(report)` shows the rest.

    Raises:
        ModelError: the model cannot be copied, or one device cannot train it on batches of different sizes.
        TowerError: one device can train it, towers cannot.
        BatchError: the batch has no rows.
        DeviceError: the devices do not exist.

    Example:
        >>> import keras, numpy as np, multitower as mt
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> mt.verify(model, (np.ones((4, 2)), np.ones((4, 1))), "cpu:1").equal
        True
    """
    names = resolve_devices(devices)
    data = as_tensors(batch)
    build = builder_of(model, seed)
    silenced: list[str] = []

    def copy(prepare: Prepare) -> keras.Model:
        made = build()
        plain_execution(made)
        names_of_silenced = silence(made)
        silenced[:] = silenced or names_of_silenced
        prepare(made)
        return made

    def make(prepare: Prepare = _as_it_is) -> Twins:
        with tf.device(names[0]):
            one, many = copy(prepare), copy(prepare)
        return ModelTwin(one, data, device=names[0]), ModelTwin(many, data, make_trainer(many, names))

    return _verify(make, data, names, steps, silenced)


def verify_step(build_step: Callable[[], Any], batch: Any, devices: Any = None, *, steps: int = 5) -> Report:
    """`verify` for a hand-written step: on one device as a tf.function, on N towers by `multitower.replicate`.

    Args:
        build_step: called without arguments, several times; it makes everything anew, with the same initial values,
            and returns (step, what it uses): the function to be given to `replicate`, and a list of the variables,
            models, layers, optimizers and metrics that it changes or reads.
        batch: tuple of the arguments of the step; everything in it is rows.
        devices: see `verify`.
        steps: see `verify`.

    Returns:
        A `Report`. Of what the step returns, single numbers are compared.

    Example:
        >>> import numpy as np, tensorflow as tf, multitower as mt
        >>> def build_step():
        ...     w = tf.Variable([[1.0], [1.0]])
        ...     def step(x):
        ...         with tf.GradientTape() as tape:
        ...             loss = tf.reduce_mean((x @ w) ** 2)
        ...         w.assign_sub(0.1 * mt.all_reduce(tape.gradient(loss, w), "mean"))
        ...     return step, [w]
        >>> mt.verify_step(build_step, (np.eye(2, dtype="float32"),), "cpu:1").equal
        True
    """
    names = resolve_devices(devices)
    data = as_tensors(batch)
    silenced: list[str] = []

    def copy(prepare: Prepare) -> tuple[Any, Sequence[Any]]:
        step, roots = build_step()
        names_of_silenced = [name for root in roots for name in silence(root)]
        silenced[:] = silenced or names_of_silenced
        for root in roots:
            prepare(root)
        return step, roots

    def make(prepare: Prepare = _as_it_is) -> Twins:
        with tf.device(names[0]):
            (step, roots), (other, other_roots) = copy(prepare), copy(prepare)
        one = StepTwin(tf.function(step, reduce_retracing=True), data, roots, names[0])
        return one, StepTwin(replicate(other, names), data, other_roots)

    return _verify(make, data, names, steps, silenced)


def _reason(case: Case) -> str | None:
    try:
        return find_reason(case)
    except MultitowerError as error:
        return f"not found, as a step that was to tell it failed: {error}"


def _as_it_is(root: Any) -> None:
    pass


def _verify(make: Callable[..., Twins], batch: Any, names: list[str], steps: int, silenced: list[str]) -> Report:
    if steps < 3:
        raise ModelError(f"steps={steps}: expected at least 3, for an even, an uneven and a small batch")
    began_seconds = time.perf_counter()
    total = count_rows(batch)
    rows = choose(total, sizes(total, len(names), steps))
    with full_precision():
        one, many = make()
        start, built_late = same_start(one, many, rows[0])
        reference = record(one, start, rows)
        comparison = compare(one, many, reference, measure(one, reference, rows), rows)
        reason = comparison.not_comparable
        if comparison.equal is False:
            reason = _reason(comparison.case(make, total))
    notes = [f"random layers ran as in inference: {', '.join(silenced)}"] if silenced else []
    notes += ["the start is the state after one step, which made some of the variables"] if built_late else []
    return Report(
        **comparison.as_numbers(),
        reason=reason,
        notes=[*notes, *comparison.notes],
        devices=names,
        steps=steps,
        batches=[len(r) for r in rows],
        seconds=time.perf_counter() - began_seconds,
    )
