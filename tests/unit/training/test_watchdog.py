"""What ends a process that stands still or is told to end: each case is a forked process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mindspeed_llm.training import watchdog
from mindspeed_llm.training.failure import HERE, phase, read_record, write_error
from mindspeed_llm.training.watchdog import Ended, Watchdog, last_collective

LIMIT = 0.4


def begin(folder: Path, body: Callable[[Watchdog], Any], limit: float = LIMIT, **environ: str) -> int:
    """A process that runs ``body`` under a watchdog."""
    child = os.fork()
    if child:
        return child
    try:
        file = os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        with Watchdog(limit, str(folder), environ) as watchdog:
            try:
                body(watchdog)
            except BaseException as error:
                os._exit(watchdog.fail(error, "what it says\n"))
        os._exit(0)
    finally:
        os._exit(99)


def ended(tmp_path: Path, body: Callable[[Watchdog], Any], limit: float = LIMIT, **environ: str) -> tuple[int, str]:
    """Exit status and stderr of such a process."""
    _, status = os.waitpid(begin(tmp_path, body, limit, **environ), 0)
    return os.waitstatus_to_exitcode(status), (tmp_path / "stderr").read_text()


def stand_still(_: Watchdog) -> None:
    with phase("optimizer", step=5):
        threading.Event().wait()


def test_a_process_that_stands_still_ends_with_its_stacks(tmp_path: Path) -> None:
    code, said = ended(tmp_path, stand_still, RANK="2")
    assert code == 1
    assert "where its threads are" in said
    assert "in stand_still" in said
    assert said.splitlines()[-1].startswith("FATAL rank=2 ")
    (entry,) = read_record(tmp_path)
    assert (entry["rank"], entry["step"], entry["phase"]) == (2, 5, "optimizer")
    assert entry["cause"].startswith("no progress for 0.")


def busy(_: Watchdog) -> None:
    """Never long at one line, though in one phase."""
    limit = time.monotonic() + 3 * LIMIT
    while time.monotonic() < limit:
        sum(range(50))
        len(str(time.monotonic()))


def steps(_: Watchdog) -> None:
    """Always at one line when somebody looks, but from step to step."""
    for step in range(12):
        HERE.move("train", step=step)
        time.sleep(LIMIT / 4)


def patient(_: Watchdog) -> None:
    with phase("data", patient=True):
        time.sleep(3 * LIMIT)


def stopped(_: Watchdog) -> None:
    """Seconds in which it was stopped do not count."""
    subprocess.Popen(["/bin/sh", "-c", f"sleep {3 * LIMIT}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_process_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    """All at once, since they take their time."""
    children = {}
    for body in (busy, steps, patient, stopped):
        (tmp_path / body.__name__).mkdir()
        children[body.__name__] = begin(tmp_path / body.__name__, body)
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}
    assert codes == dict.fromkeys(children, 0)
    assert [name for name in children if (tmp_path / name / "stderr").read_text()] == []


@pytest.mark.parametrize(("number", "why"), [(signal.SIGTERM, "told to end"), (signal.SIGINT, "interrupted")])
def test_a_signal_unwinds_and_tells_no_other_cause(tmp_path: Path, number: int, why: str) -> None:
    def body(_: Watchdog) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(30)
        finally:
            (tmp_path / "unwound").touch()

    code, said = ended(tmp_path, body, limit=60)
    assert code == 128 + number
    assert (tmp_path / "unwound").exists()
    (line,) = said.splitlines()
    assert f"cause={signal.Signals(number).name}: {why}" in line


def test_a_signal_does_not_interrupt_what_is_being_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher ends the others once one rank is dead: then they are just saying that they lost it."""

    def interrupted(text: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write_error(text)

    def body(_: Watchdog) -> None:
        monkeypatch.setattr(watchdog, "write_error", interrupted)
        raise RuntimeError("the peer is gone")

    code, said = ended(tmp_path, body, limit=60)
    assert code == 1
    assert said.splitlines()[0] == "what it says"
    assert said.splitlines()[-1].endswith("cause=RuntimeError: the peer is gone")
    assert [entry["cause"] for entry in read_record(tmp_path)] == ["RuntimeError: the peer is gone"]


def test_what_a_signal_breaks_is_not_the_cause(tmp_path: Path) -> None:
    def body(_: Watchdog) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        except Ended as error:
            raise ConnectionResetError("a reader of data is gone") from error

    code, said = ended(tmp_path, body, limit=60)
    assert code == 128 + signal.SIGTERM
    (line,) = said.splitlines()
    assert "cause=SIGTERM" in line


def test_what_it_has_started_says_nothing_after_it(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def outlive(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(0.01)
        os.write(2, b"I have lost whom I was talking to\n")

    def body(_: Watchdog) -> None:
        context = multiprocessing.get_context("fork")
        context.Process(target=outlive, args=(os.getpid(),), daemon=True).start()
        raise RuntimeError("a fault")

    code, _ = ended(tmp_path, body, limit=60)
    assert code == 1
    os.close(writer)
    # Nobody else holds it any more.
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert "cause=RuntimeError: a fault" in (tmp_path / "stderr").read_text().splitlines()[-1]


@contextmanager
def cannot_unwind() -> Iterator[None]:
    """As a wait in C++, which no exception can end."""
    try:
        yield
    except Ended:
        threading.Event().wait()


def test_a_signal_ends_a_process_that_cannot_unwind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_SECONDS_TO_UNWIND", 0.3)

    def body(_: Watchdog) -> None:
        with phase("train", step=3), cannot_unwind():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    code, said = ended(tmp_path, body, limit=60)
    assert code == 128 + signal.SIGTERM
    assert "step=3 phase=train cause=SIGTERM" in said.splitlines()[-1]


def test_a_handler_of_others_is_theirs(tmp_path: Path) -> None:
    def body(_: Watchdog) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)

    assert ended(tmp_path, body, limit=60) == (0, "")


def test_a_child_that_is_ended_does_not_end_its_parent(tmp_path: Path) -> None:
    def body(_: Watchdog) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(30)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.2)

    assert ended(tmp_path, body, limit=60) == (0, "")


def test_a_process_whose_launcher_is_gone_ends(tmp_path: Path) -> None:
    def body(watchdog: Watchdog) -> None:
        watchdog._parent += 1
        time.sleep(30)

    code, said = ended(tmp_path, body, limit=1, TORCHELASTIC_RUN_ID="x")
    assert code == 1
    assert "is gone" in said.splitlines()[-1]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Watchdog(60, None, {}):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_last_collective_is_named(tmp_path: Path) -> None:
    import torch

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3, 2))
        limit = time.monotonic() + 10
        # gloo's thread marks the end, perhaps after the caller has gone on.
        while (said := last_collective()).endswith("not ended") and time.monotonic() < limit:
            time.sleep(0.01)
    finally:
        dist.destroy_process_group()
    assert said.startswith("gloo:all_reduce number ")
    assert said.endswith(" of group default_pg, sizes [[3, 2]], ended")
