"""A folder that exactly one of many processes makes while the others wait: no network, no collective, only files.

    once(Path("_prepared/en"), make)    # called by every rank of every node

What the processes see of each other is the file system. Where nodes share the storage of the folder one process makes
it for all of them; where they do not, one on each node does. Nothing has to be told which of the two is the case.

Beside the folder ``en`` lie, while it is made, ``en.lock0`` and ``en.partial0``. The lock is created by whoever comes
first (``O_EXCL``) and its content changes at every heartbeat. A waiter to whom the content of the newest lock, say
number 3, has looked the same for :attr:`Pace.stale` seconds *of its own clock* takes over by creating number 4, which
again only one can do; clocks of other machines are never compared. The folder appears by one rename, so it is whole
whenever it is there, also when somebody who was believed dead comes back to finish it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import DataError
from mindspeed_llm.processes import started, system

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """Seconds.

    Attributes:
        beat: between two heartbeats, and between two looks of a waiter.
        stale: without a heartbeat until somebody else takes over.
        report: between two lines that say who is waited for.
    """

    beat: float = 1.0
    stale: float = 60.0
    report: float = 30.0


PACE = Pace()


def once(folder: Path, make: Callable[[Path], None], pace: Pace = PACE) -> bool:
    """Have ``folder`` made, unless it is there; return when it is.

    Args:
        folder: appears complete or not at all.
        make: fills the empty folder that it is given, on the same file system.
        pace: of heartbeats and waiting.

    Returns:
        Whether this process made it.

    Raises:
        DataError: what ``make`` raised, here or in the process that was waited for.
        OSError: the place for the folder cannot be written to.
    """
    watch: _Watch | None = None
    while not folder.is_dir():
        newest = max(_lock_numbers(folder), default=-1)
        if newest < 0:
            watch = None
        elif watch is None or watch.number != newest:
            watch = _Watch(folder, newest, pace)
        if watch is not None and not watch.is_free():
            time.sleep(pace.beat)
            continue
        lock = _Lock.take(folder, newest + 1, pace)
        if lock is not None and newest >= 0:
            logger.warning("taking over %s, which another process began and did not finish", folder)
        if lock is not None and lock.make(make):
            return True
    return False


def _lock_path(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.lock{number}")


def _partial_path(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.partial{number}")


def _lock_numbers(folder: Path) -> list[int]:
    """Of the locks beside ``folder``, in order. A listing is never as stale on network storage as a look at a name."""
    if not folder.parent.is_dir():
        return []
    name = re.compile(re.escape(folder.name) + r"\.lock(\d+)")
    return sorted(int(found[1]) for entry in os.listdir(folder.parent) if (found := name.fullmatch(entry)))


class _Lock:
    """The right to make a folder. Made by :meth:`take`."""

    def __init__(self, folder: Path, number: int, handle: int, pace: Pace) -> None:
        self._folder = folder
        self._number = number
        self._handle = handle
        self._pace = pace
        self._beats = 0
        self._error: dict[str, str | None] | None = None
        self._stop = threading.Event()
        self._writing = threading.Lock()

    @classmethod
    def take(cls, folder: Path, number: int, pace: Pace) -> _Lock | None:
        """Create lock ``number``; None when another process was quicker."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(_lock_path(folder, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return None
        return cls(folder, number, handle, pace)

    def make(self, make: Callable[[Path], None]) -> bool:
        """Make the folder, let others know how it went, and let go.

        Returns:
            Whether it was made here, and not by somebody else in the meantime.
        """
        beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        try:
            self._write()
            beating.start()
            with _unwound_by_sigterm():
                # Between the look for the folder and the lock, another may have finished.
                return False if self._folder.is_dir() else self._make(make)
        except Exception as error:
            if self._superseded():
                return False
            self._error = _error_fields(error)
            with suppress(OSError):  # the disk may be full, and the first error is the one to see
                self._write()
            raise
        finally:
            self._stop.set()
            if beating.ident is not None:
                beating.join()
            os.close(self._handle)
            shutil.rmtree(_partial_path(self._folder, self._number), ignore_errors=True)
            if self._error is None:
                self._remove_locks()

    def _make(self, make: Callable[[Path], None]) -> bool:
        for number in range(self._number + 1):
            # Of processes that were killed, or that will notice that they have been given up.
            shutil.rmtree(_partial_path(self._folder, number), ignore_errors=True)
        partial = _partial_path(self._folder, self._number)
        partial.mkdir()
        make(partial)
        try:
            partial.rename(self._folder)
        except OSError:
            if self._folder.is_dir():
                return False
            raise
        return True

    def _superseded(self) -> bool:
        numbers = _lock_numbers(self._folder)
        return self._number not in numbers or self._number < numbers[-1]

    def _remove_locks(self) -> None:
        """Our own last: while it is there, nobody begins to count at 0 again."""
        for number in _lock_numbers(self._folder):
            if number <= self._number:
                _lock_path(self._folder, number).unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(self._pace.beat):
            try:
                self._write()
            except OSError as error:
                logger.warning("the heartbeat of %s cannot be written: %s", self._folder, error)

    def _write(self) -> None:
        """Write through the open handle: a lock that was removed stays removed."""
        with self._writing:
            self._beats += 1
            data = json.dumps({**_this_process(), "beats": self._beats, "error": self._error}).encode()
            os.pwrite(self._handle, data, 0)
            os.ftruncate(self._handle, len(data))
            os.fsync(self._handle)


