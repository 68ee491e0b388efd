"""A save whose ranks are killed at one of its file operations, and what the next run makes of what is left.

A rank of the pool forks itself for each trial, so that a trial costs no imports. In the forks every operation on files
that Python makes (open, write, fsync, rename, unlink, mkdir, rmdir) is counted; at the chosen one the process sends
itself SIGKILL, before the operation, after it, or with half of a write on the disk.
"""

from __future__ import annotations

import builtins
import io
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_llm.checkpoint import mcore_io
from mindspeed_llm.checkpoint.folders import (
    complete_iterations,
    iteration_folder,
    latest_iteration,
    require_save,
    retire,
    retired_folder,
)
from mindspeed_llm.checkpoint.saving import begin
from mindspeed_llm.errors import CheckpointError

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

#: Seconds that a rank waits for one that is gone.
PATIENCE = 5.0
#: Seconds after which a rank counts as hung.
DEADLINE = 40.0
ROWS = 1024


@dataclass(frozen=True)
class Scenario:
    """What was saved before, and the save that is killed.

    Attributes:
        before: iterations that are saved, in this order.
        iteration: the one that is killed.
        limit: ``--save-total-limit``.
        background: whether it is an asynchronous save.
        half_replaced: the save before the killed one ended between the two renames that replace an earlier one.
    """

    before: tuple[int, ...]
    iteration: int
    limit: int | None = None
    background: bool = False
    half_replaced: bool = False


SCENARIOS = {
    "first": Scenario((), 1),
    "next": Scenario((1,), 2),
    "next, in the background": Scenario((1,), 2, background=True),
    "next, and the one before goes": Scenario((1,), 2, limit=1),
    "same again": Scenario((1, 2), 2),
    "same again, half replaced": Scenario((1, 2), 2, limit=1, half_replaced=True),
    "random": Scenario((1, 2), 2, limit=2),
}


@dataclass(frozen=True)
class Kill:
    """Rank ``rank`` dies at its operation ``number`` (from 0): ``before``, ``after`` or, of a write, ``amid``."""

    rank: int
    number: int
    when: str


@dataclass
class Trial:
    """What came of one kill."""

    operation: str
    fault: str | None
    """None: the earlier or the new save was found, whole, and the next one succeeded."""
    found: int | None
    """Which attempt was found, counted from 1; 0 is none."""


# ------------------------------------------------------------------------------------------------- what is saved


