"""Forms of request traces: Mooncake JSON lines, Azure CSV, plain CSV."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from wafer_emu.strict import read_text
from wafer_kernels.errors import ConfigError

__all__ = ["Row", "rows_of_file"]


class Row(NamedTuple):
    """What a line says of one request; arrival in seconds."""

    tokens: int
    prefix_tokens: int = 0
    arrival_seconds: float = 0.0
    prefix_blocks: tuple[int, ...] = ()


def rows_of_file(path: Path) -> Iterator[tuple[int, Row]]:
    """Line numbers and rows of a trace; the content tells the form.

    Raises
    ------
    FileError
        If the file cannot be read.
    ConfigError
        Names file and line of what is wrong.
    """
    text = read_text(path)
    if text.lstrip().startswith("{"):
        return _mooncake_rows(text, path)
    table = csv.DictReader(text.splitlines(), restval="")
    names = [name.strip() for name in table.fieldnames or []]
    table.fieldnames = names
    if {"TIMESTAMP", "ContextTokens"} <= set(names):
        return _azure_rows(table, path)
    return _plain_rows(table, names, path)


def _mooncake_rows(text: str, path: Path) -> Iterator[tuple[int, Row]]:
    for line, entry in enumerate(text.splitlines(), start=1):
        if not entry.strip():
            continue
        where = f"{path}:{line}"
        try:
            raw = json.loads(entry)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not valid JSON: {error.msg}") from error
        if not isinstance(raw, dict) or "input_length" not in raw:
            raise ConfigError(f"{where}: expected an object with input_length")
        tokens, milliseconds = raw["input_length"], raw.get("timestamp", 0)
        blocks = raw.get("hash_ids", [])
        if not _is_whole(tokens):
            raise ConfigError(f"{where}: input_length = {tokens!r}: expected a whole number")
        if not isinstance(milliseconds, int | float) or isinstance(milliseconds, bool):
            raise ConfigError(f"{where}: timestamp = {milliseconds!r}: expected milliseconds")
        if not (isinstance(blocks, list) and all(map(_is_whole, blocks))):
            raise ConfigError(f"{where}: hash_ids: expected a list of whole numbers")
        yield line, Row(tokens, 0, milliseconds / 1000, tuple(blocks))


def _azure_rows(table: csv.DictReader[str], path: Path) -> Iterator[tuple[int, Row]]:
    rows = [
        (
            line,
            _value(entry, "ContextTokens", _count, where),
            _value(entry, "TIMESTAMP", _moment, where),
        )
        for line, where, entry in _entries(table, path)
    ]
    start = min((moment for _, _, moment in rows), default=None)
    for line, tokens, moment in rows:
        yield line, Row(tokens, arrival_seconds=(moment - start).total_seconds())


def _plain_rows(
    table: csv.DictReader[str], names: list[str], path: Path
) -> Iterator[tuple[int, Row]]:
    readers: dict[str, Callable[[str], Any]] = {
        "tokens": _count,
        "prefix_tokens": _count,
        "arrival_seconds": float,
    }
    unknown = [name for name in names if name not in readers]
    if "tokens" not in names or unknown:
        guesses = {
            match for name in unknown for match in difflib.get_close_matches(name, readers, n=1)
        }
        guess = f" (did you mean {', '.join(sorted(guesses))}?)" if guesses else ""
        raise ConfigError(
            f"{path}:1: columns {', '.join(names) or 'none'}{guess}: expected "
            "tokens[,prefix_tokens][,arrival_seconds], or TIMESTAMP and ContextTokens"
        )
    for line, where, entry in _entries(table, path):
        yield line, Row(**{name: _value(entry, name, readers[name], where) for name in names})


def _entries(
    table: csv.DictReader[str], path: Path
) -> Iterator[tuple[int, str, dict[str | Any, str | Any]]]:
    for entry in table:
        where = f"{path}:{table.line_num}"
        if None in entry:
            raise ConfigError(f"{where}: more fields than columns: {entry[None]}")
        yield table.line_num, where, entry


def _value(entry: dict[str, str], name: str, read: Callable[[str], Any], where: str) -> Any:
    text = entry[name].strip()
    try:
        return read(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {name} = {text!r}: expected {_EXPECTED[read]}") from error


def _count(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise ValueError(text)
    return int(text)


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_EXPECTED: dict[Callable[[str], Any], str] = {
    _count: "a whole number",
    _moment: "a date and time",
    float: "a number",
}
