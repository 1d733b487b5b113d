"""Numba kernels of the wafer emulator: loops on arrays, without I/O or configuration objects.

Import the module you need, e.g. ``from wafer_kernels import systolic``: this file imports no Numba.
"""

from wafer_kernels.errors import (
    CapacityError,
    ConfigError,
    DeadlockError,
    FileError,
    KernelError,
    UsageError,
    WaferError,
)

__all__ = [
    "CapacityError",
    "ConfigError",
    "DeadlockError",
    "FileError",
    "KernelError",
    "UsageError",
    "WaferError",
]
