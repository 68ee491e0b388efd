"""Writes that survive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def begin_sync(file: BinaryIO) -> None:
    """Have the system begin to bring to the disk what was written to ``file``, for which :func:`sync_file` waits.

    It begins late by itself, and then holds up the writer: with gigabytes, that is several times slower.
    """
    file.flush()
    # Dirty pages are written out; those that are, leave memory (Linux, mm/fadvise.c).
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_file(file: BinaryIO) -> None:
    """Wait until what was written to ``file`` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """The same for a closed file, or for the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
