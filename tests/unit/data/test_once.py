"""One of many processes makes the folder: races, dead and stalled makers, failures. Clocks decide nothing here but when
a waiter looks again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.data import once as module
from mindspeed_llm.data.once import Pace, once
from mindspeed_llm.errors import DataError
from mindspeed_llm.processes import system

FORK = multiprocessing.get_context("fork")
#: Nobody who lives is taken for dead, however busy the machine.
PACE = Pace(beat=0.01, stale=1000.0)
HASTY = Pace(beat=0.01, stale=0.1)


def made(folder: Path) -> str:
    return (folder / "by").read_text()


def maker(name: str, log: Path | None = None) -> Callable[[Path], None]:
    def make(partial: Path) -> None:
        if log is not None:
            with open(log, "a") as stream:
                stream.write(f"{name}\n")
        (partial / "by").write_text(name)

    return make


def in_process(target: Callable[..., object], *args: Any) -> BaseProcess:
    process = FORK.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def race(folder: Path, log: Path, ranks: int = 6) -> list[tuple[int, bool, str]]:
    """What ``(number, made here, by whom)`` the ranks say, that all look for locks before any takes one.

    Whoever makes the folder goes on when every other rank waits, or makes it as well.
    """
    barrier, arrived, results = FORK.Barrier(ranks), FORK.Value("i", 0), FORK.SimpleQueue()
    look, sleep = module._lock_numbers, time.sleep

    def arrive() -> None:
        with arrived.get_lock():
            arrived.value += 1

    def first_look(place: Path) -> list[int]:
        module._lock_numbers = look
        found = look(place)
        barrier.wait()
        return found

    def first_sleep(seconds: float) -> None:
        module.time.sleep = sleep
        arrive()

    def rank(number: int) -> None:
        def make(partial: Path) -> None:
            module.time.sleep = sleep
            arrive()
            until(lambda: arrived.value == ranks)
            maker(str(number), log)(partial)

        module._lock_numbers, module.time.sleep = first_look, first_sleep
        results.put((number, once(folder, make, PACE), made(folder)))

    processes = [in_process(rank, number) for number in range(ranks)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks
    return sorted(results.get() for _ in range(ranks))


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path != folder and path.name.startswith(folder.name))


def write_lock(folder: Path, number: int = 0, **content: Any) -> None:
    folder.parent.mkdir(exist_ok=True)
    elsewhere = {"host": "elsewhere", "system": "another", "pid": 1, "started": "1", "beats": 1, "error": None}
    Path(f"{folder}.lock{number}").write_text(json.dumps({**elsewhere, **content}))


def test_of_many_at_once_one_makes(tmp_path: Path) -> None:
    folder, log = tmp_path / "new" / "x", tmp_path / "log"
    results = race(folder, log)
    (winner,) = log.read_text().split()
    assert results == [(n, str(n) == winner, winner) for n in range(6)]
    assert leftovers(folder) == []


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    assert not once(folder, lambda _: pytest.fail("made again"), PACE)


def test_one_that_finishes_between_look_and_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, look = tmp_path / "x", module._lock_numbers

    def late(place: Path) -> list[int]:
        found = look(place)
        folder.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(module, "_lock_numbers", late)
    assert not once(folder, lambda _: pytest.fail("made again"), PACE)
    assert leftovers(folder) == []


def test_a_failure_reaches_those_who_wait_and_not_those_who_come_later(tmp_path: Path) -> None:
    folder, error = tmp_path / "x", DataError("No good.", got=3, allowed="more", fix="--flag")
    waiting, results = FORK.Semaphore(0), FORK.SimpleQueue()

    def waiter() -> None:
        sleep = time.sleep

        def first_sleep(seconds: float) -> None:
            module.time.sleep = sleep
            waiting.release()

        module.time.sleep = first_sleep
        try:
            once(folder, maker("waiter"), PACE)
        except DataError as told:
            results.put(str(told))

    def make(partial: Path) -> None:
        (partial / "half").write_text("half")
        ranks.extend(in_process(waiter) for _ in range(3))
        for _ in range(3):
            waiting.acquire()
        raise error

    ranks: list[BaseProcess] = []
    with pytest.raises(DataError) as raised:
        once(folder, make, PACE)
    assert raised.value is error
    for process in ranks:
        process.join()
    assert [results.get() for _ in ranks] == [str(error)] * 3
    assert leftovers(folder) == ["x.lock0"]
    assert once(folder, maker("again"), PACE)
    assert (made(folder), leftovers(folder)) == ("again", [])


def test_a_fault_of_ours_is_told_too(tmp_path: Path) -> None:
    def make(partial: Path) -> None:
        raise KeyError("boo")

    with pytest.raises(KeyError):
        once(tmp_path / "x", make, PACE)
    error = json.loads((tmp_path / "x.lock0").read_text())["error"]
    assert (error["what"], error["got"]) == ("The preparation failed: KeyError.", "'boo'")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_maker_that_is_ended_leaves_nothing_whole_and_nothing_to_wait_for(tmp_path: Path, how: int) -> None:
    folder = tmp_path / "x"

    def endless(partial: Path) -> None:
        (partial / "by").write_text("half")
        threading.Event().wait()

    process = in_process(once, folder, endless, PACE)
    until(lambda: (tmp_path / "x.partial0" / "by").exists())
    os.kill(process.pid or 0, how)
    process.join()
    assert not folder.exists()
    # Killed, it leaves its things; asked to end, it does not.
    assert leftovers(folder) == (["x.lock0", "x.partial0"] if how == signal.SIGKILL else [])
    assert process.exitcode == (-how if how == signal.SIGKILL else 128 + how)
    # The waiter would wait 1000 s for a heartbeat, but it sees that the process is no more.
    assert once(folder, maker("again"), PACE)
    assert (made(folder), leftovers(folder)) == ("again", [])


def test_a_silent_lock_of_another_node_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    write_lock(folder, 3)
    Path(f"{folder}.partial3").mkdir()
    # However new its time of change says that it is: the waiter's own clock counts.
    future = time.time() + 1e6
    os.utime(f"{folder}.lock3", (future, future))
    assert once(folder, maker("we"), HASTY)
    assert (made(folder), leftovers(folder)) == ("we", [])


def test_of_many_that_see_a_dead_one_one_takes_over(tmp_path: Path) -> None:
    folder, log = tmp_path / "x", tmp_path / "log"
    dead = in_process(int)
    dead.join()
    write_lock(folder, system=system(), pid=dead.pid)
    results = race(folder, log)
    (winner,) = log.read_text().split()
    assert results == [(n, str(n) == winner, winner) for n in range(6)]
    assert leftovers(folder) == []


def test_a_beating_lock_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "x"
    write_lock(folder)
    clock = 0.0
    looks = 0

    def sleep(_: float) -> None:
        # 59 s between two heartbeats of another node, whose clock nobody asks; at last it has finished.
        nonlocal clock, looks
        clock, looks = clock + 59, looks + 1
        write_lock(folder, beats=looks)
        if looks == 50:
            folder.mkdir()
            (folder / "by").write_text("other node")

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock)
    assert not once(folder, maker("we"), Pace())
    assert (looks, made(folder)) == (50, "other node")


def test_who_was_given_up_finds_that_another_has_finished(tmp_path: Path) -> None:
    folder = tmp_path / "x"

    def stalled(partial: Path) -> None:
        (partial / "by").write_text("late")
        # Meanwhile somebody took over and finished.
        folder.mkdir()
        (folder / "by").write_text("successor")
        Path(f"{folder}.lock0").unlink()

    assert not once(folder, stalled, PACE)
    assert (made(folder), leftovers(folder)) == ("successor", [])


def test_the_error_of_who_was_given_up_does_not_count(tmp_path: Path) -> None:
    folder, calls = tmp_path / "x", []

    def make(partial: Path) -> None:
        calls.append(partial.name)
        if len(calls) == 1:
            write_lock(folder, 1)  # taken over, whereupon the successor falls silent too
            raise FileNotFoundError("the successor removed our things")
        maker("we")(partial)

    assert once(folder, make, HASTY)
    assert calls == ["x.partial0", "x.partial2"]
    assert (made(folder), leftovers(folder)) == ("we", [])


def test_waiters_say_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "x"
    write_lock(folder, host="node7", pid=77)
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level("INFO"):
        assert once(folder, maker("we"), Pace())
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"waiting for {folder} (process 77 on node7), 40 s"
    assert "taking over" in lines[-1]


def test_the_lock_tells_who_and_beats(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def make(partial: Path) -> None:
        def look() -> bool:
            content = (tmp_path / "x.lock0").read_bytes()
            seen.extend([module._holder(content)] if module._holder(content) else [])
            return len({holder["beats"] for holder in seen}) > 3

        until(look)

    assert once(tmp_path / "x", make, PACE)
    assert {(holder["pid"], holder["host"]) for holder in seen} == {(os.getpid(), socket.gethostname())}


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        once(tmp_path / "file" / "x", maker("we"), PACE)
