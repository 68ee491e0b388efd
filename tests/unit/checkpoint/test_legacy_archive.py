"""Files that are written tensor by tensor are files of torch.save."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_llm.checkpoint.convert.legacy_archive import Later, TensorArchive
from mindspeed_llm.checkpoint.hf_io import TensorInfo
from mindspeed_llm.checkpoint.trusted import read_legacy
from mindspeed_llm.errors import CheckpointError
from tests.per_rank import load_rank

TENSORS = {
    "matrix": torch.randn(7, 5),
    "half": torch.randn(33).half(),
    "brain": torch.randn(4, 3, 2).bfloat16(),
    "double": torch.randn(3).double(),
    "long": torch.arange(11),
    "byte": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "empty": torch.zeros(0, 4),
}


def write(path: Path, block: int = 2) -> dict[str, Any]:
    """The tensors in the reverse of their order in the object, ``block`` rows at a time; and the same object whole."""
    later = {name: Later(TensorInfo(tuple(tensor.shape), tensor.dtype)) for name, tensor in TENSORS.items()}
    beside: dict[str, Any] = {"iteration": 1, "none": None, "dtype": torch.bfloat16, "nested": {"pair": (1, 2.5)}}
    args = {"num_layers": 2, "ratio": 0.5, "name": "ä"}
    archive = TensorArchive(path, {**beside, "args": SimpleNamespace(**args), "model": later})
    for name, tensor in reversed(TENSORS.items()):
        for start in range(0, max(len(tensor), 1), block):
            archive.write(later[name], tensor[start : start + block])
    archive.finish()
    return {**beside, "args": argparse.Namespace(**args), "model": TENSORS}


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_it_as_its_own(tmp_path: Path, mmap: bool) -> None:
    expected = write(tmp_path / "ours.pt")
    torch.save(expected, tmp_path / "theirs.pt")
    for found in (load_rank(tmp_path / "ours.pt", mmap=mmap), read_legacy(tmp_path / "ours.pt")):
        theirs = load_rank(tmp_path / "theirs.pt", mmap=mmap)
        tensors, others = found.pop("model"), theirs.pop("model")
        assert vars(found.pop("args")) == vars(theirs.pop("args"))
        assert found == theirs
        assert [(name, t.dtype, t.shape, t.stride()) for name, t in tensors.items()] == [
            (name, t.dtype, t.shape, t.stride()) for name, t in others.items()
        ]
        assert all(torch.equal(tensors[name], others[name]) for name in others)
    assert type(load_rank(tmp_path / "ours.pt")["args"]) is argparse.Namespace


def test_records_are_where_torch_puts_them(tmp_path: Path) -> None:
    torch.save(write(tmp_path / "a.pt"), tmp_path / "b.pt")
    sizes = {}
    for name in ("a.pt", "b.pt"):
        file = zipfile.ZipFile(tmp_path / name)
        assert file.testzip() is None
        sizes[name] = sorted(entry.file_size for entry in file.infolist() if "/data/" in entry.filename)
    assert sizes["a.pt"] == sizes["b.pt"]
    reader: Any = torch._C.PyTorchFileReader(str(tmp_path / "a.pt"))  # pyright: ignore[reportPrivateUsage]
    assert {reader.get_record_offset(name) % 64 for name in reader.get_all_records()} == {0}


def test_what_is_out_of_plan_is_refused(tmp_path: Path) -> None:
    first, second = (Later(TensorInfo((2, 3), torch.float32)) for _ in range(2))
    archive = TensorArchive(tmp_path / "a.pt", {"model": {"a": first, "b": second}})
    archive.write(first, torch.ones(1, 3))
    for later, rows in ((second, torch.ones(2, 3)), (first, torch.ones(2, 3)), (first, torch.ones(1, 4))):
        with pytest.raises(CheckpointError, match="out of plan"):
            archive.write(later, rows)
    archive.write(first, torch.ones(1, 3))
    with pytest.raises(CheckpointError, match="out of plan"):
        archive.write(first, torch.ones(1, 3))
    with pytest.raises(CheckpointError, match="not every planned tensor"):
        archive.finish()
    archive.abandon()


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "full.pt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space"):
        TensorArchive(tmp_path / "full.pt", {"model": {"a": Later(TensorInfo((2, 3), torch.float32))}})


def test_what_is_abandoned_does_not_load_rank(tmp_path: Path) -> None:
    later = Later(TensorInfo((2, 3), torch.float32))
    archive = TensorArchive(tmp_path / "a.pt", {"model": {"a": later}})
    archive.write(later, torch.ones(1, 3))
    archive.abandon()
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        read_legacy(tmp_path / "a.pt")
