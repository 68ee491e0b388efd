"""Writes that survive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


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
