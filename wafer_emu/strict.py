"""Strict reading of TOML and JSON into structs: every fault named, with its path, at once."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from wafer_kernels.errors import ConfigError, FileError

__all__ = [
    "Amount",
    "Count",
    "Natural",
    "Rate",
    "apply_changes",
    "apply_overrides",
    "convert",
    "load_json",
    "load_toml",
    "read_json",
    "read_text",
    "toml_values",
]

Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Amount = Annotated[float, msgspec.Meta(ge=0.0)]
Rate = Annotated[float, msgspec.Meta(gt=0.0)]

S = TypeVar("S", bound=msgspec.Struct)


def load_toml(source: str | Path, kind: type[S]) -> S:
    """Read a TOML text, or the file at a Path, into a struct.

    Raises
    ------
    FileError
        If the file cannot be read.
    ConfigError
        If the syntax or any value is wrong; all faults are in the message.
    """
    text, origin = _source(source, "TOML text")
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: not valid TOML: {error}", origin=origin) from error
    return convert(raw, kind, origin)


def load_json(source: str | Path, kind: type[S]) -> S:
    """Read a JSON text, or the file at a Path, into a struct (errors as :func:`load_toml`)."""
    raw, origin = read_json(source)
    return convert(raw, kind, origin)


def read_json(source: str | Path) -> tuple[Any, str]:
    """Plain value of a JSON text or file, and the name of where it came from."""
    text, origin = _source(source, "JSON text")
    try:
        return json.loads(text, object_pairs_hook=_unique), origin
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(
            f"{origin}: not valid JSON: {error.msg} (at {where})", origin=origin
        ) from error
    except KeyError as error:
        raise ConfigError(f"{origin}: key {error} stands twice in one object") from error
    except RecursionError as error:
        raise ConfigError(f"{origin}: not valid JSON: nested too deeply", origin=origin) from error


def read_text(path: Path) -> str:
    """Text of a file in UTF-8; FileError says why it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error


def convert(raw: object, kind: type[S], origin: str) -> S:
    """Struct of a plain mapping.

    Raises
    ------
    ConfigError
        Names every unknown, missing and wrong value with its path and what it could have been.
    """
    problems = list(_problems(raw, kind, "$"))
    if not problems:
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            problems = [str(error)]
    raise ConfigError(f"{origin}: {'; '.join(problems)}", origin=origin, problems=problems)


def toml_values(overrides: Mapping[str, str], origin: str = "--set") -> dict[str, object]:
    """Values of TOML texts by dotted path.

    A bare word stands for the string of the same letters, since shells take quotes away.

    Raises
    ------
    ConfigError
        If a text is no single TOML value.
    """
    return {path: _toml_value(path, text, origin) for path, text in overrides.items()}


def apply_overrides(struct: S, overrides: Mapping[str, str], origin: str = "--set") -> S:
    """Copy of a struct with ``{dotted path: TOML text}`` applied (errors as below)."""
    return apply_changes(struct, toml_values(overrides, origin), origin)


def apply_changes(struct: S, changes: Mapping[str, object], origin: str) -> S:
    """Copy of a struct with the values at dotted paths replaced, checked as if read anew.

    Raises
    ------
    ConfigError
        If a path leads nowhere or a value does not fit there.
    """
    raw: dict[str, Any] = msgspec.to_builtins(struct)
    for path, value in changes.items():
        *tables, leaf = path.split(".")
        table = raw
        for name in tables:
            if table.get(name) is None:
                table[name] = {}
            table = table[name]
            if not isinstance(table, dict):
                raise ConfigError(f"{origin}: $.{path}: {name!r} is a value, not a table")
        table[leaf] = msgspec.to_builtins(value)
    return convert(raw, type(struct), origin)


def _source(source: str | Path, unnamed: str) -> tuple[str, str]:
    if isinstance(source, Path):
        return read_text(source), str(source)
    return source, unnamed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:  # the standard parser would keep the last one silently
            raise KeyError(key)
        table[key] = value
    return table


def _toml_value(path: str, text: str, origin: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if re.fullmatch(r"[A-Za-z][\w.-]*", text):
            return text
        raise ConfigError(f"{origin}: {path}: {text!r} is not a TOML value: {error}") from error
    if list(parsed) != ["value"]:
        raise ConfigError(f"{origin}: {path}: {text!r} is more than one TOML value")
    return parsed["value"]


def _problems(raw: object, kind: Any, path: str) -> Iterator[str]:
    """Walk a plain value along the struct's fields and name all that does not fit."""
    structs = [member for member in _members(kind) if _is_struct(member)]
    if structs and isinstance(raw, dict):
        yield from _table_problems(raw, structs, path)
    elif not structs and isinstance(raw, float) and not math.isfinite(raw):
        yield f"{path} = {raw}: expected a finite number"
    else:
        try:
            msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            yield f"{path} = {_shown(raw)}: {_explained(error, raw, kind)}"


def _table_problems(
    raw: dict[str, Any], structs: list[type[msgspec.Struct]], path: str
) -> Iterator[str]:
    struct, tag = structs[0], structs[0].__struct_config__.tag_field
    if len(structs) > 1 and tag is not None:
        by_tag = {str(member.__struct_config__.tag): member for member in structs}
        chosen = raw.get(tag)
        if not isinstance(chosen, str) or chosen not in by_tag:
            yield f"{path}.{tag} = {_shown(chosen)}: {_allowed(chosen, list(by_tag))}"
            return
        struct = by_tag[chosen]
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    if struct.__struct_config__.forbid_unknown_fields:
        for key in (key for key in raw if key not in fields and key != tag):
            unused = [name for name in fields if name not in raw] or list(fields)
            near = difflib.get_close_matches(key, unused, n=2) or difflib.get_close_matches(
                key, fields, n=2
            )
            guess = f"did you mean {' or '.join(map(repr, near))}?" if near else _choice(fields)
            yield f"{path}: unknown key {key!r}, {guess}"
    for name, field in fields.items():
        if name in raw:
            yield from _problems(raw[name], field.type, f"{path}.{name}")
        elif field.required:
            yield f"{path}: missing key {name!r}"


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in {Union, types.UnionType} else (kind,)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _explained(error: msgspec.ValidationError, raw: object, kind: Any) -> str:
    literals = [
        str(value)
        for member in _members(kind)
        if get_origin(member) is Literal
        for value in get_args(member)
    ]
    if literals and isinstance(raw, str):
        return _allowed(raw, literals)
    message = str(error)
    return message[:1].lower() + message[1:]


def _allowed(raw: object, values: list[str]) -> str:
    near = difflib.get_close_matches(str(raw), values, n=1)
    return f"did you mean {near[0]!r}? {_choice(values)}" if near else _choice(values)


def _choice(values: Mapping[str, object] | list[str]) -> str:
    return f"allowed: {', '.join(values)}"


def _shown(raw: object) -> str:
    text = "nothing" if raw is None else repr(raw)
    return text if len(text) <= 60 else f"{text[:57]}..."
