"""Trainer: keras.Model's fit, evaluate and predict on towers, the model unchanged.

Keras' own loop drives the towers: `keras.Model.fit` calls `model.train_function(iterator)` and makes that function only
where it is None. For the time of a call the Trainer puts its own functions there, so every argument, callback, History
and progress bar is Keras', and callbacks see the plain model. One batch goes this way:

    keras.Model.fit → train_function → TowerStep.emit → on every device: model.train_step on the tower's rows

What the model is compiled with holds for towers: `steps_per_execution`, and `jit_compile`, XLA inside each tower.
"""

import functools
import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from . import upstream
from .checks import check_count, check_model, check_option, check_variables
from .collectives import choose_reduce
from .device import devices as resolve_devices
from .errors import BatchError
from .gradient_norms import recording
from .loops import Loop, Predict
from .parts import model_in_parts
from .placement import choose_placement, variables_device
from .step import TowerStep
from .tower import Weighting


def _as_in_keras(method):
    """Give a method of Trainer the signature and documentation of keras.Model's method of that name."""

    def decorate(function):
        original = getattr(keras.Model, function.__name__)
        functools.update_wrapper(function, original, assigned=("__doc__",))
        function.__signature__ = inspect.signature(original)
        del function.__wrapped__
        return function

    return decorate(method)


