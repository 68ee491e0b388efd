"""One pool of gloo ranks for the whole test session.

    results = pool.run("tests.distributed.cases_x:function", world_size=4, timeout=60, layers=2)

runs ``function(layers=2)`` in four living processes, each with its ``RANK``, a fresh default process group, fresh seeds
and one thread, and returns the four results in the order of ranks. Results travel by pickle, tensors too.

Afterwards each rank destroys its groups and megatron-core's globals, and proves that nothing else was left behind
(other process groups, changed attributes of ``torch``, applied patches); a leak fails the case that made it. When a
rank raises, the others get :data:`GRACE` seconds. At the deadline the ranks that are late are named and every rank's
Python stack is printed. After any failure the ranks are killed and forked anew, which costs milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.distributed.pool_worker import STACK_SIGNAL, THREAD_ENVIRONMENT, TIDY_UP, Case, Outcome

ROOT = Path(__file__).resolve().parents[2]
MAX_WORLD_SIZE = 8
#: Seconds that the other ranks get once one has failed: long enough to see whether they fail too.
GRACE = 3.0
#: Seconds for importing torch, megatron-core and transformers once, on a busy machine.
WARM_UP_TIMEOUT = 110.0
TIDY_UP_TIMEOUT = 30.0
_OUTPUT_LINES = 80


class CaseFailed(Exception):
    """A rank did not return; the message holds each rank's traceback, stack or exit status, and its output."""


class Pool:
    """Up to eight ranks, forked when first needed from one process that has everything imported."""

    def __init__(self) -> None:
        self._zygote: _Zygote | None = None
        self._ranks: list[_Rank] = []
        self._serial = 0

    def run(
        self, target: str, world_size: int, *, timeout: float = 60.0, process_group: bool = True, **kwargs: Any
    ) -> list[Any]:
        """Run ``module:function`` on ``world_size`` ranks and return their results by rank.

        Args:
            target: ``package.module:function``; imported in the ranks, so it must be a module, not a test's local.
            world_size: 1 to 8.
            timeout: seconds until the ranks that have not answered count as stuck.
            process_group: initialise the default gloo group first; switch off for code that does so itself (from the
                environment: ``MASTER_ADDR`` and ``MASTER_PORT`` are set).
            kwargs: passed to the function, pickled.

        Raises:
            CaseFailed: a rank raised, died, was late or leaked.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size is {world_size}; the pool has 1 to {MAX_WORLD_SIZE} ranks")
        try:
            zygote = self._started(world_size)
            self._serial += 1
            store = zygote.folder / f"store-{self._serial}"
            port = _free_port()
            cases = [
                Case(target, kwargs, rank, world_size, str(store), port, process_group, timeout)
                for rank in range(world_size)
            ]
            return self._run(zygote, cases)
        except BaseException:
            # A case that was interrupted, by a failure or by pytest, has left its ranks anywhere.
            self._kill_ranks()
            raise

    def _run(self, zygote: _Zygote, cases: list[Case]) -> list[Any]:
        ranks = self._ranks[: len(cases)]
        deadline = time.monotonic() + cases[0].timeout
        for rank, case in zip(ranks, cases, strict=True):
            rank.send(pickle.dumps(case))
        outcomes = _collect(ranks, deadline)
        if not _all_well(ranks, outcomes):
            raise CaseFailed(
                _describe(zygote, cases[0].target, f"stuck at the deadline of {cases[0].timeout:g} s", ranks, outcomes)
            )
        for rank in ranks:
            rank.send(TIDY_UP)
        tidied = _collect(ranks, time.monotonic() + TIDY_UP_TIMEOUT)
        if not _all_well(ranks, tidied):
            raise CaseFailed(
                _describe(zygote, cases[0].target, f"did not tidy up in {TIDY_UP_TIMEOUT:g} s", ranks, tidied)
            )
        for number, rank in enumerate(ranks):
            # pytest shows it if the test fails after all.
            if output := rank.take_output():
                sys.stdout.write(f"--- rank {number}\n{output}\n")
        return [pickle.loads(outcome.result) for _, outcome in sorted(outcomes.items()) if outcome is not None]

    def _started(self, world_size: int) -> _Zygote:
        if self._zygote is None or not self._zygote.alive():
            self.close()
            self._zygote = _Zygote()
        while len(self._ranks) < world_size:
            self._ranks.append(self._zygote.fork())
        return self._zygote

    def _kill_ranks(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()
        if self._zygote is not None:
            for rank in ranks:
                self._zygote.reap(rank)

    def close(self) -> None:
        """End every process of the pool and remove its files; it starts again when next used."""
        self._kill_ranks()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


@dataclass
class _Rank:
    """This side of one forked process."""

    pid: int
    connection: Connection
    folder: Path
    exit_code: int | None = None

    def send(self, message: bytes) -> None:
        # A rank that died between cases shows up as one that hung up when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send_bytes(message)

    def take_output(self) -> str:
        """What the rank has written since it was last asked."""
        output = self.output()
        os.truncate(self.folder / "output", 0)
        return output

    def output(self) -> str:
        lines = (self.folder / "output").read_text(errors="replace").splitlines()
        cut = [f"... {len(lines) - _OUTPUT_LINES} lines left out"] if len(lines) > _OUTPUT_LINES else []
        return "\n".join(cut + lines[-_OUTPUT_LINES:])

    def kill(self) -> None:
        """End the rank and what it started, by its own process group; its id stays its own until it is reaped."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()