def state(attempt: int, *, blank: bool = False) -> dict[str, Any]:
    """A sharded state with a part of this rank, one that all ranks have, an object of each and a common value."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4) + 1000 * attempt + 100 * rank
    alike = torch.full((5,), float(attempt))
    if blank:
        own, alike = torch.zeros_like(own), torch.zeros_like(alike)
    return {
        "own": ShardedTensor.from_rank_offsets("own", own, (0, rank, world)),
        "alike": ShardedTensor.from_rank_offsets("alike", alike, replica_id=rank),
        "object": ShardedObject("object", None if blank else {"attempt": attempt}, (world,), (rank,)),
        "attempt": attempt,
    }


def save(root: Path, iteration: int, attempt: int, limit: int | None = None, background: bool = False) -> None:
    """As ``training.save_load.Saver`` does."""
    under_way = begin(root, iteration, state(attempt), {}, background=background)
    under_way.finish(lambda: retire(root, iteration, limit=limit, every=None))


def load(root: Path, iteration: int) -> int:
    """Which attempt the save of ``iteration`` holds, in all its parts and on this rank."""
    folder = require_save(root, iteration)
    loaded = mcore_io.load(folder, state(0, blank=True))
    attempt = loaded["attempt"]
    wanted = state(attempt)
    assert torch.equal(loaded["own"], wanted["own"].data), "own differs"
    assert torch.equal(loaded["alike"], wanted["alike"].data), "alike differs"
    assert loaded["object"] == {"attempt": attempt}, "object differs"
    return attempt


# ------------------------------------------------------------------------------------------------------ the killing


class Trap:
    """Counts this process's file operations, and ends it at one of them."""

    def __init__(self, kill: Kill | None, log: Path | None = None) -> None:
        self.kill = kill
        self.log = log
        self.count = 0

    def meet(self, name: str, act: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Do one operation, or die at it."""
        number, self.count = self.count, self.count + 1
        if self.log is not None:
            with _open(self.log, "a") as file:
                file.write(name + "\n")
        when = self.kill.when if self.kill is not None and number == self.kill.number else None
        if when == "before":
            _die()
        if when == "amid" and half is not None:
            half()
            _die()
        try:
            return act()
        finally:
            # Also of one that fails, as of a folder that is there already.
            if when == "after":
                _die()


class _Counted(io.FileIO):
    """A file whose writes are operations: those that reach the system, from the buffer above it."""

    trap: Trap

    def write(self, data: Any, /) -> int | None:
        view, name = memoryview(data), f"write {Path(os.fsdecode(self.name)).name}"
        write = super().write
        return self.trap.meet(name, lambda: write(view), lambda: write(view[: len(view) // 2]))


_open = builtins.open


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def set_trap(trap: Trap) -> None:
    """Replace Python's file operations in this process, for good."""

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode not in ("w", "wb", "x", "xb", "a", "ab"):
            return _open(path, mode, *args, **kwargs)
        raw = trap.meet(f"open {Path(path).name}", lambda: _Counted(path, mode[0]))
        raw.trap = trap
        file = io.BufferedWriter(raw)
        return file if "b" in mode else io.TextIOWrapper(file)

    builtins.open = io.open = opened  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir"):
        original = getattr(os, name)

        def counted(target: Any, *args: Any, _name: str = name, _act: Any = original, **kwargs: Any) -> Any:
            shown = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fsdecode(target)
            return trap.meet(f"{_name} {Path(shown).name}", lambda: _act(target, *args, **kwargs))

        setattr(os, name, counted)


# ----------------------------------------------------------------------------------------------------------- trials


class Bench:
    """Trials of one scenario on ``world`` ranks, forked from this process."""

    def __init__(self, place: Path, scenario: Scenario, world: int) -> None:
        self.place, self.scenario, self.world = place, scenario, world
        self.origin = place / "origin"
        self.root = place / "root"
        self.origin.mkdir(parents=True)
        self._serial = 0
        self._forked(lambda: [save(self.origin, i, n) for n, i in enumerate(scenario.before, start=1)])
        if scenario.half_replaced:
            folder = iteration_folder(self.origin, scenario.iteration)
            folder.rename(retired_folder(self.origin, scenario.iteration))
        self.attempt = len(scenario.before) + 1

    def operations(self) -> list[list[str]]:
        """Per rank the operations of the save when nobody is killed."""
        self._reset()
        logs = [self.place / f"operations-{rank}" for rank in range(self.world)]
        for log in logs:
            log.unlink(missing_ok=True)
        self._forked(lambda: self._killed_save(None, logs[dist.get_rank()]))
        return [log.read_text().splitlines() for log in logs]

    def trial(self, kill: Kill, operation: str) -> Trial:
        """Kill, then resume."""
        self._reset()
        fault = self._judge(self._fork(lambda: self._killed_save(kill)), kill)
        found = None
        if fault is None:
            found, fault = self._resume()
        return Trial(operation, fault, found)

    def chain(self, draw: random.Random, rounds: int) -> list[Trial]:
        """Runs that are killed one after the other, each going on from what the last one left."""
        self._reset()
        longest = max(len(names) for names in self.operations())
        self._reset()
        trials: list[Trial] = []
        allowed = {self.attempt - 1}
        for attempt in range(self.attempt, self.attempt + rounds):
            kill = Kill(draw.randrange(self.world), draw.randrange(longest), draw.choice(("before", "amid", "after")))
            again = draw.random() < 0.5
            codes = self._fork(lambda kill=kill, again=again, attempt=attempt: self._go_on(kill, again, attempt))
            found, fault = self._found(allowed)
            if None in codes:
                fault = f"ranks hung: {codes}"
            trials.append(Trial(str(kill), fault, found))
            if fault is not None:
                break
            allowed = {found or 0, attempt} if any(codes) else {attempt}
        return trials

    def _go_on(self, kill: Kill, again: bool, attempt: int) -> None:
        """A run that takes up the newest save, and is killed in its next one, perhaps of the same iteration."""
        newest = latest_iteration(self.root) or 0
        self._answer(load(self.root, newest) if newest else 0)
        for iteration in complete_iterations(self.root):
            load(self.root, iteration)
        dist.barrier()
        set_trap(Trap(kill if kill.rank == dist.get_rank() else None))
        save(self.root, max(newest, 1) if again else newest + 1, attempt, self.scenario.limit)

    def _reset(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.origin, self.root)

    def _killed_save(self, kill: Kill | None, log: Path | None = None) -> None:
        mine = kill is not None and kill.rank == dist.get_rank()
        set_trap(Trap(kill if mine else None, log))
        save(self.root, self.scenario.iteration, self.attempt, self.scenario.limit, self.scenario.background)

    def _judge(self, codes: list[int | None], kill: Kill) -> str | None:
        if codes[kill.rank] != -signal.SIGKILL:
            return f"rank {kill.rank} was not killed but ended with {codes[kill.rank]}: {self._said(kill.rank)}"
        for rank, code in enumerate(codes):
            if code in (None, 0):
                return f"rank {rank} {'hung' if code is None else 'saw nothing'} when rank {kill.rank} was killed"
        return None

    def _resume(self) -> tuple[int | None, str | None]:
        """The attempt that the next run finds, and what is wrong."""
        if self.scenario.before and not complete_iterations(self.root):
            return None, f"no complete save is left: {sorted(path.name for path in self.root.iterdir())}"
        codes = self._fork(self._go_on_and_save)
        if any(codes):
            return None, "; ".join(f"rank {rank}: {self._said(rank)}" for rank, code in enumerate(codes) if code != 0)
        return self._found({self.attempt, self.attempt - 1})

    def _go_on_and_save(self) -> None:
        """A run that takes up the newest save, and then saves twice."""
        limit, newest = self.scenario.limit, latest_iteration(self.root)
        self._answer(0 if newest is None else load(self.root, newest))
        # What else is kept is whole too.
        for iteration in complete_iterations(self.root):
            load(self.root, iteration)
        dist.barrier()
        for iteration in (self.scenario.iteration, self.scenario.iteration + 1):
            save(self.root, iteration, 100 + iteration, limit, self.scenario.background)
            dist.barrier()
            assert latest_iteration(self.root) == iteration, "the next save is not the newest"
            assert load(self.root, iteration) == 100 + iteration, "the next save holds something else"
            kept = complete_iterations(self.root)
            assert limit is None or (len(kept) == limit and kept[-1] == iteration), f"kept {kept}"
            dist.barrier()
        left = [path.name for path in self.root.iterdir() if path.suffix in (".tmp", ".removed", ".replaced")]
        assert not left, f"left over: {left}"

    def _answer(self, attempt: int) -> None:
        """Tell the first process which attempt this rank has found."""
        (self.place / f"found-{dist.get_rank()}").write_text(str(attempt))

    def _found(self, allowed: set[int]) -> tuple[int | None, str | None]:
        found = {(self.place / f"found-{rank}").read_text() for rank in range(self.world)}
        if len(found) > 1 or not found <= {str(attempt) for attempt in allowed}:
            return None, f"attempts {found} were found, allowed: {allowed}; {self._said(0)}"
        return int(found.pop()), None

    def _said(self, rank: int) -> str:
        return (self.place / f"error-{rank}").read_text()[-1500:]

    def _forked(self, work: Callable[[], Any]) -> None:
        codes = self._fork(work)
        assert not any(codes), [self._said(rank) for rank in range(self.world)]

    def _fork(self, work: Callable[[], Any]) -> list[int | None]:
        """Run ``work`` in new ranks; exit statuses, None for one that had to be ended."""
        self._serial += 1
        store = str(self.place / f"store-{self._serial}")
        children = [self._child(rank, store, work) for rank in range(self.world)]
        codes: dict[int, int | None] = {}
        end = time.monotonic() + DEADLINE
        while len(codes) < self.world:
            for rank, pid in enumerate(children):
                if rank in codes:
                    continue
                late = time.monotonic() > end
                if late:
                    os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if done:
                    codes[rank] = None if late else os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        return [codes[rank] for rank in range(self.world)]

    def _child(self, rank: int, store: str, work: Callable[[], Any]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        said = self.place / f"error-{rank}"
        try:
            said.write_text("")
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, self.world),
                rank=rank,
                world_size=self.world,
                timeout=timedelta(seconds=PATIENCE),
            )
            work()
            code = 0
        except BaseException:
            text = traceback.format_exc()
            with _open(said, "w") as file:
                file.write(text)
        finally:
            os._exit(code)


