"""Wafers: presets against published totals, provenance, overrides."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from wafer_emu._data import data_folder, preset_path
from wafer_emu.wafer import Simd, Systolic, Wafer
from wafer_kernels.errors import ConfigError, FileError

PRESETS = Wafer.presets()
COARSE = ("dojo-tile", "wsc-54", "watos-56")


def test_the_shipped_wafers() -> None:
    assert set(PRESETS) >= {
        "wse-2", "wse-3", "wse-3-pipeline", "dojo-tile", "wsc-54", "watos-56", "tiny-4x4",
        "check-32x32",
    }  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_of_a_preset_has_a_source_and_survives_a_round_trip(name: str) -> None:
    wafer = Wafer.preset(name)
    assert wafer.name == name
    paths = wafer.paths()
    assert "core.compute.kind" in paths
    for path in paths:
        grade, _, source = wafer.provenance_of(path).partition(": ")
        assert grade in {"published", "derived", "assumed", "calibrated"}
        assert len(source) > 5
    assert Wafer.from_dict(json.loads(json.dumps(wafer.to_dict()))) == wafer


@pytest.mark.parametrize("name", COARSE)
def test_coarse_presets_say_that_they_were_never_validated(name: str) -> None:
    assert "simulated, never validated" in Wafer.preset(name).title


def test_wse_2_against_published_figures() -> None:
    """48 KB a core, 7.5 PFLOPS of 850,000 cores at SIMD-4, 20 PB/s at 1 GHz.

    Products of matrices reach one multiply-add per core and cycle.
    """
    wafer = Wafer.preset("wse-2")
    assert (wafer.core_rows, wafer.core_columns, wafer.cores) == (750, 994, 745_500)
    assert wafer.core.sram_bytes == 48 * 1024
    assert wafer.core.data_bytes == 42 * 1024
    assert isinstance(wafer.core.compute, Simd)
    lanes = 2 * wafer.core.vector_lanes * wafer.core.clock_hz * 850_000
    assert lanes == pytest.approx(7.5e15, rel=0.01)
    assert wafer.peak_macs_per_second == wafer.cores * wafer.core.clock_hz
    width = wafer.core.sram_read_bytes_per_cycle + wafer.core.sram_write_bytes_per_cycle
    assert width * 850_000 * 1e9 == pytest.approx(20e15, rel=0.03)
    assert wafer.dram is None
    assert wafer.dram_capacity_bytes == 0


def test_wse_3_against_published_figures() -> None:
    """44 GB of 900,000 cores."""
    wafer = Wafer.preset("wse-3")
    assert wafer.cores == 755 * 1170
    assert wafer.sram_capacity_bytes / wafer.cores * 900_000 == pytest.approx(44e9, rel=0.01)


def test_wsc_54_against_published_totals() -> None:
    """WSC-LLM case 3: 14,100 TFLOPS, 3,456 GB of die memory."""
    wafer = Wafer.preset("wsc-54")
    assert (wafer.dies, wafer.core_rows, wafer.core_columns) == (54, 96, 144)
    assert 2 * wafer.peak_macs_per_second == pytest.approx(14.1e15, rel=0.005)
    assert wafer.dram_capacity_bytes == 3_456_000_000_000
    assert wafer.die_link is not None
    assert wafer.die_link.bytes_per_second == 2 * 10**12


def test_watos_56_against_published_totals() -> None:
    """WATOS configuration 3: 39,648 TFLOPS, 3,920 GB."""
    wafer = Wafer.preset("watos-56")
    assert wafer.dies == 56
    assert 2 * wafer.peak_macs_per_second == pytest.approx(39.648e15, rel=0.02)
    assert wafer.dram_capacity_bytes == 3_920_000_000_000


def test_dojo_tile_against_published_totals() -> None:
    """5 x 5 dies of 354 nodes: 9 PFLOPS, 11 GB; one column of nodes given up."""
    wafer = Wafer.preset("dojo-tile")
    assert wafer.dies == 25
    peak = 2 * wafer.peak_macs_per_second
    assert peak * 354 / 342 == pytest.approx(9.06e15, rel=0.001)
    assert wafer.sram_capacity_bytes == pytest.approx(11e9, rel=0.05)


def test_the_wafers_for_tests() -> None:
    for name, cores in (("tiny-4x4", 16), ("check-32x32", 1024)):
        wafer = Wafer.preset(name)
        assert wafer.cores == cores
        assert wafer.core.sram_bytes == 2**20
        assert wafer.dram is None
        assert wafer.core.compute == Systolic(rows=8, columns=8)


def test_an_unknown_preset_names_the_near_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean wse-2") as caught:
        Wafer.preset("wse-22")
    assert caught.value.exit_code == 2
    assert "tiny-4x4" in caught.value.message


def test_load_takes_a_name_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my wafer.toml"
    path.write_text(preset_path("wafers", ".toml", "tiny-4x4").read_text())
    assert Wafer.load(str(path)) == Wafer.load("tiny-4x4")
    with pytest.raises(FileError):
        Wafer.load("none.toml")


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = preset_path("wafers", ".toml", "tiny-4x4").read_text()
    assert old in text
    path = tmp_path / "edited.toml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("hop_cycles = 1", "hop_cycle = 1", "did you mean 'hop_cycles'?"),
        ("sram_bytes = 1_048_576", "sram_bytes = 0", "$.core.sram_bytes = 0"),
        ("code_bytes = 6_144", "code_bytes = 2_000_000", "leaves nothing of sram_bytes"),
        ('link = "assumed', '# link = "assumed', "no provenance for link.bytes_per_cycle"),
        ('link = "assumed', 'link = "guessed', "provenance of link must start with published"),
        (
            'link = "assumed',
            'dram = "assumed: x"\nlink = "assumed',
            "of no value of this wafer: dram",
        ),
        ("die_rows = 1", "die_rows = 2", "2 dies need a die_link"),
        ('kind = "systolic"', 'kind = "sistolic"', "did you mean 'systolic'?"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, old: str, new: str, part: str) -> None:
    path = edited(tmp_path, old, new)
    with pytest.raises(ConfigError) as caught:
        Wafer.from_toml(path)
    assert part in caught.value.message
    assert str(path) in caught.value.message


def test_the_longest_prefix_of_the_provenance_counts(tmp_path: Path) -> None:
    path = edited(
        tmp_path, 'core = "assumed', '"core.compute" = "published: a paper"\ncore = "assumed'
    )
    wafer = Wafer.from_toml(path)
    assert wafer.provenance_of("core.compute.rows") == "published: a paper"
    assert wafer.provenance_of("core.clock_hz").startswith("assumed")
    with pytest.raises(ConfigError, match="no value"):
        wafer.provenance_of("core")
    with pytest.raises(ConfigError, match="no value"):
        wafer.provenance_of("core.clock")


def test_overrides_are_strict_and_leave_a_trace() -> None:
    wafer = Wafer.preset("wsc-54")
    changed = wafer.with_overrides({"core.sram_bytes": "2_000_000", "core.compute.dataflow": "ws"})
    assert changed.core.sram_bytes == 2_000_000
    assert changed.provenance_of("core.sram_bytes") == "assumed: set by the user"
    assert changed.provenance_of("core.clock_hz") == wafer.provenance_of("core.clock_hz")
    assert wafer.core.sram_bytes == 1_310_720
    with pytest.raises(ConfigError, match=r"--set wafer: .*did you mean 'clock_hz'"):
        wafer.with_overrides({"core.clock": "1"})


def test_replace_takes_structs_and_whole_fields() -> None:
    wafer = Wafer.preset("wsc-54")
    core = Simd(lanes=16, issue_millicycles=500)
    changed = wafer.replace({"core.compute": core}, name="mine", dram=None)
    assert changed.core.compute == core
    assert (changed.name, changed.dram) == ("mine", None)
    assert changed.provenance_of("core.compute.lanes") == "assumed: set by the user"
    assert Wafer.from_dict(changed.to_dict()) == changed
    with pytest.raises(ConfigError, match="54 dies need a die_link"):
        wafer.replace(die_link=None)


def test_peak_counts_depth() -> None:
    assert Systolic(rows=3, columns=5, depth=4).macs_per_cycle == 60


def test_specs_import_no_heavy_library() -> None:
    code = (
        "import sys, wafer_emu.wafer, wafer_emu.model, wafer_emu.workload; "
        "print(sorted({'numba', 'xarray', 'numpy', 'h5py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_table_of_published_figures_has_a_source() -> None:
    folder = data_folder() / "published"
    sources = tomllib.loads((folder / "sources.toml").read_text())
    assert sources.keys() == {table.stem for table in folder.glob("*.csv")}
    for name in sources:
        header, *rows = list(csv.reader((folder / f"{name}.csv").read_text().splitlines()))
        assert rows
        assert all(len(row) == len(header) for row in rows)
