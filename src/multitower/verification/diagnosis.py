"""Why N towers do not train as one device does, where it can be told.

Each hypothesis is a function of what was seen, and returns a sentence where it explains it. They are asked in turn, the
clearest first: how the update of the towers relates to that of one device, and to those of one device on the rows of
each tower (`experiment`), tells a missing reduction from a sum, and a sum from a loss that is no mean over rows. Where
that does not, suspects are switched off one by one.
"""

from typing import Any

import keras
import numpy as np

from .experiment import Case, Experiment, plain_gradient, ratio, times, total
from .forward import first_mixing_layer
from .inventory import layers_of
from .model_copy import in_inference
from .twins import ModelTwin


def find_reason(case: Case) -> str | None:
    """The likely reason in a sentence, or None if it cannot be told."""
    seen = Experiment(case, plain_gradient)
    hypotheses = [_not_finite, _not_reduced, _too_large, _one_tower_only, _order, _own_state, _stale_copy]
    if seen.near(seen.towers[0], seen.whole):
        hypotheses += [_after_the_gradient]
    else:
        hypotheses += [_batch_norm, _unweighted, _mixing_layer, _loss, _scaled]
    reasons = (hypothesis(case, seen) for hypothesis in hypotheses)
    return next((reason for reason in reasons if reason is not None), None)


# Hypotheses: each returns a sentence if it explains what was seen, else None


def _not_finite(case: Case, seen: Experiment) -> str | None:
    if not all(np.all(np.isfinite(part)) for part in seen.whole):
        return None
    wrong = [i for i, update in enumerate(seen.towers) if not all(np.all(np.isfinite(part)) for part in update)]
    return f"the gradient is not finite on tower {wrong[0]}, that of one device is" if wrong else None


def _not_reduced(case: Case, seen: Experiment) -> str | None:
    if seen.agree:
        return None
    apart = [
        entry.path
        for k, entry in enumerate(e for e in case.one.entries if e.kind == "weight")
        if not all(seen.near([t[k]], [seen.towers[0][k]]) for t in seen.towers)
    ]
    which = "" if len(apart) == len(seen.whole) else f" of {', '.join(apart[:4])}{' …' if len(apart) > 4 else ''}"
    return (
        f"the gradient{which} is never reduced: after one step each tower has weights of its own, made from its own "
        f'rows; let it go through a Keras optimizer, or combine it with multitower.all_reduce(gradient, "mean")'
    )


def _too_large(case: Case, seen: Experiment) -> str | None:
    count = len(seen.towers)
    if count == 1:
        return None
    if seen.near(seen.towers[0], times(count, seen.whole)) or seen.near(seen.towers[0], total(seen.parts)):
        return (
            f"a sum in place of a mean: the gradient is N = {count} times that of one device; gradients of towers are "
            f'averaged by rows, multitower.all_reduce(gradient, "mean"), or a loss over the rows of all towers was '
            f"divided by the local batch size"
        )
    return None


def _one_tower_only(case: Case, seen: Experiment) -> str | None:
    for i, part in enumerate(seen.parts):
        factor = ratio(seen.towers[0], part)
        alike = len(seen.parts) > 1 and factor > 0 and seen.near(seen.towers[0], times(factor, part))
        if alike and not seen.near(seen.towers[0], times(ratio(seen.towers[0], seen.whole), seen.whole)):
            return f"only the gradient of tower {i} is used: the rows of the other towers do not count"
    return None


def _order(case: Case, seen: Experiment) -> str | None:
    if not case.order_dependent:
        return None
    layer, path = case.order_dependent[0]
    holder = f" of layer {layer!r}" if layer else ""
    return (
        f"order-dependent state: {path}{holder} depends on the order of the rows on one device already, and a tower "
        f"sees its own rows only"
    )


def _own_state(case: Case, seen: Experiment) -> str | None:
    for difference in case.differences:
        if difference.kind == "state" and difference.number in seen.state_apart:
            return (
                f"state of layer {difference.layer!r} is updated from each tower's own rows: {difference.path} has "
                f'different values on the towers; combine what goes into it with multitower.all_reduce(x, "mean")'
            )
    return None