class _Watch:
    """What a waiter has seen of one lock."""

    def __init__(self, folder: Path, number: int, pace: Pace) -> None:
        self.number = number
        self._folder = folder
        self._pace = pace
        self._content: bytes | None = None
        self._began = self._changed = self._said = time.monotonic()

    def is_free(self) -> bool:
        """Whether nobody holds the lock any more.

        Raises:
            DataError: its holder failed while we were waiting. A failure of the past is no reason not to try again.
        """
        try:
            # Opening, unlike a look at the time of change, makes network storage ask the server.
            content = _lock_path(self._folder, self.number).read_bytes()
        except FileNotFoundError:
            return False  # removed by now: look for the folder first
        first, now = self._content is None, time.monotonic()
        if content != self._content:
            self._content, self._changed = content, now
        holder = _holder(content)
        error = holder.get("error")
        if error is not None:
            if first:
                return True
            raise DataError(error["what"], got=error["got"], allowed=error["allowed"], fix=error["fix"])
        if _is_gone(holder) or now - self._changed >= self._pace.stale:
            return True
        if now - self._said >= self._pace.report:
            self._said = now
            logger.info("waiting for %s (process %s), %.0f s", self._folder, _place(holder), now - self._began)
        return False


def _holder(content: bytes) -> dict[str, Any]:
    """What the lock says; nothing when it is being written at this moment."""
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError):
        return {}


def _place(holder: dict[str, Any]) -> str:
    return f"{holder.get('pid', '?')} on {holder.get('host', 'some node')}"


def _error_fields(error: Exception) -> dict[str, str | None]:
    if not isinstance(error, DataError):
        return {"what": f"The preparation failed: {type(error).__name__}.", "got": str(error),
                "allowed": None, "fix": None}  # fmt: skip
    fields = {name: getattr(error, name) for name in ("got", "allowed", "fix")}
    return {"what": error.what, **{name: None if value is None else str(value) for name, value in fields.items()}}


def _this_process() -> dict[str, str | int | None]:
    """Who holds the lock, and in which system its number means something (None where there is no /proc)."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "system": system(), "pid": pid, "started": started(pid)}


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this system and is no longer: then there is nothing to wait for."""
    place = holder.get("system")
    return place is not None and place == system() and started(holder["pid"]) != holder["started"]


@contextmanager
def _unwound_by_sigterm() -> Generator[None]:
    """Let SIGTERM end the process in good order, with its workers and with nothing left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers can only be set in the main thread
        return
    before = signal.getsignal(signal.SIGTERM)
    owner = os.getpid()

    def leave(*_: object) -> None:
        if os.getpid() != owner:
            os._exit(128 + signal.SIGTERM)  # a forked worker has nothing to tidy up
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
