"""A tile-level emulator of LLM prefill on wafer-scale chips.

The names below are imported when they are first used, so that ``import wafer_emu`` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wafer_kernels.errors import (
    CapacityError,
    ConfigError,
    DeadlockError,
    FileError,
    KernelError,
    UsageError,
    WaferError,
)

if TYPE_CHECKING:
    from wafer_emu.emulation import Run, compare, emulate, max_length
    from wafer_emu.model import Model
    from wafer_emu.options import Options
    from wafer_emu.routing import Routing
    from wafer_emu.state import open_run
    from wafer_emu.wafer import Wafer
    from wafer_emu.workload import Workload

__all__ = [
    "CapacityError",
    "ConfigError",
    "DeadlockError",
    "FileError",
    "KernelError",
    "Model",
    "Options",
    "Routing",
    "Run",
    "UsageError",
    "Wafer",
    "WaferError",
    "Workload",
    "compare",
    "emulate",
    "max_length",
    "open_run",
]

_HOMES = {
    "Model": "model",
    "Options": "options",
    "Routing": "routing",
    "Run": "emulation",
    "Wafer": "wafer",
    "Workload": "workload",
    "compare": "emulation",
    "emulate": "emulation",
    "max_length": "emulation",
    "open_run": "state",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
