"""One run at a time writes to a checkpoint folder."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
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


class Mark:
    """That this process writes to a folder.

    Args:
        root: the ``--save`` folder.
        beat: seconds between two touches.
    """

    def __init__(self, root: Path, beat: float) -> None:
        self.root = root
        self.path = root / NAME
        self._beat = beat
        pid, host = os.getpid(), socket.gethostname()
        self._mine = {"host": host, "system": system(), "pid": pid, "start": started(pid), "since": time.ctime()}

    def stands(self) -> bool:
        """Whether it is there."""
        return _read(self.path) == self._mine

    def set(self, pause: Callable[[float], None] = time.sleep) -> None:
        """Put it there; the folder is made if need be.

        Args:
            pause: waits so many seconds, as long as another's mark has to be watched.

        Raises:
            InUse: another run writes there.
            OSError: the folder cannot be written to.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        draft = self.root / f"{NAME}.{socket.gethostname()}.{os.getpid()}"
        try:
            draft.write_text(json.dumps(self._mine))
            while True:
                try:
                    _claim(draft, self.path)
                    break
                except FileExistsError:
                    _take_away(self.path, self._beat, pause)
        finally:
            draft.unlink(missing_ok=True)

    def renew(self) -> None:
        """Before something is written: a folder that was deleted or moved away meanwhile is made again, and marked.

        Raises:
            InUse: another run has begun to write there.
            OSError: the folder cannot be written to.
        """
        if self.stands():
            return
        theirs = _read(self.path)
        if theirs is not None:
            raise _refusal(self.path, theirs)
        logger.warning(
            "--save %s was deleted, moved or emptied since the last save: this run goes on saving there, and holds no"
            " other copy of what was in it",
            self.root,
        )
        self.set()

    def touch(self) -> None:
        """Show that this process lives."""
        # Storage may be away for a while; what it holds then is nobody's to judge.
        with suppress(OSError):
            if self.stands():
                os.utime(self.path)


@contextmanager
def hold(root: Path, *, beat: float = BEAT, pause: Callable[[float], None] = time.sleep) -> Generator[Mark]:
    """Mark ``root`` as written to by this process, until the block ends.

    A mark whose process is gone from this machine does not count, so a killed run can be started again at once. That a
    process elsewhere still lives shows in its mark, which it touches again and again: one that stays as it is for
    :data:`PATIENCE` beats by the clock of this process is taken over.

    Args:
        root: the ``--save`` folder; made if need be.
        beat: seconds between two touches.
        pause: waits so many seconds, as long as another's mark has to be watched.

    Raises:
        InUse: another run writes there.
        OSError: the folder cannot be written to.
    """
    mark = Mark(root, beat)
    mark.set(pause)
    ended = threading.Event()
    threading.Thread(target=_keep_touching, args=(mark, beat, ended), daemon=True).start()
    try:
        yield mark
    finally:
        ended.set()
        if mark.stands():
            mark.path.unlink(missing_ok=True)


def _keep_touching(mark: Mark, beat: float, ended: threading.Event) -> None:
    while not ended.wait(beat):
        mark.touch()


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


def _take_away(mark: Path, beat: float, pause: Callable[[float], None]) -> None:
    theirs = _read(mark)
    if theirs is not None:
        if theirs.get("system") is not None and theirs["system"] == system():
            alive = theirs["start"] == started(theirs["pid"])
        else:
            alive = _touches(mark, beat, pause, theirs)
        if alive:
            raise _refusal(mark, theirs)
    gone = mark.with_name(f"{NAME}.gone.{socket.gethostname()}.{os.getpid()}")
    with suppress(FileNotFoundError):
        mark.rename(gone)
        if _read(gone) != theirs:
            # Someone else was faster, and this is the mark of a run that just began.
            with suppress(FileExistsError):
                os.link(gone, mark)
        gone.unlink()


def _refusal(mark: Path, theirs: dict[str, Any]) -> InUse:
    return InUse(
        f"another run writes to --save {mark.parent}",
        got=f"process {theirs['pid']} on {theirs['host']}, since {theirs['since']}",
        fix="another --save, or wait for it",
    )


def _touches(mark: Path, beat: float, pause: Callable[[float], None], theirs: dict[str, Any]) -> bool:
    """Whether the mark of a process elsewhere changes within :data:`PATIENCE` beats."""
    logger.warning("%s is marked by a process on %s; watching whether it lives", mark.parent, theirs["host"])
    before = _changed(mark)
    for _ in range(PATIENCE):
        pause(beat)
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
