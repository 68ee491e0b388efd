"""A disk that takes nothing more is one error, in its own words."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.checkpoint import saving
from mindspeed_llm.errors import SuiteError
from mindspeed_llm.training.report import MetricsFile

FULL = "No space left on device"


def test_of_metrics() -> None:
    with pytest.raises(SuiteError, match=FULL):
        MetricsFile(Path("/dev/full")).write({"kind": "start"})


class Small(io.BytesIO):
    """A disk with room for so many bytes."""

    room = 1 << 18

    def write(self, data: Any, /) -> int:
        if self.tell() + len(memoryview(data).cast("B")) > self.room:
            raise OSError(errno.ENOSPC, FULL)
        return super().write(data)


def test_of_a_save_whatever_torch_makes_of_it() -> None:
    tensor = torch.zeros(1 << 20)
    with pytest.raises(RuntimeError) as theirs:
        torch.save(tensor, Small())
    assert FULL not in str(theirs.value), "torch says it by itself now"
    with pytest.raises(OSError, match=FULL), saving._disk_errors(Small()) as stream:
        torch.save(tensor, stream)


def test_a_row_that_was_cut_off_takes_no_other_along(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train"}\n{"kind": "tra')
    for _ in range(2):
        metrics = MetricsFile(path)
        metrics.write({"kind": "start"})
        metrics.close()
    assert path.read_text() == '{"kind": "train"}\n{"kind": "tra\n{"kind": "start"}\n{"kind": "start"}\n'


def test_rows_go_on_where_the_file_was_deleted_or_moved(tmp_path: Path) -> None:
    folder, moved = tmp_path / "saves", tmp_path / "moved"
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.write({"kind": "start"})
    folder.rename(moved)
    metrics.write({"kind": "train"})
    (folder / "metrics.jsonl").unlink()
    folder.rmdir()
    metrics.write({"kind": "valid"})
    metrics.close()
    assert (moved / "metrics.jsonl").read_text() == '{"kind": "start"}\n'
    assert (folder / "metrics.jsonl").read_text() == '{"kind": "valid"}\n'
