"""Strict loading: every fault is named, with path, near matches and choices."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wafer_emu.strict import (
    Amount,
    Count,
    Natural,
    apply_changes,
    apply_overrides,
    load_json,
    load_toml,
    toml_values,
)
from wafer_kernels.errors import ConfigError, FileError


class Square(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="square",
             tag_field="kind"):  # fmt: skip
    side: Count


class Disc(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="disc",
           tag_field="kind"):  # fmt: skip
    radius: Amount


class Core(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    sram_bytes: Count
    hop_cycles: Natural = 1
    flow: Literal["os", "ws", "is"] = "os"
    shape: Square | Disc | None = None


class Chip(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    core: Core


GOOD = 'name = "a"\n[core]\nsram_bytes = 1024\n'


def fault(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_toml(text, Chip)
    assert caught.value.exit_code == 2
    return caught.value.message


def test_a_good_text_loads() -> None:
    assert load_toml(GOOD, Chip) == Chip(name="a", core=Core(sram_bytes=1024))
    assert load_json('{"name": "a", "core": {"sram_bytes": 1024}}', Chip) == load_toml(GOOD, Chip)


def test_a_mistyped_key_has_its_path_and_the_nearest_name() -> None:
    message = fault(GOOD + "hop_cycle = 2\n")
    assert "$.core: unknown key 'hop_cycle'" in message
    assert "'hop_cycles'" in message


def test_a_missing_key_does_not_hide_the_typo_that_causes_it() -> None:
    message = fault('name = "a"\n[core]\nsram_byte = 1024\n')
    assert "unknown key 'sram_byte', did you mean 'sram_bytes'?" in message
    assert "$.core: missing key 'sram_bytes'" in message


def test_all_faults_come_at_once() -> None:
    message = fault(
        'nam = "a"\nsize = 1\n[core]\nsram_bytes = -1\nflow = "oss"\nhop_cycles = 1.5\n'
    )
    for part in ("'nam'", "'size'", "missing key 'name'", "$.core.sram_bytes = -1",
                 "$.core.flow = 'oss': did you mean 'os'? allowed: os, ws, is",
                 "$.core.hop_cycles = 1.5: expected `int`"):  # fmt: skip
        assert part in message


@pytest.mark.parametrize(
    "value", ["0", "-3", "1.0", "1e3", "true", '"8"', str(2**53 + 1), "9" * 26]
)
def test_a_count_is_a_whole_number_from_1_to_2_to_the_53(value: str) -> None:
    assert "$.core.sram_bytes" in fault(f'name = "a"\n[core]\nsram_bytes = {value}\n')


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-0.5", "true"])
def test_an_amount_is_finite_and_not_negative(value: str) -> None:
    assert "$.core.shape.radius" in fault(GOOD + f'[core.shape]\nkind = "disc"\nradius = {value}\n')


def test_the_tag_of_a_union_is_checked_first() -> None:
    assert "$.core.shape.kind = 'squar': did you mean 'square'? allowed: square, disc" in fault(
        GOOD + '[core.shape]\nkind = "squar"\nside = 3\n'
    )
    assert "$.core.shape.kind = nothing" in fault(GOOD + "[core.shape]\nside = 3\n")
    assert "unknown key 'side'" in fault(GOOD + '[core.shape]\nkind = "disc"\nside = 3\n')


def test_syntax_errors_say_where(tmp_path: Path) -> None:
    assert "line 2, column" in fault('name = "a"\nsize = = 3\n')
    assert "twice" in _json_fault('{"name": "a", "name": "b"}')
    assert "line 2, column 3" in _json_fault('{"name": "a"\n  core}')
    path = tmp_path / "chip file.toml"
    path.write_text("name = [")
    with pytest.raises(ConfigError, match=r"chip file\.toml"):
        load_toml(path, Chip)


def _json_fault(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_json(text, Chip)
    return caught.value.message


def test_a_repeated_toml_key_is_refused() -> None:
    assert "not valid TOML" in fault(GOOD + "sram_bytes = 2048\n")


def test_unreadable_files_are_file_errors(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.toml: cannot be read: No such file"):
        load_toml(tmp_path / "none.toml", Chip)
    with pytest.raises(FileError, match="cannot be read"):
        load_toml(tmp_path, Chip)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="UTF-8"):
        load_toml(tmp_path / "binary.toml", Chip)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "chip.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_toml(path, Chip).name == "a"


CHIP = load_toml(GOOD, Chip)


def test_overrides_take_toml_values_and_bare_words() -> None:
    changed = apply_overrides(
        CHIP,
        {
            "core.sram_bytes": "65_536",
            "core.flow": "ws",
            "name": '"b c"',
            "core.shape": '{kind = "square", side = 2}',
        },
    )
    assert changed == Chip(name="b c", core=Core(sram_bytes=65536, flow="ws", shape=Square(side=2)))
    assert CHIP.core.sram_bytes == 1024


@pytest.mark.parametrize(
    ("path", "text", "part"),
    [
        ("cor.sram_bytes", "3", "unknown key 'cor', did you mean 'core'?"),
        ("core.sram", "3", "unknown key 'sram'"),
        ("core.sram_bytes", "1.5", "$.core.sram_bytes = 1.5"),
        ("core.sram_bytes", "1\nx = 2", "more than one"),
        ("core.sram_bytes", "[1", "not a TOML value"),
        ("core.sram_bytes", "", "not a TOML value"),
        ("name.first", "1", "'name' is a value, not a table"),
        ("core.shape.side", "3", "$.core.shape.kind = nothing"),
    ],
)
def test_wrong_overrides_are_named(path: str, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(CHIP, {path: text}, "--set chip")
    assert caught.value.message.startswith("--set chip: ")
    assert part in caught.value.message


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 2**53), hops=st.integers(0, 2**53))
def test_changes_are_what_they_say(size: int, hops: int) -> None:
    changed = apply_changes(CHIP, {"core.sram_bytes": size, "core.hop_cycles": hops}, "test")
    assert (changed.core.sram_bytes, changed.core.hop_cycles) == (size, hops)
    assert toml_values({"a": str(size)}) == {"a": size}


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="ascii"), max_size=40))
def test_no_text_makes_anything_but_a_chip_or_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        load_toml(text, Chip)
    with pytest.raises(ConfigError):
        load_json(text, Chip)
