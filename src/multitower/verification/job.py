"""What `multitower verify` does: the model and the first batch of a job, given to `verification.verify`."""

import functools
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from ..device import devices as choose_devices
from ..job import check_job_params, load_job, make_model, with_batch_size
from ..train import load_data
from ..trainer import Trainer
from .report import Report
from .verifier import verify


def verify_job(
    job: str,
    devices: Any = None,
    steps: int = 5,
    batch_size: int | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    placement: str = "replicated",
    reduce: str = "auto",
) -> Report:
    """Verify the model of a job on its first training batch; nothing is written.

    Args:
        job: name of a built-in job or path of a Python file.
        devices: as `multitower.devices` takes them.
        steps: updates, at least 3.
        batch_size: rows of the batch; None for the job's own number.
        params: parameters of the job's two functions.
        seed: of Keras' global random state, set before data and model are made.
        placement, reduce: as `multitower.Trainer` takes them.

    Raises:
        MultitowerError: job, parameters, devices or data are unusable, or the training fails.
    """
    names = choose_devices(devices)
    loaded, given = load_job(job), dict(params or {})
    check_job_params(loaded, given)
    keras.utils.set_random_seed(seed)
    used = with_batch_size(loaded, given, len(names), batch_size)
    train, _ = load_data(loaded, used, batch_size)
    batch = _first(train, batch_size or loaded.global_batch(len(names)))
    make_trainer = functools.partial(Trainer, placement=placement, reduce=reduce)
    build = functools.partial(make_model, loaded, used)
    return verify(build, batch, names, steps=steps, seed=seed, make_trainer=make_trainer)


def _first(train: Any, batch_size: int) -> Any:
    """The first batch of a dataset, or the first rows of arrays."""
    if isinstance(train, tf.data.Dataset):
        return next(iter(train))
    return keras.tree.map_structure(lambda a: None if a is None else a[:batch_size], tuple(train))
