"""What is told when a run fails: phases, the FATAL line, the record that ranks write together."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from mindspeed_llm.errors import DataError
from mindspeed_llm.training.failure import HERE, RECORD, Failure, cause_of, failure_here, phase, read_record, tell


def test_a_phase_ends_with_its_block_and_stays_after_an_error() -> None:
    HERE.move("setup", step=0)
    with phase("train", step=7):
        with phase("data", patient=True):
            assert (HERE.phase, HERE.step, HERE.patient) == ("data", 7, True)
        assert (HERE.phase, HERE.step, HERE.patient) == ("train", 7, False)
    assert (HERE.phase, HERE.step) == ("setup", 7)

    @phase("save")
    def save() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save()
    assert (HERE.phase, HERE.step) == ("save", 7)


def test_the_line_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HERE.move("save", step=12)
    failure = failure_here("no space\n  left on\tdevice", {"RANK": "3"})
    tell(failure, str(tmp_path))
    line = f"FATAL rank=3 host={socket.gethostname()} step=12 phase=save cause=no space left on device"
    assert capsys.readouterr().err == f"{line}\n"
    (entry,) = read_record(tmp_path)
    told = {name: entry[name] for name in ("rank", "host", "step", "phase", "cause")}
    assert Failure(**told) == failure
    assert (entry["pid"], entry["restart"]) == (os.getpid(), 0)
    assert len(str(failure_here("x" * 5000, {}))) < 500


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("Connection closed\nby peer"), "RuntimeError: Connection closed"),
        (DataError("The file is damaged.", got="x.bin", fix="another"), "DataError: The file is damaged. (x.bin)"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_the_cause_is_the_type_and_the_reason(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


def test_a_record_that_cannot_be_written_does_not_hide_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(failure_here("why", {}), str(tmp_path / "missing"))
    first, last = capsys.readouterr().err.splitlines()
    assert RECORD in first
    assert last.startswith("FATAL rank=0 ")


def _write(save: str, rank: int, start: object) -> None:
    start.wait()  # pyright: ignore[reportAttributeAccessIssue]
    for number in range(20):
        tell(failure_here(f"{number} " + "x" * 300, {"RANK": str(rank)}), save)


def test_ranks_that_fail_at_once_lose_no_line_of_another(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    ranks = [context.Process(target=_write, args=(str(tmp_path), rank, start)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    entries = [json.loads(line) for line in (tmp_path / RECORD).read_text().splitlines()]
    told = sorted((entry["rank"], int(entry["cause"].split()[0])) for entry in entries)
    assert told == [(rank, number) for rank in range(4) for number in range(20)]
