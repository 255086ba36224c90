"""What the commands print: reports as the rows of tables."""

import sys
from collections.abc import Sequence
from typing import Any


def train_rows(report: Any) -> list[tuple[str, str]]:
    train, validation = report.metrics["train"], report.metrics["validation"]
    speed = report.examples_per_second
    return [
        *((name, f"{_short(train[name])} train, {_short(validation[name])} validation") for name in train),
        ("examples/s", "–" if speed is None else f"{speed:,.0f} (first step and validation left out)"),
        ("devices", ", ".join(report.devices)),
        ("towers", f"{report.towers}, variables {report.placement}, reduce by {report.reduce}"),
        ("rows per tower", f"{' + '.join(map(str, report.rows_per_tower))} of a batch of {report.batch_size}"),
        ("learning rate", f"that of the job × {report.lr_factor:.4g} (--scale-lr {report.scale_lr})"),
        ("seconds", f"{report.seconds:.1f} in all; epochs: {report.epochs}"),
        ("model", report.model),
        ("checkpoints", report.checkpoints),
        ("logs", report.logs),
        ("curves", report.curves or "no picture: it needs matplotlib, python -m pip install 'multitower[plot]'"),
    ]


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def env_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in found.items():
        if name == "devices":
            value = "\n".join(_device_line(device) for device in value)
        elif name in ("placement", "reduce"):
            value = f"{value['name']}: {value['reason']}"
        elif name == "memory_growth":
            value = ", ".join(f"{gpu} {'on' if grows else 'off'}" for gpu, grows in value.items()) or "no GPU"
        rows.append((name.replace("_", " "), "none" if value is None else str(value)))
    return rows


def _device_line(device: dict[str, Any]) -> str:
    limit = "" if device["memory_bytes"] is None else f", {device['memory_bytes'] / 2**20:.0f} MiB"
    return f"{device['name']} ({device['physical']}{limit})"


def print_table(title: str, rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*head, title=title or None, title_justify="left", show_header=bool(head))
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 160  # a pipe has no width: do not break paths at 80
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)
