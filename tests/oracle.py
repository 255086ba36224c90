"""Plain Keras on one device as the oracle for Trainer: the same model from the same seed, trained both ways, compared.

    check(build, train, count)    build two equal models, train both, compare everything there is to compare

`train` is written once and called twice: with the plain model and with the Trainer of its twin.
"""

import functools

import keras
import numpy as np

import multitower

# Towers add up the same float32 numbers in another order. With n addends the result moves by at most n·2⁻²⁴ of the sum
# of their sizes; for the few dozen rows and few steps of these tests that stays below 1e-6 of the largest element of a
# variable. What a wrong reduction does (a tower left out, a mean in place of a sum) is far more: see the controls.
BOUND = 1e-6


# Keyword arguments of every Trainer of the oracle: see conftest.py.
OPTIONS = {"placement": "auto", "reduce": "auto"}


def devices(count):
    """The first `count` of the logical CPU devices made in conftest.py."""
    return [f"CPU:{i}" for i in range(count)]


def twins(build, seed=1):
    """Two models built from the same seed."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(seed)
        models.append(build())
    return models


def check(build, train, count, bound=BOUND, **options):
    """Train twins, one plain and one on `count` towers, and demand equal results, states and copies.

    Args:
        build: function that returns a compiled model.
        train: function of a model or Trainer; it returns what is to be compared: logs, History, arrays, None.
        count: N, the number of towers.
        bound: largest difference allowed, see `assert_close`.
        options: keyword arguments of Trainer.

    Returns:
        The pair (plain model, Trainer).
    """
    plain, model = twins(build)
    return compare(plain, multitower.Trainer(model, devices(count), **{**OPTIONS, **options}), train, bound)


def compare(plain, trainer, train, bound=BOUND):
    """`check` for a plain model and a Trainer that there are already."""
    assert_close(train(trainer), train(plain), bound)
    assert_same_state(trainer, plain, bound)
    return plain, trainer


def check_again(build, train, count, bound=BOUND):
    """`check` with the twins of an earlier call, set back to their first weights: `build` returns built models.

    Tests that differ in their data only are fast that way, and one trace has to serve them all.
    """
    plain, trainer, start = _kept(build, count)
    for model in (plain, trainer.model):
        for variable, value in zip(_learned(model), start, strict=True):
            variable.assign(value)
        model.reset_metrics()
    return compare(plain, trainer, train, bound)


@functools.lru_cache(maxsize=2)
def _kept(build, count):
    plain, model = twins(build)
    return (
        plain,
        multitower.Trainer(model, devices(count), **OPTIONS),
        [variable.numpy() for variable in _learned(plain)],
    )


def _learned(model):
    """What a step changes, metrics apart."""
    return [*model.variables, *model.optimizer.variables]


def model_of(either):
    """The plain model in what `train` was given."""
    return either.model if isinstance(either, multitower.Trainer) else either


def state(model):
    """All variables of a model, its optimizer and its metrics, by a name that tells them apart."""
    optimizer = [] if model.optimizer is None else model.optimizer.variables
    groups = {"model": model.variables, "optimizer": optimizer, "metric": model.metrics_variables}
    return {f"{group} {i} {v.path}": v for group, variables in groups.items() for i, v in enumerate(variables)}


def assert_same_state(trainer, plain, bound=BOUND):
    """Weights, optimizer slots and metric state are those of the plain model, and alike on all towers."""
    got, expected = list(state(trainer.model).values()), state(plain)
    assert len(got) == len(expected), f"{len(got)} variables instead of {len(expected)}"
    for (name, variable), own in zip(expected.items(), got, strict=True):
        if "seed_generator" not in name:  # towers draw other random numbers than one device
            assert_close(own.numpy(), variable.numpy(), bound, name)
    assert_copies_equal(trainer)


def assert_copies_equal(trainer):
    """Every tower has the same bits in every variable."""
    for name, variable in state(trainer.model).items():
        first, *others = [copy.numpy() for copy in trainer.copies(variable)]
        for i, other in enumerate(others, start=1):
            assert first.tobytes() == other.tobytes(), f"{name} differs between towers 0 and {i}: {first} {other}"


def assert_close(got, expected, bound=BOUND, name="result"):
    """Numbers, arrays, dicts, lists and History are equal: at most `bound` · max(1, largest element) apart."""
    if isinstance(expected, keras.callbacks.History):
        assert got.epoch == expected.epoch
        got, expected = got.history, expected.history
    assert type(got) is type(expected), f"{name}: {type(got)} instead of {type(expected)}"
    if isinstance(expected, dict):
        assert list(got) == list(expected), f"{name}: {list(got)} instead of {list(expected)}"
        for key in expected:
            assert_close(got[key], expected[key], bound, f"{name} {key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), f"{name}: {got} instead of {expected}"
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_close(a, b, bound, f"{name} {i}")
    elif expected is None or isinstance(expected, str):
        assert got == expected
    else:
        _assert_close_numbers(np.asarray(got), np.asarray(expected), bound, name)


def _assert_close_numbers(got, expected, bound, name):
    assert got.shape == expected.shape, f"{name}: shape {got.shape} instead of {expected.shape}"
    assert got.dtype == expected.dtype, f"{name}: dtype {got.dtype} instead of {expected.dtype}"
    if expected.dtype.kind not in "fc":
        np.testing.assert_array_equal(got, expected, name)
        return
    largest = np.max(np.abs(expected), initial=1.0)
    difference = np.max(np.abs(got - expected), initial=0.0)
    assert difference <= bound * largest, (
        f"{name}: {difference} apart, allowed are {bound * largest}\n{got}\n{expected}"
    )
