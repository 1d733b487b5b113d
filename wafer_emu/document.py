"""The JSON document that ``--json`` prints: one result or one error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from typing import Any

from wafer_kernels.errors import WaferError

__all__ = ["SCHEMA_VERSION", "document", "plain", "text"]

SCHEMA_VERSION = 1


def plain(value: object) -> Any:
    """Value made of what JSON knows.

    Integers stay integers, floats that are no number become null, NumPy scalars and arrays become
    numbers and lists, keys become text.

    Raises
    ------
    TypeError
        If JSON has no form for it.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): plain(inner) for key, inner in value.items()}
        case PathLike():
            return fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Iterable):
        return [plain(inner) for inner in value]
    raise TypeError(f"no JSON for {type(value).__name__}")


def document(
    command: str | None,
    result: Mapping[str, Any] | None = None,
    error: WaferError | None = None,
    kind: str | None = None,
) -> dict[str, Any]:
    """Document of a command.

    Parameters
    ----------
    command
        The command's name, None if there was none.
    result
        What was found, None if nothing was.
    error
        Why the command failed; its details stand beside kind and message.
    kind
        Name of the error where it is none of the family, e.g. an interrupt.
    """
    made: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "command": command}
    if result is not None:
        made["result"] = plain(result)
    if error is not None:
        named = {"kind": kind or error.kind, "message": error.message}
        made["error"] = {**plain(error.details), **named}
    return made


def text(made: Mapping[str, Any]) -> str:
    """Text of a document: keys sorted, ASCII only, so that any terminal and pipe takes it."""
    return json.dumps(made, sort_keys=True, allow_nan=False, indent=2)