def _stale_copy(case: Case, seen: Experiment) -> str | None:
    first = case.differences[0]
    if first.tower is None:
        return None
    return (
        f"a stale copy: {first.path} has another value on tower {first.tower} than on the others, though all towers "
        f"apply the same update; something wrote to one copy alone, or to the variable from inside a graph"
    )


def _after_the_gradient(case: Case, seen: Experiment) -> str | None:
    first = case.differences[0]
    told = "the gradient of a step is that of one device"
    if first.kind in ("metric", "returned"):
        return (
            f"{told}, but {first.path} is not: what goes into it is neither rows, a mean over rows nor a number of "
            f"rows, which is what can be combined over towers"
        )
    if first.kind == "state":
        return f"{told}, but state of layer {first.layer!r} is not: it is updated from a tower's own rows"
    return f"{told}; what differs comes later: from an optimizer, or from what earlier steps left"


def _batch_norm(case: Case, seen: Experiment) -> str | None:
    names = [layer.name for layer in _batch_norms(*case.one.roots)]
    if not names:
        return None
    off = Experiment(case, _without_batch_norm)
    if not off.near(off.towers[0], off.whole):
        return None
    return (
        f"batch normalisation per tower: with {', '.join(names[:4])} in inference the gradient is that of one device; "
        f'use batch_norm="global", so that statistics are those of the global batch'
    )


def _without_batch_norm(root: Any) -> None:
    plain_gradient(root)
    for layer in _batch_norms(root):
        in_inference(layer)


def _batch_norms(*roots: Any) -> list[keras.Layer]:
    return [layer for layer in layers_of(*roots) if isinstance(layer, keras.layers.BatchNormalization)]


def _unweighted(case: Case, seen: Experiment) -> str | None:
    count = len(seen.parts)
    if count == 1 or not seen.near(seen.towers[0], total(seen.parts, [1 / count] * count)):
        return None
    return (
        "every tower counts the same, whatever its rows: the loss was divided by the local batch size and gradients "
        "averaged without weights; a tower counts by rows[i] / B"
    )


def _mixing_layer(case: Case, seen: Experiment) -> str | None:
    one, _ = case.make(_without_batch_norm)
    if not isinstance(one, ModelTwin):
        return None
    number = first_mixing_layer(one.model, one.batch, seen.shards, case.tolerance)
    if number is None:
        return None
    name = layers_of(*case.one.roots)[number].name
    return (
        f"layer {name!r} mixes rows: what it makes of a row depends on the other rows, and a tower has only its own; "
        f"combine what it takes from the batch with multitower.all_reduce or multitower.all_gather"
    )


def _loss(case: Case, seen: Experiment) -> str | None:
    shares = [len(shard) / len(seen.rows) for shard in seen.shards]
    if len(shares) == 1 or not seen.near(seen.towers[0], total(seen.parts, shares)):
        return None
    rule = "the loss has to be a mean over the rows, or come from model.compute_loss"
    twice, thrice = (seen.on_one_device(np.tile(seen.rows, n)) for n in (2, 3))
    if seen.near(twice, times(2, seen.whole)):
        return f"the loss is a sum over rows, not a mean (divided by a fixed number, or not at all); {rule}"
    if seen.near(twice, seen.whole):
        return (
            f"the loss divides by something of the tower's own rows (a sum of weights or of a mask), or is otherwise "
            f"no mean over rows; {rule}"
        )
    growth = ratio(total([thrice, seen.whole], [1, -1]), total([twice, seen.whole], [1, -1]))
    if growth < 5 / 3:  # 4/3 for 1/rows, 2 for rows
        return (
            f"the loss is divided by the local batch size in a part that is not a sum over the tower's rows; {rule}, "
            f"and what does not depend on rows is not divided by them"
        )
    return f"a part of the loss is a sum over rows, not a mean; {rule}"


def _scaled(case: Case, seen: Experiment) -> str | None:
    factor = ratio(seen.towers[0], seen.whole)
    if not factor or not seen.near(seen.towers[0], times(factor, seen.whole)):
        return None
    return f"the gradient is {factor:.4g} times that of one device (N = {len(seen.towers)})"
