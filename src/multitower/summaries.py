"""What a training run did, for TensorBoard and as a picture.

    directory/train/          loss and metrics of the training data, learning rate, examples/s, gradients, averages
    directory/validation/     loss and metrics of the validation data, under the same names: one chart shows both

The x of every point is the number of updates. The records are those of TensorFlow's own writer; the package tensorboard
is needed to look at them, not to write them.
"""

import csv
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from . import upstream
from .gradient_norms import GradientNorms

_BINS = 30


class Summaries(keras.callbacks.Callback):
    """Keras callback that writes TensorBoard's event files, and adds to the logs of an epoch what Keras does not log.

    Added are `learning_rate`, with `speed` `examples_per_second`, with `gradients` `gradient_norm` and `noise_scale`;
    give it to `fit` before a `Table` or CSVLogger, which then has these columns too. NaN stands for what is not known.

    Args:
        trainer: the `multitower.Trainer` whose `fit` it is given to.
        directory: where the event files are written.
        every_steps: steps from one point of loss, metrics and learning rate to the next; None for points at the end of
            epochs only.
        gradients: whether the norms of gradients are computed, see `gradient_norms`. The step is traced with it.
        speed: the `Throughput` of the same `fit`, which stands before this in the callbacks.

    Example:
        >>> summaries = Summaries(trainer, "logs", gradients=True)
        >>> trainer.fit(x, y, epochs=5, callbacks=[summaries, Table("logs/history.csv")])
    """

    def __init__(self, trainer, directory, *, every_steps=None, gradients=False, speed=None):
        super().__init__()
        self._trainer, self._directory, self._every_steps, self._speed = trainer, Path(directory), every_steps, speed
        self._norms = GradientNorms(len(trainer.devices)) if gradients else None
        trainer.record_gradients(self._norms)
        self._tower_norms: list[float | None] = []
        self._writers: dict[str, Any] = {}
        self._timed = (0, 0.0)
        self._first = self._since = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._first = self._trainer.first_batch(epoch)
        self._since = self._first

    def on_train_batch_end(self, batch, logs=None):
        if self._every_steps is None or batch + 1 - self._since < self._every_steps:
            return
        self._since = batch + 1
        with self._writing("train") as step:
            for name, value in {**(logs or {}), "learning_rate": self._learning_rate()}.items():
                _scalar(f"step/{name}", value, step)

    def on_epoch_end(self, epoch, logs=None):
        logs = logs if logs is not None else {}
        logs.update(self._added())
        with self._writing("train") as step:
            for name, value in logs.items():
                if not name.startswith("val_"):
                    _scalar(name, value, step)
            for i, norm in enumerate(self._tower_norms):
                _scalar(f"gradient_norm/tower_{i}", _number(norm), step)
            self._write_averages(step)
        with self._writing("validation") as step:
            for name, value in logs.items():
                if name.startswith("val_"):
                    _scalar(name.removeprefix("val_"), value, step)

    def _added(self):
        """What Keras does not log; the same names every epoch, as a table needs."""
        added = {"learning_rate": self._learning_rate()}
        if self._speed is not None:
            rows, seconds = self._speed.rows - self._timed[0], self._speed.seconds - self._timed[1]
            self._timed = self._speed.rows, self._speed.seconds
            added["examples_per_second"] = rows / seconds if seconds else math.nan
        if self._norms is not None:
            seen = self._norms.take()
            added |= {"gradient_norm": _number(seen.norm), "noise_scale": _number(seen.noise_scale)}
            self._tower_norms = seen.tower_norms
        return added

    def _learning_rate(self):
        return float(self._trainer.model.optimizer.learning_rate)

    def _write_averages(self, step):
        """Histograms of the moving averages of weights, and how far the weights are from them, |w − a| / |a|."""
        averages = upstream.weight_averages(self._trainer.model.optimizer)
        for variable, average in zip(self._trainer.model.trainable_variables, averages, strict=False):
            value, mean = np.asarray(variable, np.float64), np.asarray(average, np.float64)
            _histogram(f"average/{variable.path}", mean, step)
            distance, size = np.linalg.norm(value - mean), np.linalg.norm(mean)
            _scalar(f"distance_from_average/{variable.path}", distance / size if size else math.nan, step)

    @contextmanager
    def _writing(self, part: str) -> Iterator[int]:
        if part not in self._writers:
            self._writers[part] = tf.summary.create_file_writer(str(self._directory / part))
        with self._writers[part].as_default():
            yield int(self._trainer.model.optimizer.iterations.numpy())
        self._writers[part].flush()

    def on_train_end(self, logs=None):
        self.close()

    def close(self):
        """Close the event files; `fit` does it, unless it ends with an error."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


def _number(value):
    return math.nan if value is None else value


def _scalar(name, value, step):
    value = float(np.mean(value))
    if math.isfinite(value):
        _write(name, tf.constant(value, tf.float32), step, "scalars", 1)


def _histogram(name, values, step):
    values = values[np.isfinite(values)]
    counts, edges = np.histogram(values, _BINS)
    _write(name, tf.constant(np.stack([edges[:-1], edges[1:], counts], 1)), step, "histograms", 2)


def _write(name, tensor, step, plugin, data_class):
    """tf.summary.scalar and histogram would need the package tensorboard, which TensorFlow 2.21 does not bring."""
    metadata = tf.compat.v1.SummaryMetadata(
        plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name=plugin), data_class=data_class
    )
    tf.summary.write(name, tensor, step, metadata)


class Table(keras.callbacks.Callback):
    """Keras callback that keeps the logs of every epoch in a CSV file, which is whole at every moment.

    Unlike CSVLogger's it can go on where a run does: epochs that are trained again are replaced, and columns may come
    and go.

    Args:
        path: the file.
        first_epoch: number of the epoch that training starts with; the file's rows before it are kept.
    """

    def __init__(self, path, first_epoch=0):
        super().__init__()
        self._path = Path(path)
        self._rows: list[dict[str, Any]] = [row for row in read_table(self._path) if int(row["epoch"]) < first_epoch]

    def on_epoch_end(self, epoch, logs=None):
        self._rows.append({"epoch": epoch, **{name: float(np.mean(value)) for name, value in (logs or {}).items()}})
        columns = ["epoch", *sorted({name for row in self._rows for name in row} - {"epoch"})]
        unfinished = self._path.with_suffix(".tmp")
        with open(unfinished, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(self._rows)
        os.replace(unfinished, self._path)


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by the names of its columns; none where there is no file."""
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw_curves(table: Path, picture: Path) -> str | None:
    """Draw the columns of a `Table` over epochs, a training metric and that of validation in one chart.

    Args:
        table: file of the table.
        picture: file to write, a PNG.

    Returns:
        The path of the picture; None where matplotlib is not installed or the table has no rows.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    columns = _columns(table)
    charts = [name for name in columns if name != "epoch" and not name.startswith("val_")]
    if not charts:
        return None
    rows = math.ceil(len(charts) / 2)
    figure = Figure(figsize=(9, 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for i, name in enumerate(charts):
        axes = figure.add_subplot(rows, min(2, len(charts)), i + 1)
        for label, column in (("training", name), ("validation", f"val_{name}")):
            if column in columns:
                axes.plot(columns["epoch"] + 1, columns[column], marker=".", label=label)
        axes.set(title=name.replace("_", " "), xlabel="epoch")
        if f"val_{name}" in columns:
            axes.legend()
    figure.savefig(picture)
    return str(picture)


def _columns(table: Path) -> dict[str, np.ndarray]:
    rows = read_table(table)
    return {name: np.array([_float(row[name]) for row in rows]) for name in (rows[0] if rows else [])}


def _float(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan
