"""Where a run stands, and what is told when it fails: the FATAL line of each process, and ``<save>/failure.json``."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import SuiteError

RECORD = "failure.json"
_LONGEST = 400
_SECONDS_FOR_THE_RECORD = 5.0
_SECONDS_FOR_A_CHILD = 1.0


@dataclass
class Position:
    """What this process is doing, for whoever has to say so when it ends.

    Attributes:
        phase: setup, data, train, optimizer, evaluate, save or export.
        step: the optimizer step that is being taken, or the last one taken.
        patient: the phase may stand still for as long as it likes.
        moves: how often any of these changed.
    """

    phase: str = "setup"
    step: int = 0
    patient: bool = False
    moves: int = 0

    def move(self, phase: str, *, step: int | None = None, patient: bool = False) -> None:
        """Go on to ``phase``, and to ``step`` if given."""
        self.phase, self.patient = phase, patient
        self.step = self.step if step is None else step
        self.moves += 1


HERE = Position()


@contextmanager
def phase(name: str, *, step: int | None = None, patient: bool = False) -> Generator[None]:
    """The block is phase ``name``. After an error the phase stays: it is where the run failed."""
    outer, was_patient = HERE.phase, HERE.patient
    HERE.move(name, step=step, patient=patient)
    yield
    HERE.move(outer, patient=was_patient)


@dataclass(frozen=True)
class Failure:
    """The end of one process.

    Attributes:
        cause: one line.
    """

    rank: int
    host: str
    step: int
    phase: str
    cause: str

    def __str__(self) -> str:
        return f"FATAL rank={self.rank} host={self.host} step={self.step} phase={self.phase} cause={self.cause}"


def failure_here(cause: str, environ: Mapping[str, str]) -> Failure:
    """This process fails where it stands.

    Args:
        cause: text; its whitespace is folded, a long one is cut.
        environ: the launcher's variables.
    """
    line = " ".join(cause.split())
    line = line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
    return Failure(int(environ.get("RANK", "0")), socket.gethostname(), HERE.step, HERE.phase, line)


def cause_of(error: BaseException) -> str:
    """The type of ``error`` and the first line of what it says; of our own errors also what it was that we got."""
    first = str(error).strip().partition("\n")[0]
    if isinstance(error, SuiteError) and error.got is not None:
        first += f" ({error.got})"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def tell(failure: Failure, save: str | None) -> None:
    """Write the FATAL line as the last of stderr, and before it a line of ``<save>/failure.json``.

    Processes that this one has started, such as those that read data, end first: they write to the same stderr, above
    all when what they talk to is gone. Does not raise, and does not wait for a file system that hangs.
    """
    _end_children()
    if save is not None:
        writing = threading.Thread(target=_record, args=(Path(save, RECORD), failure), name="failure", daemon=True)
        writing.start()
        writing.join(_SECONDS_FOR_THE_RECORD)
    write_error(f"{failure}\n")


def _end_children() -> None:
    if threading.current_thread() is threading.main_thread():
        # torch's would raise, since a reader of data is gone.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(_SECONDS_FOR_A_CHILD)


def write_error(text: str) -> None:
    """Write to stderr at once. Nobody may be reading any more."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def _record(path: Path, failure: Failure) -> None:
    entry = {**asdict(failure), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "pid": os.getpid()}
    entry["restart"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    try:
        _append(path, (json.dumps(entry, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        write_error(f"{path} cannot be written: {error.strerror}\n")


def _append(path: Path, line: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        # On network storage, appending is safe between machines only under a lock; not every file system has them.
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)
        os.write(file, line)
    finally:
        os.close(file)


def read_record(save: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The failures that ``<save>/failure.json`` holds, oldest first: one JSON object a line."""
    return [json.loads(line) for line in Path(save, RECORD).read_text(encoding="utf-8").splitlines()]
