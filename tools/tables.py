"""Rows of measurements as tables on a terminal or in Markdown, and refusals in a few words."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wafer_emu.quantities import size
from wafer_kernels.errors import CapacityError

__all__ = ["NARROW", "Row", "binds", "heads", "limit", "show", "text"]

Row = dict[str, Any]
WIDTH = 200  # of a table that goes to a file [characters]
NARROW = 80  # of one that fits any terminal [characters]


def text(value: object) -> str:
    """A figure as it stands in a table."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def heads(rows: Iterable[Row]) -> list[str]:
    """Heads of all rows, in the order in which they come up."""
    return list(dict.fromkeys(head for row in rows for head in row))


def show(title: str, rows: Sequence[Row], markdown: bool, narrow: bool = False) -> None:
    """Print rows under a title; ``narrow`` leaves out the lines between columns."""
    columns = heads(rows)
    lines = [[text(row.get(head)) for head in columns] for row in rows]
    if markdown:
        body = [columns, ["---"] * len(columns), *lines]
        print(f"## {title}\n")
        print("\n".join("| " + " | ".join(line) + " |" for line in body) + "\n")
        return
    style: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": 0, "pad_edge": False} if narrow else {}
    table = Table(*map(escape, columns), title=escape(title), **style)
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def binds(error: CapacityError) -> str:
    """Where a plan does not fit, how much it is short, and what takes most of the memory."""
    return limit({**error.details, "message": error.message})


def limit(details: Mapping[str, Any]) -> str:
    """The same of an error's details, with its message."""
    if "short_bytes" not in details:
        return str(details.get("message") or details.get("limit") or "").split(" (")[0]
    places = [f"{name} {details[name]}" for name in ("stage", "slot") if name in details]
    memory = " on a core" if "core" in details else " of room for KV"
    if "tier" in details:
        memory = f" in {details['tier']}"
    said = f"{', '.join(places)}: {size(details['short_bytes'])} short{memory}"
    items: Mapping[str, int] = details.get("items") or {}
    if not items:
        return said
    most = max(items, key=items.__getitem__)
    return f"{said}, where {most} takes {size(items[most])}"
