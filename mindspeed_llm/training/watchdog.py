"""Ends a process whose run stands still, or that was told to end, with word of where it stood.

A thread of its own, since the main thread may be waiting in C++ for a peer that will never answer.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

from mindspeed_llm.checkpoint.in_use import InUse
from mindspeed_llm.errors import SuiteError
from mindspeed_llm.training.failure import HERE, cause_of, failure_here, tell, write_error

ENDING = (signal.SIGTERM, signal.SIGINT)
_STOP = 0
_LOOKS = 20
"""Within the time that a run may stand still."""
_LONGEST_PAUSE = 5.0
"""Seconds between two looks."""
_SECONDS_TO_UNWIND = 3.0
"""After a signal, for a main thread that is not stuck."""

Place = tuple[tuple[CodeType, int], ...]


class Ended(BaseException):
    """A signal told this process to end. Not an ``Exception``, so that nothing takes it for a fault and goes on."""

    def __init__(self, number: int) -> None:
        self.number = number
        why = "interrupted" if number == signal.SIGINT else "told to end, as the launcher does when another rank fails"
        super().__init__(f"{signal.Signals(number).name}: {why}")


class Watchdog:
    """Watches the thread that enters it.

    The run stands still when for ``limit`` seconds it neither changes phase or step, nor is found at another line of
    any frame of its stack. Then all stacks and the last collective are written, the FATAL line, and the process ends.
    Seconds in which the whole process was stopped do not count.

    On SIGTERM and SIGINT the main thread unwinds by an exception; where it cannot, the process is ended here. A handler
    that others install, such as that of ``--exit-signal-handler``, is left to them.

    Args:
        limit: seconds.
        save: the ``--save`` folder.
        environ: the launcher's variables; under ``torchrun`` the process also ends when its launcher is gone.
    """

    def __init__(self, limit: float, save: str | None, environ: Mapping[str, str]) -> None:
        self._limit = limit
        self._save = save
        self._environ = environ
        self._watched = 0
        self._parent = os.getppid()
        self._idle = 0.0
        self._telling = threading.Lock()
        self._reader = self._writer = -1
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._handlers: dict[int, Any] = {}
        self._received: int | None = None

    def __enter__(self) -> Watchdog:
        HERE.move("setup", step=0)
        self._watched = threading.get_ident()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            self._take_signals()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._handlers:
            self.give_signals_back()
        os.write(self._writer, bytes([_STOP]))
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def fail(self, error: BaseException, text: str) -> int:
        """Write ``text`` about ``error``, then the FATAL line; the watchdog writes no other.

        Returns:
            The exit status; there is none where the watchdog is already about to end the process.
        """
        self._telling.acquire()
        if isinstance(error, SystemExit) and error.code in [128 + number for number in ENDING]:
            # The preparation of data unwinds by a handler of its own.
            error = Ended(int(error.code) - 128)  # pyright: ignore[reportArgumentType]
        elif self._received is not None:
            # What came of the signal is no cause: something that it interrupted, or peers that it has ended too.
            error = Ended(self._received)
        if isinstance(error, Ended):
            # Where it stood tells nothing about the fault, which is another process's.
            cause, code = str(error), 128 + error.number
        else:
            write_error(text)
            cause, code = cause_of(error), error.exit_code if isinstance(error, SuiteError) else 1
        # A folder that another run writes to holds the record of that run.
        tell(failure_here(cause, self._environ), None if isinstance(error, InUse) else self._save)
        return code

    def _take_signals(self) -> None:
        def leave(number: int, _: FrameType | None) -> None:
            # A launcher ends the others as soon as one is dead: what this process is already saying must be finished.
            if not self._telling.locked():
                self._received = number
                raise Ended(number)

        self._handlers = {number: signal.signal(number, leave) for number in ENDING}
        self._leave = leave
        # Written to by the handler in C, whatever the main thread is doing.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _TAKING.append(self)

    def give_signals_back(self) -> None:
        """Put the handlers back that were there before."""
        _TAKING.remove(self)
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _watch(self) -> None:
        pause = min(self._limit / _LOOKS, _LONGEST_PAUSE)
        place, last = self._place(), time.monotonic()
        while True:
            ready, _, _ = select.select([self._reader], [], [], pause)
            for number in os.read(self._reader, 64) if ready else b"":
                if number == _STOP:
                    return
                self._on_signal(number)
            if "TORCHELASTIC_RUN_ID" in self._environ and os.getppid() != self._parent:
                self._end(1, f"the launcher (process {self._parent}) is gone")
            now, seen = time.monotonic(), self._place()
            self._idle = 0.0 if seen != place or HERE.patient else self._idle + min(now - last, 2 * pause)
            place, last = seen, now
            if self._idle >= self._limit:
                allowed = f"--distributed-timeout-minutes is {self._limit / 60:g}"
                self._end(1, f"no progress for {self._idle:.1f} s; {allowed}")

    def _place(self) -> tuple[int, Place]:
        """Where the watched thread is: equal twice if it has not moved."""
        frame, found = sys._current_frames().get(self._watched), []
        while frame is not None:
            found.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return HERE.moves, tuple(found)

    def _on_signal(self, number: int) -> None:
        if number not in ENDING or signal.getsignal(number) is not self._leave:
            return
        if not self._is_stuck():
            time.sleep(_SECONDS_TO_UNWIND)
        self._end(128 + number, str(Ended(number)))

    def _is_stuck(self) -> bool:
        return self._idle >= self._limit / 2

    def _end(self, code: int, cause: str) -> NoReturn:
        """End the process, unless the main thread is about to; then give it time to say why."""
        if self._telling.acquire(timeout=2 * _SECONDS_TO_UNWIND):
            if code == 1 or self._is_stuck():
                self._dump()
            tell(failure_here(cause, self._environ), self._save)
        os._exit(code)

    def _dump(self) -> None:
        write_error(f"rank {self._environ.get('RANK', '0')}: where its threads are\n")
        # Perhaps nobody reads stderr any more, or it is no file.
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(sys.stderr)
        write_error(f"last collective: {last_collective()}\n")


_TAKING: list[Watchdog] = []


def _hold_signals_back() -> None:
    if _TAKING:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _let_signals_through() -> None:
    if _TAKING:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _leave_signals_to_the_parent() -> None:
    """A forked child shares the pipe: what ends the child must not end its parent, from its very beginning."""
    for watchdog in _TAKING[:]:
        watchdog.give_signals_back()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


os.register_at_fork(
    before=_hold_signals_back, after_in_parent=_let_signals_through, after_in_child=_leave_signals_to_the_parent
)


def last_collective() -> str:
    """What torch's flight recorder knows of the newest collective that has not ended, or else of the newest.

    gloo's point-to-point transfers are not recorded: there the stack says it.
    """
    distributed: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(distributed, "_dump_fr_trace_json", None)
    entries: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", []) if dump else []
    if not entries:
        return "none recorded"
    entry = max(entries, key=lambda entry: (not entry["retired"], entry["record_id"]))
    name = entry["process_group"][1] or entry["process_group"][0]
    what = f"{entry['profiling_name']} number {entry['collective_seq_id']} of group {name}"
    return f"{what}, sizes {entry['input_sizes']}, {'ended' if entry['retired'] else 'not ended'}"
