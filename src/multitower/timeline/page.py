"""The report as one HTML page: the picture of the lanes and the tables, with nothing fetched from elsewhere."""

from collections import defaultdict
from html import escape
from typing import Any

from .. import __version__
from .categories import NAMES
from .picture import COLOURS, picture

_LONGEST = 15

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1160px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; font-size: 13px } td, th { padding: .25em .8em; text-align: right }
th { border-bottom: 2px solid #ccc } td { border-bottom: 1px solid #eee }
td:first-child, th:first-child { text-align: left }
.advice { background: #fff7e0; border-left: 4px solid #f0a30a; padding: .6em 1em } .scroll { overflow-x: auto }
.key span { display: inline-block; width: .9em; height: .9em; margin: 0 .35em 0 1.2em; vertical-align: -1px }
svg { width: 100%; height: auto }
"""


def page(timeline: Any) -> str:
    """The whole page of a `Timeline`."""
    step = timeline.typical_step
    lanes = picture(timeline.operations, step, timeline.critical_path, _devices_shown(timeline))
    rows = [(name, text) for name, text in timeline.summary() if name != "advice"]
    body = [
        f"<h1>A step on {escape(', '.join(timeline.devices))}</h1>",
        f'<p class="advice">{escape(timeline.advice)}</p>',
        *(f"<p><b>{escape(name)}</b>: {escape(text)}</p>" for name, text in rows),
        f"<h2>What each device did: step {step.number}, {1000 * step.seconds:.1f} ms</h2>",
        f'<p class="key">{_key()}; pale: waiting</p>',
        lanes,
        "<h2>Where the time went</h2>",
        _table(*timeline.time_table()),
        "<h2>Where every operation runs</h2>",
        _table(*timeline.placement_table()),
        f"<h2>The {_LONGEST} operations that take longest</h2>",
        _table(["operation", "type", "category", "device", "ms a step", "runs a step"], _longest(timeline)),
        *_misplaced(timeline),
        f"<p><small>multitower {__version__}</small></p>",
    ]
    head = f'<meta charset="utf-8"><title>multitower: where the time of a step went</title><style>{_STYLE}</style>'
    return "\n".join(['<!DOCTYPE html>\n<html lang="en">', f"<head>{head}</head>", "<body>", *body, "</body></html>\n"])


def _devices_shown(timeline: Any) -> list[str]:
    others = {o.device for o in timeline.operations} - set(timeline.devices)
    return [*timeline.devices, *sorted(others)]


def _key() -> str:
    colours = [(NAMES[name], colour) for name, colour in COLOURS.items() if name in NAMES]
    return " ".join(f'<span style="background:{colour}"></span>{escape(name)}' for name, colour in colours)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return '<div class="scroll"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _longest(timeline: Any) -> list[list[str]]:
    time, runs, one = defaultdict(float), defaultdict(int), {}
    for o in timeline.operations:
        key = (o.name, o.device)
        time[key] += o.end_seconds - (o.start_seconds if o.ready_seconds is None else o.ready_seconds)
        runs[key] += 1
        one[key] = o
    steps = len(timeline.steps)
    work = [key for key in time if one[key].op not in ("_Recv", "_HostRecv")]
    longest = sorted(work, key=lambda key: -time[key])[:_LONGEST]
    return [
        [
            *(one[key].name, one[key].op, NAMES[one[key].category], one[key].device),
            *(f"{1000 * time[key] / steps:.3f}", f"{runs[key] / steps:g}"),
        ]
        for key in longest
    ]


def _misplaced(timeline: Any) -> list[str]:
    if not timeline.misplaced:
        return []
    rows = [[m.name, m.op, m.device, ", ".join(m.forward_devices)] for m in timeline.misplaced]
    head = ["backward operation", "type", "runs on", "forward operation on"]
    return ["<h2>Backward operations that are not where their forward operation is</h2>", _table(head, rows)]
