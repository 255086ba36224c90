"""The result of `multitower.measure` as a picture: examples per second over devices."""

import importlib.util
from pathlib import Path

from ..errors import MultitowerError
from .report import Point, Scaling


def check_plot(file: str) -> None:
    """Refuse, before anything is measured, what `plot` could not write.

    Raises:
        MultitowerError: matplotlib is not installed, the file exists or has another ending, there is no such folder.
    """
    path = Path(file)
    if importlib.util.find_spec("matplotlib") is None:
        raise MultitowerError("--plot needs matplotlib, which is not installed: pip install 'multitower[plot]'")
    if path.suffix.lower() != ".png":
        raise MultitowerError(f"--plot {file}: expected a file name that ends in .png")
    if path.exists():
        raise MultitowerError(f"--plot {file} exists and is not overwritten; give another name")
    if not path.parent.is_dir():
        raise MultitowerError(f"--plot {file}: there is no folder {path.parent}; make it first")


def plot(scaling: Scaling, file: str) -> None:
    """Draw median and quartiles of every configuration, and trials side by side, as a PNG.

    Args:
        scaling: of `multitower.measure`.
        file: name of the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points in curves(scaling).items():
        rates = [p.examples_per_second for p in points if p.examples_per_second]
        errors = [[r.median - r.low for r in rates], [r.high - r.median for r in rates]]
        style = ":" if "independent" in label else "-"
        axes.errorbar([p.devices for p in points], [r.median for r in rates], errors, label=label, fmt=f"o{style}")
    together = [(t.count, t.examples_per_second) for t in scaling.trials if t.examples_per_second]
    if together:
        axes.plot(*zip(*together, strict=True), "s--", color="grey", label="trials side by side")
    axes.set(xlabel=f"{scaling.kind} devices", ylabel="examples/s", title=f"multitower measure {scaling.job}")
    axes.set_xticks(sorted({p.devices for p in scaling.points}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def curves(scaling: Scaling) -> dict[str, list[Point]]:
    """The measured points of each curve, by its label; one device is the start of all."""
    measured = [p for p in scaling.points if p.rate]
    alone = [p for p in measured if p.devices == 1]
    found: dict[str, list[Point]] = {}
    for p in measured:
        if p.devices > 1:
            found.setdefault(f"{p.scaling}, {p.placement}, {p.reduce}", list(alone)).append(p)
    return found or {"one device": alone}
