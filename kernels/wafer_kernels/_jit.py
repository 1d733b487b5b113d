"""The only place that knows Numba's flags, its cache directory and the checked build.

Kernels are compiled lazily, cached on disk, without fastmath. Numba does not notice when a function
in *another* file changes, so the cache directory is keyed by a hash of all kernel sources and of
the Numba and Python versions. ``WAFER_CHECKED=1`` compiles with bounds checks.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba

__all__ = ["CHECKED", "kernel", "parallel_kernel", "prange"]

P = ParamSpec("P")
R = TypeVar("R")

CHECKED = os.environ.get("WAFER_CHECKED", "") == "1"
KEPT_CACHES = 3
prange = numba.prange


def _cache_directory() -> Path:
    digest = hashlib.sha256(f"{numba.__version__} {sys.version} {CHECKED}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "wafer-emu" / f"numba-{digest.hexdigest()[:16]}"


def _prune(siblings: Path, keep: Path) -> None:
    """Remove the oldest caches of earlier kernel sources."""
    others = sorted(
        (path for path in siblings.glob("numba-*") if path != keep),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for path in others[KEPT_CACHES - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def _set_cache() -> bool:
    """Point Numba at our cache; False where no folder can be written (then nothing is cached)."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return True
    try:
        folder = _cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        _prune(folder.parent, folder)
    except OSError:
        return False
    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined, unused-ignore]
    return True


_FLAGS: dict[str, Any] = {
    "cache": _set_cache(),
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": CHECKED,
}


def kernel() -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile a serial kernel; its signature stays visible to the type checker."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        compiled: Callable[P, R] = numba.njit(**_FLAGS)(function)
        return compiled

    return decorate


def parallel_kernel() -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile a kernel with ``prange`` loops; only integer sums may cross its iterations."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        compiled: Callable[P, R] = numba.njit(parallel=True, **_FLAGS)(function)
        return compiled

    return decorate