class Trainer:
    """Trains a compiled keras.Model on N devices; the result is that of one device for the same global batch.

    Args:
        model: a compiled keras.Model, built or not, made outside any tf.distribute strategy. It is used as it is:
            `trainer.model` is this object, its variables are those of tower 0 and always up to date.
        devices: where the towers run, see `multitower.devices`; None: all GPUs, else one CPU device.
        placement: where variables live.
            "replicated": a copy per device; every tower applies the same update. "shared": one copy, where the model
            made it; gradients are averaged there and applied once ("shared:cpu:0" demands the host: make the model
            under tf.device("CPU:0")). "independent": no tower knows of another; for measuring what meeting costs, as
            the result is that of no batch at all. "auto": shared on CPU devices, replicated on GPUs.
        reduce: how towers meet.
            "host": sums are computed once, on the host. "gather": every tower gets the terms of all and adds them in
            the same order. "ring", "nccl": collectives of TensorFlow. "auto": NCCL where every tower has a GPU of its
            own, the host for CPU devices, else gather.
        batch_norm: "global": BatchNormalization layers use the statistics of the global batch, as one device would;
            "tower": those of each tower's shard.
        micro_batches: parts in which a tower runs the model on its rows in training: one update, equal to that of one
            pass, with the activities of one part in memory at a time, for one more forward pass (see `parts`).
        loss_over: "batch": the loss and the metrics are those of the outputs of all towers, whatever they compute;
            "shard": those of the tower's own rows, weighted by rows, for outputs too large to gather (segmentation).
            Then exact only where the loss is a mean over rows of equal size and the states of metrics are sums.
        bucket_bytes: bytes of gradients that travel together, 25 MiB by default, at most 1 MiB in the first bucket:
            smaller ones leave sooner, larger ones need fewer meetings. On CPU devices with reduce "host" or "gather"
            nothing travels, and every gradient is summed by itself.
        evaluate_on: "all": evaluate, predict and validation run on all towers; "one": they are the plain model's.
        seed: of Keras' global random state, set now; None: left as it is.

    Raises:
        DeviceError: the devices do not exist, or do not allow the placement or reduce asked for.
        ModelError: not a keras.Model, not compiled, made under a tf.distribute strategy, compiled with
            run_eagerly=True; with loss_over="shard" a loss that is not a mean; an unknown option.

    Example:
        >>> import keras, numpy as np, multitower as mt
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> trainer = mt.Trainer(model, devices="cpu:1")
        >>> trainer.fit(np.eye(2), np.ones([2, 1]), verbose=0).history.keys()
        dict_keys(['loss'])
    """

    def __init__(
        self,
        model,
        devices=None,
        *,
        placement="auto",
        reduce="auto",
        batch_norm="global",
        micro_batches=1,
        loss_over="batch",
        evaluate_on="all",
        bucket_bytes=None,
        seed=None,
    ):
        if bucket_bytes is not None:
            check_count("bucket_bytes", bucket_bytes, "bytes")
        check_option("evaluate_on", evaluate_on, ("all", "one"))
        check_option("batch_norm", batch_norm, ("global", "tower"))
        check_option("loss_over", loss_over, ("batch", "shard"))
        check_count("micro_batches", micro_batches, "parts")
        check_model(model, loss_over)
        self.model = model
        self._devices = tuple(resolve_devices(devices))
        choose_placement(self._devices, placement)
        choose_reduce(self._devices, reduce)
        self._wanted = {"placement": placement, "reduce": reduce}
        self._variables_device = variables_device(placement)
        check_variables(model, self._variables_device)
        if seed is not None:
            keras.utils.set_random_seed(seed)
        self._batch_norm = batch_norm
        self._micro_batches = micro_batches
        self._loss_over = loss_over
        self._evaluate_on = evaluate_on
        self._bucket_bytes = bucket_bytes
        self._functions: dict[str, Loop | Predict] = {}
        self._compiled = None
        self._start: _Start | None = None
        self._norms = None

    @property
    def devices(self):
        """Device names in tower order."""
        return list(self._devices)

    @property
    def placement(self):
        """Where variables live: "replicated", "shared" or "independent"."""
        return self._trained.placement[0]

    @property
    def reduce(self):
        """How towers meet: "host", "gather", "ring" or "nccl"; "none" where there is one."""
        return self._trained.reduce[0]

    @property
    def reasons(self):
        """Why placement and reduce are what they are, a dict of two strings."""
        return {"placement": self._trained.placement[1], "reduce": self._trained.reduce[1]}

    @property
    def _trained(self):
        """The towers of train_step."""
        self._follow_compile()
        return self._train_function.towers

    @property
    def traces(self):
        """How often train_step, test_step and predict_step have been traced, a dict of ints."""
        functions = self._functions or {}
        return {name.replace("function", "step"): f.towers.traces for name, f in functions.items()}

    @property
    def graphs(self):
        """The graphs of train_step as it was traced for one tower, a list of tf.Graphs."""
        return self._trained.graphs

    @_as_in_keras
    def fit(self, *args, **kwargs):
        arguments = _prefetched(_arguments(self.model.fit, args, kwargs), ("x", "validation_data"))
        arguments["callbacks"] = _with_refresh(arguments.get("callbacks"), self)
        try:
            with self._on_towers():
                return self.model.fit(**arguments)
        finally:
            self._start = None

    @_as_in_keras
    def evaluate(self, *args, **kwargs):
        arguments = _prefetched(_arguments(self.model.evaluate, args, kwargs), ("x",))
        with self._on_towers():
            return self.model.evaluate(**arguments)

    @_as_in_keras
    def predict(self, *args, **kwargs):
        arguments = _prefetched(_arguments(self.model.predict, args, kwargs), ("x",))
        with self._on_towers():
            return self.model.predict(**arguments)

    @_as_in_keras
    def train_on_batch(self, *args, **kwargs):
        with self._on_towers():
            return self.model.train_on_batch(*args, **kwargs)

    @_as_in_keras
    def test_on_batch(self, *args, **kwargs):
        with self._on_towers():
            return self.model.test_on_batch(*args, **kwargs)

    @_as_in_keras
    def predict_on_batch(self, *args, **kwargs):
        with self._on_towers():
            return self.model.predict_on_batch(*args, **kwargs)

    def copies(self, variable):
        """The copies of a variable of the model, a tf.Variable for each tower, the first being the model's own.

        They have the values the next step starts from: what was assigned since the last one has been copied.
        """
        return self._trained.store.fresh(variable)

    def refresh(self):
        """Bring all towers' copies to the model's values, whatever changed these.

        Done at the start of every call and epoch; in between, assignments made in Python are noticed without it.
        """
        used = {}
        for function in self._functions.values():
            used.setdefault(function.towers.store, {}).update((id(v), v) for v in function.towers.variables)
        for store, variables in used.items():
            store.refresh_all(variables.values())

    def start_at(self, epoch, batch):
        """Have the next `fit` pass over the first `batch` batches of epoch number `epoch`, if it trains that epoch.

        They are taken from the data and not trained, and the metrics of the epoch go on from what they are now: see
        `multitower.checkpoint`.
        """
        self._start = _Start(epoch, batch, [(v, v.numpy()) for v in self.model.metrics_variables])

    def first_batch(self, epoch):
        """Number of the first batch of epoch number `epoch` that the running `fit` trains, 0 but after `start_at`."""
        return self._start.batch if self._start is not None and self._start.epoch == epoch else 0

    def _begin_epoch(self, epoch):
        """Keras has set the metrics back: bring those of an epoch that goes on, and all copies, up to date."""
        batch = self.first_batch(epoch)
        if self._start is not None and batch:
            if batch % self.model.steps_per_execution:
                raise BatchError(
                    f"training goes on behind batch {batch} of an epoch, which is not a multiple of "
                    f"steps_per_execution={self.model.steps_per_execution}; compile with a divisor of {batch}"
                )
            for variable, value in self._start.metrics:
                variable.assign(value)
            self._train_function.pass_over(batch, self.model.get_metrics_result())
        self.refresh()

    @contextmanager
    def _on_towers(self):
        """The model's functions are ours while this is open; afterwards the model is a plain one again."""
        check_model(self.model, self._loss_over)
        self._follow_compile()
        self.refresh()
        before = {name: getattr(self.model, name) for name in self._functions}
        for name, function in self._functions.items():
            setattr(self.model, name, function)
        try:
            yield
        finally:
            for name, function in self._functions.items():
                if getattr(self.model, name) is function:  # not where a callback has compiled the model anew
                    setattr(self.model, name, before[name])

    def _follow_compile(self):
        """Make the functions anew when the model has been compiled since."""
        compiled = upstream.made_by_compile(self.model)
        if self._compiled is compiled:
            return
        self._compiled = compiled
        self._train_function = Loop(self._steps("train_step"), self.model.steps_per_execution)
        self._functions = {"train_function": self._train_function}
        if self._evaluate_on == "one":
            return
        self._functions |= {
            "test_function": Loop(self._steps("test_step"), self.model.steps_per_execution),
            "predict_function": Predict(self._steps("predict_step")),
        }

    def record_gradients(self, norms):
        """Have steps note the norms of their gradients in a `GradientNorms`, None for none; they are traced anew."""
        if norms is not self._norms:
            self._norms = norms
            self._compiled = None

    @contextmanager
    def _tracing(self):
        with model_in_parts(self.model, self._micro_batches), recording(self._norms, self.model.optimizer):
            yield

    def _steps(self, name):
        own = _is_own(self.model, name)
        return TowerStep(
            getattr(self.model, name),
            self._devices,
            **self._wanted,
            agree=own and name != "predict_step",
            batch_norm=self._batch_norm,
            weighting=Weighting.LOSS if own else Weighting.GRADIENT,
            loss_over_shard=self._loss_over == "shard",
            bucket_bytes=self._bucket_bytes,
            jit=bool(self.model.jit_compile),
            inside=self._tracing,
            autograph=False,
        )


