"""A checksum behind the end of a finished run file, where HDF5 does not look.

HDF5 may crash the process that opens a damaged file, so the damage must be seen before. Another
program that writes to the file drops the seal with its first change; a file without one is only as
safe as HDF5 makes it.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import BinaryIO

__all__ = ["broken", "seal"]

MARK = b"wafer-emu:crc32:"
SEAL_BYTES = len(MARK) + 4
PIECE_BYTES = 1 << 20


def _crc32(file: BinaryIO, size: int) -> bytes:
    check = 0
    for first in range(0, size, PIECE_BYTES):
        check = zlib.crc32(file.read(min(PIECE_BYTES, size - first)), check)
    return check.to_bytes(4, "little")


def seal(path: Path) -> None:
    """Append the mark and the CRC-32 of all bytes before it."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        check = _crc32(file, size)
        file.seek(size)
        file.write(MARK + check)


def broken(path: Path) -> bool:
    """Whether the file is sealed and its bytes are no longer those that were sealed."""
    size = path.stat().st_size - SEAL_BYTES
    if size < 0:
        return False
    with path.open("rb") as file:
        file.seek(size)
        found = file.read()
        if not found.startswith(MARK):
            return False
        file.seek(0)
        return _crc32(file, size) != found[len(MARK) :]
