"""MOCAP's policies: how a prompt is cut into chunks, and where the KV of each chunk lives.

Usable without a wafer: ``mocap.partition`` cuts for any cost ``t(chunk_tokens, prefix_tokens)``,
``mocap.reallocation`` plans KV for any capacities.
"""

from mocap import partition, reallocation
from mocap.policy import Move, Policy, Request, Setting, cut, get, move, names, register
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
    "Move",
    "Policy",
    "Request",
    "Setting",
    "UsageError",
    "WaferError",
    "cut",
    "get",
    "move",
    "names",
    "partition",
    "reallocation",
    "register",
]
