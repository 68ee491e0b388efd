"""One run at a time writes to a checkpoint folder."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import CheckpointError

NAME = ".in_use.json"


@contextmanager
def hold(root: Path) -> Generator[None]:
    """Mark ``root`` as written to by this process, until the block ends.

    A mark whose process is gone from this machine does not count, so a killed run can be started again at once. Whether
    a process of another machine still lives cannot be known.

    Raises:
        CheckpointError: another run writes there.
    """
    mark, draft = root / NAME, root / f"{NAME}.{socket.gethostname()}.{os.getpid()}"
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "start": _start_of(os.getpid()), "since": time.ctime()}
    draft.write_text(json.dumps(mine))
    try:
        while True:
            try:
                _claim(draft, mark)
                break
            except FileExistsError:
                _take_away(mark)
    finally:
        draft.unlink()
    try:
        yield
    finally:
        if _read(mark) == mine:
            mark.unlink(missing_ok=True)


def _claim(draft: Path, mark: Path) -> None:
    try:
        # The mark appears whole or not at all.
        os.link(draft, mark)
    except FileExistsError:
        raise
    except OSError:
        # A file system without links.
        with mark.open("x") as file:
            file.write(draft.read_text())


def _take_away(mark: Path) -> None:
    theirs = _read(mark)
    if theirs is not None:
        elsewhere = theirs["host"] != socket.gethostname()
        if elsewhere or theirs["start"] == _start_of(theirs["pid"]):
            raise CheckpointError(
                f"another run writes to --save {mark.parent}",
                got=f"process {theirs['pid']} on {theirs['host']}, since {theirs['since']}",
                fix="another --save, or wait for it" + (f"; if it is gone, delete {mark}" if elsewhere else ""),
            )
    mark.unlink(missing_ok=True)


def _read(mark: Path) -> dict[str, Any] | None:
    try:
        return json.loads(mark.read_text())
    except (OSError, ValueError):
        return None


def _start_of(pid: int) -> str | None:
    """When the process began, in ticks since boot, since identifiers come back; None when it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
