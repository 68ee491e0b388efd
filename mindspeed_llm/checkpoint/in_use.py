"""One run at a time writes to a checkpoint folder."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import CheckpointError
from mindspeed_llm.processes import started, system

logger = logging.getLogger(__name__)

NAME = ".in_use.json"
BEAT = 10.0
"""Seconds between two touches of a mark."""
PATIENCE = 6
"""Beats without a change after which a process elsewhere is taken for gone."""


class InUse(CheckpointError):
    """Another run writes to the folder, and it is that run's to write to."""


@contextmanager
def hold(root: Path, *, beat: float = BEAT) -> Generator[None]:
    """Mark ``root`` as written to by this process, until the block ends.

    A mark whose process is gone from this machine does not count, so a killed run can be started again at once. That a
    process elsewhere still lives shows in its mark, which it touches again and again: one that stays as it is for
    :data:`PATIENCE` beats by the clock of this process is taken over.

    Args:
        root: the ``--save`` folder; made if need be.
        beat: seconds between two touches.

    Raises:
        InUse: another run writes there.
        OSError: the folder cannot be written to.
    """
    root.mkdir(parents=True, exist_ok=True)
    mark, draft = root / NAME, root / f"{NAME}.{socket.gethostname()}.{os.getpid()}"
    pid = os.getpid()
    mine = {"host": socket.gethostname(), "system": system(), "pid": pid, "start": started(pid), "since": time.ctime()}
    try:
        draft.write_text(json.dumps(mine))
        while True:
            try:
                _claim(draft, mark)
                break
            except FileExistsError:
                _take_away(mark, beat)
    finally:
        draft.unlink(missing_ok=True)
    ended = threading.Event()
    threading.Thread(target=_keep_touching, args=(mark, mine, beat, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if _read(mark) == mine:
            mark.unlink(missing_ok=True)


def _keep_touching(mark: Path, mine: dict[str, Any], beat: float, ended: threading.Event) -> None:
    while not ended.wait(beat):
        # Storage may be away for a while; what it holds then is nobody's to judge.
        with suppress(OSError):
            if _read(mark) == mine:
                os.utime(mark)


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


def _take_away(mark: Path, beat: float) -> None:
    theirs = _read(mark)
    if theirs is not None:
        if theirs.get("system") is not None and theirs["system"] == system():
            alive = theirs["start"] == started(theirs["pid"])
        else:
            alive = _touches(mark, beat, theirs)
        if alive:
            raise InUse(
                f"another run writes to --save {mark.parent}",
                got=f"process {theirs['pid']} on {theirs['host']}, since {theirs['since']}",
                fix="another --save, or wait for it",
            )
    gone = mark.with_name(f"{NAME}.gone.{socket.gethostname()}.{os.getpid()}")
    with suppress(FileNotFoundError):
        mark.rename(gone)
        if _read(gone) != theirs:
            # Someone else was faster, and this is the mark of a run that just began.
            with suppress(FileExistsError):
                os.link(gone, mark)
        gone.unlink()


def _touches(mark: Path, beat: float, theirs: dict[str, Any]) -> bool:
    """Whether the mark of a process elsewhere changes within :data:`PATIENCE` beats."""
    logger.warning("%s is marked by a process on %s; watching whether it lives", mark.parent, theirs["host"])
    before = _changed(mark)
    for _ in range(PATIENCE):
        time.sleep(beat)
        if _changed(mark) != before:
            return True
    return False


def _changed(mark: Path) -> int | None:
    try:
        # Opening asks a network file system for what is true now.
        with mark.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _read(mark: Path) -> dict[str, Any] | None:
    try:
        return json.loads(mark.read_text())
    except (OSError, ValueError):
        return None
