"""Starts the processes of a side, and says which of them it was that failed or stood still."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import SuiteError

STACK_SIGNAL = signal.SIGUSR1
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_GRACE = 5.0
"""Seconds that the others get once one has failed, so that their own word is heard."""
_LOOK = 0.05
_LOG_LINES = 12
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_WAITS = re.compile(r"/torch/distributed/|/megatron/core/pipeline_parallel/p2p")
_LIBRARY = re.compile(r"/(torch|threading\.py)")


def log_file(folder: Path, rank: int) -> Path:
    """What a rank wrote."""
    return folder / f"log-{rank}"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its stack on :data:`STACK_SIGNAL`."""
    return folder / f"stack-{rank}"


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]


def launch(command: Sequence[str], world: int, folder: Path, *, what: str, timeout: float) -> None:
    """Run ``command`` in ``world`` processes on this machine, with ``RANK`` and ``WORLD_SIZE``, and wait for them.

    Args:
        command: arguments after the interpreter.
        world: number of processes.
        folder: gets their logs.
        what: what runs, for errors.
        timeout: seconds.

    Raises:
        SuiteError: a rank failed, or did not end in time; it says which, and what it was at.
    """
    ranks = [_Rank(number, _start(command, number, world, folder)) for number in range(world)]
    try:
        failed = _wait(ranks, time.monotonic() + timeout)
        if failed:
            shown = "\n".join(f"rank {rank.number}: {_tail(folder, rank.number)}" for rank in failed)
            raise SuiteError(f"{what}: {len(failed)} of {world} processes failed\n{shown}")
        late = [rank for rank in ranks if rank.process.poll() is None]
        if late:
            raise SuiteError(
                f"{what} did not end in {timeout:g} s\n" + "\n".join(_where(late, folder)),
                fix="a longer --timeout, if it only was slow",
            )
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()


def _start(command: Sequence[str], rank: int, world: int, folder: Path) -> subprocess.Popen[bytes]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    with log_file(folder, rank).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            env=THREADS | dict(os.environ) | place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(ranks: Sequence[_Rank], deadline: float) -> list[_Rank]:
    """Until all ended, or some failed and the others had their time, or the deadline: those that failed."""
    while True:
        codes = [rank.process.poll() for rank in ranks]
        failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
        if None not in codes or time.monotonic() > deadline:
            return failed
        if failed:
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(_LOOK)


def _tail(folder: Path, rank: int) -> str:
    lines = log_file(folder, rank).read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-_LOG_LINES:]) or "no output"


def _where(late: Sequence[_Rank], folder: Path) -> list[str]:
    """A line for each rank: whether it waits for others or is itself stuck, in which function, after which module."""
    for rank in late:
        rank.process.send_signal(STACK_SIGNAL)
    time.sleep(0.5)
    lines = []
    for rank in late:
        path = stack_file(folder, rank.number)
        frames = _FRAME.findall(path.read_text() if path.exists() else "")
        waits = any(_WAITS.search(file) for file, _, _ in frames[:4])
        own = next((frame for frame in frames if not _LIBRARY.search(frame[0])), None)
        place = f"{own[2]} ({own[0]}:{own[1]})" if own else "an unknown place: it wrote no stack"
        progress = folder / f"progress-{rank.number}"
        seen = progress.read_text().strip() if progress.exists() else ""
        after = f", after {seen}" if seen else ", before the first module"
        lines.append(f"rank {rank.number} {'waits for others' if waits else 'is stuck'} in {place}{after}")
    return lines
