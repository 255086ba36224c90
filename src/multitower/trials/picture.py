"""The picture of a study: the metric against the one parameter searched, or parallel coordinates of several.

Needs matplotlib (`pip install 'multitower[plot]'`); without it there is no picture, and the reason is told.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import store
from .results import Results


def draw(results: Results, path: Path) -> str | None:
    """Draw the trials that have a metric.

    Returns:
        None, or why there is no picture.
    """
    trials = [trial for trial in results.trials if trial["metric"] is not None]
    names = [name for name in (trials[0]["params"] if trials else []) if _differs(trials, name)]
    if not names:
        return "no picture: a metric of different settings is needed"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is missing (pip install 'multitower[plot]')"
    figure = Figure(figsize=(7, 4.5) if len(names) == 1 else (2.2 * len(names) + 3, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if len(names) == 1:
        _against(axes, trials, names[0], results)
    else:
        _parallel(figure, axes, trials, names, results)
    figure.savefig(path, dpi=120)
    return None


def _differs(trials: Sequence[dict[str, Any]], name: str) -> bool:
    return len({repr(trial["params"][name]) for trial in trials}) > 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _spans_decades(values: Sequence[Any]) -> bool:
    return all(_is_number(value) and value > 0 for value in values) and max(values) >= 20 * min(values)


def _against(axes: Any, trials: Sequence[dict[str, Any]], name: str, results: Results) -> None:
    values = [trial["params"][name] for trial in trials]
    numbers = all(map(_is_number, values))
    for status, marker in ((store.DONE, "o"), (store.STOPPED, "x")):
        shown = [trial for trial in trials if trial["status"] == status]
        places = [trial["params"][name] if numbers else repr(trial["params"][name]) for trial in shown]
        if shown:
            axes.plot(places, [trial["metric"] for trial in shown], marker, label=status)
    if numbers and _spans_decades(values):
        axes.set_xscale("log")
    axes.set(xlabel=name, ylabel=results.metric)
    axes.legend()


def _parallel(figure: Any, axes: Any, trials: Sequence[dict[str, Any]], names: list[str], results: Results) -> None:
    """A line for each trial through its place on each parameter's axis; the last axis and the colour are the metric."""
    metrics = [trial["metric"] for trial in trials]
    columns = [[trial["params"][name] for trial in trials] for name in names] + [metrics]
    places = [_places(column) for column in columns]
    low, high = min(metrics), max(metrics)
    colours = axes.scatter([], [], c=[], vmin=low, vmax=high if high > low else low + 1, cmap="viridis")
    for i, trial in enumerate(trials):
        line = [place[i] for place in places]
        style = "-" if trial["status"] == store.DONE else ":"
        axes.plot(range(len(line)), line, style, color=colours.to_rgba(metrics[i]), alpha=0.8)
    for x, (column, place) in enumerate(zip(columns, places, strict=True)):
        axes.axvline(x, color="0.7", linewidth=0.8, zorder=0)
        for value, y in _labels(column, place):
            axes.annotate(value, (x, y), xytext=(4, 2), textcoords="offset points", fontsize=8)
    axes.set_xticks(range(len(columns)), [*names, results.metric])
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(columns) - 0.6)
    figure.colorbar(colours, ax=axes, label=f"{results.metric} (dotted: stopped early)")


def _places(column: Sequence[Any]) -> list[float]:
    """Where values stand on an axis, 0 … 1: numbers by size, on a logarithm over decades; others in their order."""
    if not all(map(_is_number, column)):
        ranks = list(dict.fromkeys(map(repr, column)))
        return [ranks.index(repr(value)) / max(1, len(ranks) - 1) for value in column]
    values = [math.log(value) for value in column] if _spans_decades(column) else list(column)
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.5 for value in values]


def _labels(column: Sequence[Any], places: Sequence[float]) -> list[tuple[str, float]]:
    """Every value where there are few, else the ends of the axis."""
    ticks = {place: value for value, place in zip(column, places, strict=True)}
    shown = ticks if len(ticks) <= 6 else {place: ticks[place] for place in (min(ticks), max(ticks))}
    return [(f"{value:.3g}" if isinstance(value, float) else str(value), place) for place, value in shown.items()]
