"""The lanes of a step as SVG: a row for each category of each device, and the critical path below."""

from collections.abc import Iterable
from html import escape

from .breakdown import is_compute
from .categories import CATEGORIES, NAMES
from .critical import Stretch
from .profile import HOST, Operation, Step

COLOURS = {
    "input": "#8c6bb1",
    "copy": "#f0a30a",
    "forward": "#3b7dd8",
    "backward": "#2a9d5c",
    "reduce": "#d1495b",
    "batch_norm": "#00a3a3",
    "update": "#6b6b6b",
    HOST: "#dddddd",
}
_WIDTH, _LEFT, _ROW, _GAP = 1120, 190, 15, 10


def picture(operations: list[Operation], step: Step, path: list[Stretch], devices: list[str]) -> str:
    """One step as an `<svg>` element.

    Args:
        operations: what ran; those of other steps are left out.
        step: the step.
        path: its critical path.
        devices: in the order to be shown.
    """
    scale = (_WIDTH - _LEFT - 10) / step.seconds
    own = [o for o in operations if o.step == step.number]
    shapes, y = [], 22.0
    for device in devices:
        on_device = [o for o in own if o.device == device]
        shapes.append(_text(0, y + 11, device, "device"))
        for category in CATEGORIES:
            rows = [o for o in on_device if o.category == category]
            if rows:
                shapes += [_text(_LEFT - 8, y + 11, NAMES[category], "label"), *_bars(rows, step, scale, y)]
                y += _ROW
        y += _GAP
    shapes += [_text(0, y + 11, "critical path", "device"), *_path(path, scale, y)]
    height = y + _ROW + 8
    return "\n".join([_head(height), _grid(step, scale, height), *shapes, "</svg>"])


def _head(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        'aria-label="What each device did during one step, by category">'
        "<style>text{font:11px sans-serif;fill:#333}.device{font-weight:bold}.label{text-anchor:end}"
        ".tick{text-anchor:middle;fill:#777}</style>"
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>'
    )


def _grid(step: Step, scale: float, height: float) -> str:
    """Ten lines with the milliseconds since the step began."""
    lines = []
    for part in range(11):
        x = _LEFT + scale * step.seconds * part / 10
        lines.append(f'<line x1="{x:.1f}" y1="18" x2="{x:.1f}" y2="{height - 4:.0f}" stroke="#eee"/>')
        told = f"{100 * step.seconds * part:.3g}" + (" ms" if part == 0 else "")
        lines.append(_text(x, 12, told, "tick"))
    return "".join(lines)


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _bars(operations: list[Operation], step: Step, scale: float, y: float) -> Iterable[str]:
    """Operations as bars, pale where they wait; those closer than the eye can tell as one."""
    waiting = [(o.start_seconds, o.ready_seconds, o.name) for o in operations if o.ready_seconds is not None]
    working = [(_begin(o), o.end_seconds, o.name) for o in operations if _shown_working(o)]
    awaited = [(o.start_seconds, o.end_seconds, o.name) for o in operations if o.op in ("_Recv", "_HostRecv")]
    colour = COLOURS[operations[0].category]
    for spans, opacity in ((_joined([*waiting, *awaited], scale), 0.3), (_joined(working, scale), 1.0)):
        for start, end, name, count in spans:
            more = f" and {count - 1} more" if count > 1 else ""
            title = f"{name}{more}: {1000 * (end - start):.3f} ms" + (" waiting" if opacity < 1 else "")
            yield _bar(_LEFT + scale * (start - step.start_seconds), y, scale * (end - start), colour, opacity, title)


def _begin(operation: Operation) -> float:
    return operation.start_seconds if operation.ready_seconds is None else operation.ready_seconds


def _shown_working(operation: Operation) -> bool:
    return is_compute(operation) or operation.op not in ("_Recv", "_HostRecv")


def _joined(spans: list[tuple], scale: float) -> list[tuple[float, float, str, int]]:
    """(start, end, name of the longest, how many), neighbours less than half a pixel apart joined."""
    joined: list[list] = []
    for start, end, name in sorted(spans):
        if joined and (start - joined[-1][1]) * scale < 0.5:
            last = joined[-1]
            if end - start > last[4]:
                last[2], last[4] = name, end - start
            last[1], last[3] = max(last[1], end), last[3] + 1
        else:
            joined.append([start, end, name, 1, end - start])
    return [tuple(j[:4]) for j in joined]


def _bar(x: float, y: float, width: float, colour: str, opacity: float, title: str) -> str:
    pale = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.4):.2f}" height="{_ROW - 3}" fill="{colour}"{pale}>'
        f"<title>{escape(title)}</title></rect>"
    )


def _path(path: list[Stretch], scale: float, y: float) -> Iterable[str]:
    moment = 0.0
    for stretch in path:
        where = stretch.device if stretch.category == HOST else f"{NAMES[stretch.category]} on {stretch.device}"
        title = f"{where} {stretch.name}: {1000 * stretch.seconds:.3f} ms"
        yield _bar(_LEFT + scale * moment, y, scale * stretch.seconds, COLOURS[stretch.category], 1.0, title)
        moment += stretch.seconds
