"""Runs of ``pretrain_gpt.py`` in which one rank fails: a process that imports once, and forks the ranks of each case.

    python -m tests.distributed.failing < cases.json > results.json

A case is one run: the command line of its ranks, and on one of them a fault at a place. Cases run at once, those in
which a rank is stopped after the others: these spend their time waiting.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mindspeed_llm.training.pretrain  # noqa: F401  once, for all ranks
from mindspeed_llm.cli import pretrain as command_line
from mindspeed_llm.data import raw
from mindspeed_llm.errors import DataError
from mindspeed_llm.training import failure, loop

STEP = 2
"""In which the faults happen."""


@dataclass
class Case:
    """One run.

    Attributes:
        name: in the results.
        fault: ``raise``, ``refuse`` (an error that a user can mend), ``kill``, ``stop``, ``term``, or ``leave``: the
            signal that asks for a save and an orderly end.
        place: ``forward``, ``collective``, ``prepare``, or a phase, at whose beginning it happens.
        rank: that fails; in ``prepare`` it is the one that prepares, whichever that is.
        argv: the command line.
        folder: for what the ranks write to stdout and stderr.
        world: number of ranks.
        deadline: seconds, after which all are killed.
    """

    name: str
    fault: str
    place: str
    rank: int | None
    argv: list[str]
    folder: str
    world: int = 2
    deadline: float = 60.0


@dataclass
class Result:
    """What became of the ranks: exit status (negative for a signal, None for one that had to be killed), stderr."""

    name: str
    codes: list[int | None]
    errors: list[str] = field(default_factory=list)


class Complaining:
    """Says something when it is let go, as an iterator over data workers may."""

    def __del__(self) -> None:
        raise ValueError("nobody listens any more")


def fail_by(fault: str) -> None:
    """The fault."""
    held = Complaining() if fault == "raise" else None
    if held is not None:
        raise RuntimeError("a fault that nobody foresaw\nwith a second line")
    if fault == "refuse":
        raise DataError("the file of this rank is damaged", got="corpus.bin", fix="another file")
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "leave": signal.SIGUSR1}[fault]
    os.kill(os.getpid(), number)


def inject(case: Case, rank: int) -> None:
    """Change this process so that its run fails; on other ranks only such that the place is reached."""
    if case.place == "forward":
        _at(loop, "train_step", rank == case.rank, lambda: _in_objective(case))
    elif case.place == "collective":
        _at(loop, "train_step", True, lambda: _in_collective(case, rank))
    elif case.place == "prepare":
        _at(raw, "prepare", True, lambda: _once(case), step=0)
    elif rank == case.rank:
        move = failure.Position.move

        def moving(self: failure.Position, phase: str, **more: Any) -> None:
            move(self, phase, **more)
            if phase == case.place and self.step == STEP:
                fail_by(case.fault)

        failure.Position.move = moving


def _at(module: Any, name: str, here: bool, act: Callable[[], None], step: int = STEP) -> None:
    """Have ``act`` called before the function, in step ``step``."""
    function = getattr(module, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        if here and failure.HERE.step == step:
            act()
        return function(*args, **kwargs)

    setattr(module, name, called)


def _once(case: Case) -> None:
    """Who takes the preparation over is spared."""
    try:
        Path(case.folder, f"{case.name}.begun").touch(exist_ok=False)
    except FileExistsError:
        return
    fail_by(case.fault)


def _in_objective(case: Case) -> None:
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        GPTModel.forward = forward
        fail_by(case.fault)
        return forward(*args, **kwargs)

    GPTModel.forward = failing


def _in_collective(case: Case, rank: int) -> None:
    """The failing rank waits in an all-reduce, since the others come late, and then it fails."""
    all_reduce = dist.all_reduce

    def reducing(*args: Any, **kwargs: Any) -> Any:
        dist.all_reduce = all_reduce
        if rank == case.rank:
            threading.Timer(0.5, lambda: fail_by(case.fault)).start()
        else:
            time.sleep(1.0)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = reducing


def _become_rank(case: Case, rank: int, port: int) -> None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(case.folder, f"{case.name}.{rank}.{name}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["pretrain_gpt.py", *case.argv]
    inject(case, rank)
    os._exit(command_line.main())


def _start(case: Case) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[int] = []
    for rank in range(case.world):
        child = os.fork()
        if child == 0:
            try:
                _become_rank(case, rank, port)
            finally:
                os._exit(99)
        ranks.append(child)
    return ranks


class Running:
    """The ranks of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.children = _start(case)
        self.codes: dict[int, int | None] = {}

    def look(self, late: bool) -> bool:
        """Whether all have ended; the last one, if it was stopped, goes on when the others are gone."""
        for rank, child in enumerate(self.children):
            if rank not in self.codes and (ended := os.waitpid(child, os.WNOHANG))[0]:
                self.codes[rank] = os.waitstatus_to_exitcode(ended[1])
        left = set(range(self.case.world)) - set(self.codes)
        if self.case.fault == "stop" and len(left) == 1:
            os.kill(self.children[min(left)], signal.SIGCONT)
        if late:
            for rank in left:
                os.kill(self.children[rank], signal.SIGKILL)
                os.waitpid(self.children[rank], 0)
                self.codes[rank] = None
        return late or not left

    def result(self) -> Result:
        """What became of them."""
        ranks = range(self.case.world)
        errors = [Path(self.case.folder, f"{self.case.name}.{rank}.err").read_text() for rank in ranks]
        return Result(self.case.name, [self.codes[rank] for rank in ranks], errors)


def run(cases: list[Case]) -> list[Result]:
    """All of them at once."""
    running = [Running(case) for case in cases]
    since, left = time.monotonic(), list(running)
    while left:
        time.sleep(0.05)
        left = [case for case in left if not case.look(late=time.monotonic() - since > case.case.deadline)]
    return [case.result() for case in running]


def main() -> None:
    """Run the cases of stdin."""
    cases = [Case(**case) for case in json.load(sys.stdin)]
    stops = [case for case in cases if case.fault == "stop"]
    results = run([case for case in cases if case not in stops]) + run(stops)
    json.dump([asdict(result) for result in results], sys.stdout)


if __name__ == "__main__":
    main()