@dataclass(frozen=True)
class _Start:
    """Where a `fit` begins inside an epoch, and what the metrics of that epoch are there."""

    epoch: int
    batch: int
    metrics: list[tuple[Any, Any]]


class _Refresh(keras.callbacks.Callback):
    """Before an epoch, what callbacks changed on the model reaches every tower, even if a graph of theirs did it."""

    def __init__(self, trainer):
        super().__init__()
        self._trainer = trainer

    def on_epoch_begin(self, epoch, logs=None):
        self._trainer._begin_epoch(epoch)


def _arguments(method, args, kwargs):
    """The arguments of a call of Keras, by name.

    Raises:
        BatchError: arrays without rows, which Keras takes for data of unknown length and passes over.
    """
    try:
        arguments = inspect.signature(method).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"Trainer.{method.__name__}() {error}") from None
    for name in ("x", "validation_data"):
        for array in tf.nest.flatten(arguments.get(name)):
            shape = getattr(array, "shape", ())
            if len(shape) > 0 and shape[0] == 0:
                raise BatchError(
                    f"{name} has no rows: received an array of shape {tuple(shape)}; expected at least one row"
                )
    return arguments


def _prefetched(arguments, names):
    """The arguments with datasets that prepare batches while steps run."""
    for name in names:
        if isinstance(arguments.get(name), tf.data.Dataset):
            arguments[name] = arguments[name].prefetch(tf.data.AUTOTUNE)
    return arguments


def _with_refresh(callbacks, trainer):
    refresh = _Refresh(trainer)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks[:] = [c for c in callbacks.callbacks if not isinstance(c, _Refresh)]  # of an earlier fit
        callbacks.callbacks.append(refresh)
        refresh.set_model(trainer.model)
        return callbacks
    return [*tf.nest.flatten(callbacks if callbacks is not None else []), refresh]


def _is_own(model, name):
    """Whether `model` runs Keras' own method of that name, not one its class or the user has put in its place."""
    return getattr(type(model), name) is getattr(keras.Model, name) and name not in vars(model)
