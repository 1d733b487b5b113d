"""The house as drawn: imports run one way, and one module owns Numba's flags."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"wafer_kernels": ROOT / "kernels/wafer_kernels", "mocap": ROOT / "mocap"}
ROOMS["wafer_emu"] = ROOT / "wafer_emu"
BELOW = {
    "wafer_kernels": {"wafer_kernels"},
    "mocap": {"wafer_kernels", "mocap"},
    "wafer_emu": {"wafer_kernels", "mocap", "wafer_emu"},
}
KERNELS_MAY_IMPORT = {"numba", "numpy"}


def imported(source: Path) -> set[str]:
    """Top-level names of all modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_the_drawn_way(room: str) -> None:
    forbidden = (set(ROOMS) | {"tests", "tools"}) - BELOW[room]
    files = sorted(ROOMS[room].rglob("*.py"))
    assert len(files) > 5
    for source in files:
        assert not imported(source) & forbidden, source
        if room == "wafer_kernels":
            outside = imported(source) - set(sys.stdlib_module_names) - {room}
            assert outside <= KERNELS_MAY_IMPORT, source


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_imports_neither_numba_nor_xarray(room: str) -> None:
    code = f"import {room}, sys; print({{'numba', 'xarray'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_only_one_module_knows_numba() -> None:
    for folder in ROOMS.values():
        for source in folder.rglob("*.py"):
            if source.name != "_jit.py":
                assert "njit" not in source.read_text(), source
                assert "numba" not in imported(source), source


def test_one_and_two_threads_give_the_same_integers(tmp_path: Path) -> None:
    """A run and a product on a grid large enough for the parallel kernel."""
    code = (
        "import json, sys\n"
        "from wafer_emu.__main__ import main\n"
        "words = 'run --wafer wsc-54 --model llama-3-8b --tokens 4096 --stages 4 --policy mocap'\n"
        "main([*words.split(), '--json'])\n"
        "words = 'gemm -m 700 -n 701 -k 702 --wafer wse-2 --grid 320x320 --algorithm meshgemm'\n"
        "main([*words.split(), '--json'])\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"NUMBA_NUM_THREADS": threads, "PATH": "", "HOME": str(tmp_path), **_cache()},
        ).stdout
        for threads in ("1", "2")
    ]
    assert len(outputs[0]) > 1000
    assert outputs[0] == outputs[1]


def _cache() -> dict[str, str]:
    """Let both processes use the kernels that are compiled already."""
    import os

    names = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return kept or {"XDG_CACHE_HOME": str(Path.home() / ".cache")}
