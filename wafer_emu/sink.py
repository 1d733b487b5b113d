"""What lies under HDF5 while a run file grows: a file and a process that may fail at any time.

An error that reaches HDF5 from inside a write leaves it unable to close the file and crashes the
process at its end. So neither a full disk nor Ctrl-C may be raised there.
"""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Sink", "interrupt_held"]


class Sink(io.FileIO):
    """The growing file: after a failed write it keeps the failure and takes bytes to no effect."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write all bytes, or keep the failure; either way say that all were written."""
        rest = memoryview(data)
        try:
            while rest.nbytes and self.failure is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.failure = error
        return len(data)

    def truncate(self, size: int | None = None, /) -> int:
        """Set the length of the file, or keep the failure."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = error
            return size or 0


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Hold Ctrl-C back until the block, in which HDF5 works, has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    usual = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if held:
            signal.raise_signal(signal.SIGINT)