def kills(operations: list[list[str]], after: bool) -> Iterator[tuple[Kill, str]]:
    """All that there are: before each operation of each rank, amid each write, and ``after`` each operation."""
    for rank, names in enumerate(operations):
        for number, name in enumerate(names):
            yield Kill(rank, number, "before"), f"before {name} on rank {rank}"
            if name.startswith("write "):
                yield Kill(rank, number, "amid"), f"amid {name} on rank {rank}"
            if after or number == len(names) - 1:
                yield Kill(rank, number, "after"), f"after {name} on rank {rank}"


def sweep(
    folder: str, name: str, world: int, *, part: int = 0, of: int = 1, after: bool = True, publishing: bool = False
) -> list[Trial]:
    """Every ``of``-th kill of scenario ``name`` from ``part`` on.

    Args:
        after: whether to kill after an operation too, and not only before the next one, which leaves the same files.
        publishing: leave out the operations before the first rename in the folder of saves.
    """
    bench = Bench(Path(folder), SCENARIOS[name], world)
    operations = bench.operations()
    visible = next(number for number, name in enumerate(operations[0]) if name.startswith("rename iter_"))
    chosen = [
        (kill, operation)
        for kill, operation in kills(operations, after)
        if not publishing or (kill.rank == 0 and kill.number >= visible)
    ]
    return [bench.trial(kill, operation) for kill, operation in chosen[part::of]]


def chain(folder: str, world: int, *, seed: int, rounds: int) -> list[Trial]:
    """``rounds`` runs in a row, each killed at a random operation of its save."""
    return Bench(Path(folder), SCENARIOS["random"], world).chain(random.Random(seed), rounds)


# --------------------------------------------------------------------------------------------- other states of a folder


def save_twice(root: str) -> None:
    """Iterations 1 and 2 by attempts of the same numbers."""
    for iteration in (1, 2):
        save(Path(root), iteration, iteration)


def take_up(root: str, step: int | None = None) -> int | str:
    """The attempt that this rank finds, or its error; ``step`` as ``--ckpt-step``."""
    try:
        newest = latest_iteration(Path(root)) if step is None else step
        return load(Path(root), newest or 0)
    except CheckpointError as error:
        return str(error)


def save_and_retire(root: str, iteration: int, limit: int) -> None:
    """One save, under ``--save-total-limit``."""
    save(Path(root), iteration, iteration, limit)