class _Zygote:
    """This side of the warmed process that forks the ranks."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mindspeed-llm-pool-"))
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.pool_worker", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | THREAD_ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._control.settimeout(WARM_UP_TIMEOUT)
        if self._reply() != "ready":
            self.close()
            raise RuntimeError("the pool's first process died while importing; its output is above")

    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> _Rank:
        folder = Path(tempfile.mkdtemp(prefix="rank-", dir=self.folder))
        for name in ("output", "stacks"):
            (folder / name).touch()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [f"fork {folder}".encode()], [theirs.fileno()])
        pid = int(self._reply())
        return _Rank(pid, Connection(ours.detach()), folder)

    def reap(self, rank: _Rank) -> int:
        """Wait for a rank that has been killed or has hung up; its exit status, negative for a signal."""
        if rank.exit_code is None:
            try:
                self._control.sendall(f"reap {rank.pid}".encode())
                rank.exit_code = int(self._reply())
            except (OSError, ValueError):
                # The zygote is gone; its ranks went with it.
                rank.exit_code = -signal.SIGKILL
        shutil.rmtree(rank.folder, ignore_errors=True)
        return rank.exit_code

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _reply(self) -> str:
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._control.recv(64)
            if not part:
                return ""
            answer += part
        return answer.decode().strip()


def _collect(ranks: list[_Rank], deadline: float) -> dict[int, Outcome | None]:
    """Outcomes by rank; ``None`` for one that died; a rank that is missing did not answer in time."""
    outcomes: dict[int, Outcome | None] = {}
    waiting: dict[Any, int] = {rank.connection: number for number, rank in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            number = waiting.pop(connection)
            outcome = _receive(ranks[number])
            outcomes[number] = outcome
            if outcome is None or outcome.failures:
                deadline = min(deadline, time.monotonic() + GRACE)
    return outcomes


def _all_well(ranks: list[_Rank], outcomes: Mapping[int, Outcome | None]) -> bool:
    return sum(outcome is not None and not outcome.failures for outcome in outcomes.values()) == len(ranks)


def _receive(rank: _Rank) -> Outcome | None:
    try:
        return pickle.loads(rank.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None


def _describe(
    zygote: _Zygote, target: str, when_late: str, ranks: list[_Rank], outcomes: Mapping[int, Outcome | None]
) -> str:
    """One line for each rank, then what is known of each: traceback, stack, output."""
    late = len(outcomes) < len(ranks)
    failed = any(outcome is None or outcome.failures for outcome in outcomes.values())
    why_late = f"aborted {GRACE:g} s after another rank failed" if failed else when_late
    living = {number: rank for number, rank in enumerate(ranks) if outcomes.get(number, True) is not None}
    stacks = _stacks(living) if late else {}
    headings: list[str] = []
    bodies: list[str] = []
    for number, rank in enumerate(ranks):
        output = rank.output()
        body = [f"stack:\n{stacks[number]}"] if number in stacks else []
        if number not in outcomes:
            heading = why_late
        elif (outcome := outcomes[number]) is None:
            heading, body = f"died, {_exit_status(zygote, rank)}", []
        elif outcome.failures:
            heading = outcome.failures[0].strip().splitlines()[-1]
            body = [*outcome.failures, *body]
        else:
            heading = "finished"
        if output:
            body.append(f"output:\n{output}")
        headings.append(f"  rank {number}: {heading}")
        bodies.append("\n".join([f"--- rank {number}: {heading}", *body]))
    return "\n".join([f"{target} failed on {len(ranks)} rank(s)", *headings, *bodies])


def _exit_status(zygote: _Zygote, rank: _Rank) -> str:
    # It hung up, which a rank does only by ending; the kill is for what it may have started.
    rank.kill()
    code = zygote.reap(rank)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _stacks(ranks: Mapping[int, _Rank]) -> dict[int, str]:
    """Every rank's Python stacks, printed by its own signal handler."""
    for rank in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, STACK_SIGNAL)
    stacks: dict[int, str] = {}
    limit = time.monotonic() + 2.0
    while len(stacks) < len(ranks) and time.monotonic() < limit:
        time.sleep(0.05)
        for number, rank in ranks.items():
            if text := (rank.folder / "stacks").read_text():
                stacks[number] = text
    return {number: stacks.get(number, "(none: the process does not react)") for number in ranks}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
