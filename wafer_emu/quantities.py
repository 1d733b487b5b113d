"""Quantities as people read them: thousands separated, units written, a few digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

__all__ = ["count", "joules", "multiple", "percent", "rate", "runs", "seconds", "size"]

ABSENT = "-"
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}


def _digits(value: float) -> str:
    """Four significant digits; larger numbers whole."""
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(0, 4 - whole)}f}"


def _scaled(value: float, unit: str, most: int = 15) -> str:
    if value == 0:
        return f"0 {unit}"
    power = min(max(3 * math.floor(math.log10(abs(value)) / 3), -9), most)
    return f"{_digits(value / 10.0**power)} {DECIMAL[power]}{unit}"


def seconds(value: float | None) -> str:
    """Duration: ``1.234 s``, ``12.34 ms``, ``5.678 µs``."""
    return ABSENT if value is None else _scaled(value, "s", most=0)


def joules(value: float | None) -> str:
    """Energy: ``1.234 kJ``."""
    return ABSENT if value is None else _scaled(value, "J")


def rate(value: float | None, unit: str) -> str:
    """Rate without prefix: ``27,011 tokens/s``."""
    return ABSENT if value is None else f"{_digits(value)} {unit}".rstrip()


def size(value: int | None) -> str:
    """Bytes: exact below 10,000, else in binary units."""
    if value is None or value < 10_000:
        return ABSENT if value is None else f"{value:,} B"
    power = min((value.bit_length() - 1) // 10, len(BINARY) - 1)
    return f"{_digits(value / 1024**power)} {BINARY[power]}"


def count(value: int | None) -> str:
    """Whole number: ``32,768``."""
    return ABSENT if value is None else f"{value:,}"


def percent(value: float | None) -> str:
    """Fraction as ``43.8 %``."""
    return ABSENT if value is None else f"{100 * value:.1f} %"


def multiple(value: float | None) -> str:
    """Ratio: ``0.235x``."""
    return ABSENT if value is None else f"{_digits(value)}x"


def runs(values: Sequence[int]) -> str:
    """List with repetitions counted: ``2 x 4,096, 3,584``."""
    grouped = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(
        f"{times} x {value:,}" if times > 1 else f"{value:,}" for value, times in grouped
    )
