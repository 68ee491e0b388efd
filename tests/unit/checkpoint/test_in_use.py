"""A checkpoint folder has one writer, and a dead one is no writer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mindspeed_llm.checkpoint.in_use import NAME, InUse, hold
from mindspeed_llm.processes import system

HOLD = "import sys, time, pathlib; from mindspeed_llm.checkpoint.in_use import hold\n"
HOLD += "with hold(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    with (
        hold(tmp_path),
        pytest.raises(InUse, match=rf"(?s)another run writes to --save.*process {os.getpid()} on"),
        hold(tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), hold(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_is_no_writer(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(InUse, match=f"process {other.pid} on"), hold(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
    with hold(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"start": "1"}], ids=str)
def test_an_identifier_that_came_back_is_no_writer(tmp_path: Path, change: dict[str, object]) -> None:
    mark = {"host": socket.gethostname(), "system": system(), "pid": os.getpid(), "start": "0", "since": "then"}
    (tmp_path / NAME).write_text(json.dumps(mark | change))
    with hold(tmp_path):
        pass
    (tmp_path / NAME).write_text("torn")
    with hold(tmp_path):
        pass


@pytest.mark.parametrize("place", [{"system": "another container"}, {"system": None}], ids=str)
def test_a_writer_elsewhere_is_one_while_it_touches_its_mark(tmp_path: Path, place: dict[str, str | None]) -> None:
    mark = tmp_path / NAME
    theirs = {"host": "h", "system": system(), **place, "pid": os.getpid(), "start": "1", "since": "then"}
    mark.write_text(json.dumps(theirs))
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(0.01):
            os.utime(mark)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(InUse, match=f"process {os.getpid()} on"), hold(tmp_path, beat=0.1):
            pass
    finally:
        ended.set()
        thread.join()
    with hold(tmp_path, beat=0.01):
        assert json.loads(mark.read_text())["start"] != "1"


def test_the_mark_is_touched(tmp_path: Path) -> None:
    with hold(tmp_path, beat=0.01):
        before = (tmp_path / NAME).stat().st_mtime_ns
        deadline = time.monotonic() + 20
        while (tmp_path / NAME).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_mark_that_went_with_its_folder_is_set_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, moved = tmp_path / "saves", tmp_path / "moved"
    with hold(root) as mark:
        mark.renew()
        assert not caplog.text
        root.rename(moved)
        mark.renew()
        assert json.loads((root / NAME).read_text())["pid"] == os.getpid()
        assert f"--save {root} was deleted, moved or emptied" in caplog.text
    assert list(root.iterdir()) == []


def test_a_folder_that_another_run_has_begun_to_write_to_is_left_to_it(tmp_path: Path) -> None:
    theirs = json.dumps({"host": "elsewhere", "system": "x", "pid": 7, "start": "1", "since": "then"})
    with hold(tmp_path) as mark:
        (tmp_path / NAME).write_text(theirs)
        with pytest.raises(InUse, match="process 7 on elsewhere"):
            mark.renew()
    assert (tmp_path / NAME).read_text() == theirs
