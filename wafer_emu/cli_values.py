"""Values of options: how they are written, and what they must be."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token

from wafer_kernels.errors import FileError

__all__ = [
    "Bytes",
    "Count",
    "CountOrAuto",
    "Dtype",
    "File",
    "Grid",
    "Name",
    "Natural",
    "Policies",
    "Positive",
    "Requests",
    "Sizes",
    "Switch",
    "Tier",
    "require_writable",
]

MOST = 16_777_216
Dtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
Tier = Literal["auto", "sram", "dram"]


def _whole(least: int, most: int) -> Callable[[Any, Sequence[Token]], int]:
    """Converter of whole numbers; cyclopts itself would round 1.5 to 2."""

    def convert(_: Any, tokens: Sequence[Token]) -> int:
        written = tokens[0].value
        if re.fullmatch(r"[0-9]+(_[0-9]+)*", written) and len(written) <= 30:
            value = int(written)
            if least <= value <= most:
                return value
        raise ValueError(f"{written!r} is not a whole number from {least:,} to {most:,}")

    return convert


def _whole_or_auto(_: Any, tokens: Sequence[Token]) -> int | str:
    """A whole number, or ``auto``."""
    written = tokens[0].value
    return written if written == "auto" else _whole(1, MOST)(_, tokens)


def _above_zero(_: Any, tokens: Sequence[Token]) -> float:
    """A finite number above zero."""
    written = tokens[0].value
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{written!r} is not a number above 0")
    return value


def _grid(_: Any, tokens: Sequence[Token]) -> tuple[int, int]:
    """Rows and columns of ``RxC``."""
    written = tokens[0].value
    found = re.fullmatch(r"([0-9]{1,7})x([0-9]{1,7})", written)
    if found is None or min(int(found[1]), int(found[2])) < 1:
        raise ValueError(f"{written!r} is not ROWSxCOLUMNS, such as 4x8")
    return int(found[1]), int(found[2])


def _words(_: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Words separated by commas, each once."""
    words = [word.strip() for token in tokens for word in token.value.split(",")]
    if "" in words or len(set(words)) != len(words):
        raise ValueError(f"{tokens[0].value!r} is not a list of different names, such as a,b,c")
    return tuple(words)


def _sizes(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    one = _whole(1, MOST)
    return tuple(
        one(_, [Token(value=word.strip())]) for token in tokens for word in token.value.split(",")
    )


Count = Annotated[int, Parameter(converter=_whole(1, MOST), metavar="N")]
CountOrAuto = Annotated[
    int | Literal["auto"], Parameter(converter=_whole_or_auto, metavar="N|auto")
]
Positive = Annotated[float, Parameter(converter=_above_zero, metavar="X")]
Natural = Annotated[int, Parameter(converter=_whole(0, MOST), metavar="N")]
Requests = Annotated[int, Parameter(converter=_whole(1, 1_000_000), metavar="N")]
Bytes = Annotated[int, Parameter(converter=_whole(1, 2**53), metavar="BYTES")]
Grid = Annotated[
    tuple[int, int], Parameter(converter=_grid, n_tokens=1, negative=(), metavar="RxC")
]
Policies = Annotated[
    tuple[str, ...], Parameter(converter=_words, n_tokens=1, negative=(), metavar="A,B,C")
]
Sizes = Annotated[
    tuple[int, ...], Parameter(converter=_sizes, n_tokens=1, negative=(), metavar="A,B,C")
]
Name = Annotated[str, Parameter(metavar="NAME")]
File = Annotated[Path, Parameter(metavar="FILE")]
Switch = Annotated[bool, Parameter(negative=(), show_default=False)]


def require_writable(path: Path) -> None:
    """FileError, before any work, if a file of this name could not be written."""
    if path.is_dir():
        raise FileError(f"{path} is a folder: name a file in it", file=str(path))
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise FileError(
            f"{path} cannot be written: {error.strerror or error}; name a file in an existing "
            "folder that you may write to",
            file=str(path),
        ) from error
