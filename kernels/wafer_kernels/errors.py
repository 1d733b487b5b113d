"""The family of errors: one root, and the exit code that the command line gives to each."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CapacityError",
    "ConfigError",
    "DeadlockError",
    "FileError",
    "KernelError",
    "UsageError",
    "WaferError",
]


class WaferError(Exception):
    """Root of all errors of this project.

    Parameters
    ----------
    message
        What, where, and what would make it right, in sentences.
    details
        Machine-readable facts (integers, strings, lists), shown by ``--json`` beside the message.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    @property
    def kind(self) -> str:
        """Name of the error as users see it."""
        return type(self).__name__


class ConfigError(WaferError):
    """A wafer, model, workload or policy description is wrong."""

    exit_code = 2


class UsageError(WaferError):
    """A command, option or argument is wrong."""

    exit_code = 2


class FileError(WaferError):
    """A file cannot be read or written, or is not what it should be."""

    exit_code = 2


class CapacityError(WaferError):
    """A plan does not fit the memory it was given."""


class DeadlockError(WaferError):
    """A run can make no further progress."""


class KernelError(WaferError):
    """A kernel broke one of its own invariants: a fault of this project."""
