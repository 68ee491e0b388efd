"""Sizes beyond 32 bits, what building indices allocates, and opening a run far into its data."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm.data import indexed
from mindspeed_llm.data.batches import build_data_iterator
from mindspeed_llm.data.datasets import build_datasets
from mindspeed_llm.data.indexed import HEADER_BYTES, IndexedWriter, read_index
from mindspeed_llm.data.indices import Epochs, build_indices
from mindspeed_llm.data.sampler import LARGEST_TABLE, DataParallelCut
from mindspeed_llm.data.tokenizer import NullTokenizer
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import run_config, write_documents

from megatron.core.datasets import helpers
from megatron.core.datasets.indexed_dataset import IndexedDataset

FAR = 10**9


class CountingDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Two billion samples, each its own number; says how often it is read."""

    reads = 0

    def __len__(self) -> int:
        return 2 * FAR

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads += 1
        return {"tokens": torch.tensor([index])}


@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_opening_far_into_the_data_reads_and_allocates_one_batch(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, **more: drawn.append(n) or randperm(n, **more))
    cfg, cut = run_config(num_workers=0, dataloader_type=order), DataParallelCut(4, 1, 2)
    batches = []
    for consumed in (FAR, FAR + 8):
        dataset = CountingDataset()
        tracemalloc.start()
        iterator = build_data_iterator(dataset, cfg, consumed, cut)
        assert iterator is not None
        assert dataset.reads == 0
        batches.append(next(iterator)["tokens"].flatten().tolist())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert dataset.reads == 4
        assert peak < 1 << 20
        if consumed == FAR:
            batches.append(next(iterator)["tokens"].flatten().tolist())
    # tracemalloc does not see torch's own memory, and a table of the epoch is all that the sampler could take of it.
    assert drawn == []
    assert 2 * FAR > LARGEST_TABLE
    assert batches[1] == batches[2] != batches[0]
    if order == "single":
        assert batches[0] == [FAR + 4 + i for i in range(4)]


@pytest.mark.parametrize("length", [2**30, 2**31 - 1])
def test_more_tokens_than_32_bits_count(length: int) -> None:
    lengths = np.full(3, length, dtype=np.int32)
    sequence = 2**20
    epochs = Epochs.covering(3 * length, sequence, 3 * length // sequence + 5)
    assert epochs.count == 2
    documents = np.array([2, 0, 1], dtype=np.int32)
    document_index, sample_index, shuffle_index = build_indices(lengths, documents, epochs, seed=None)
    assert document_index.tolist() == [2, 0, 1, 2, 0, 1]
    starts = np.arange(epochs.samples(2) + 1, dtype=np.int64) * sequence
    assert len(sample_index) == len(starts) == (6 * length - 1) // sequence + 1
    assert np.array_equal(sample_index, np.stack([starts // length, starts % length], axis=1))
    assert np.array_equal(shuffle_index, np.arange(len(starts) - 1))


@pytest.mark.parametrize(("count", "dtype"), [(2**31 - 1, np.int32), (2**31, np.int64)])
def test_places_in_a_long_document_index_need_64_bits(count: int, dtype: type) -> None:
    """As many epochs have so many documents; the array here is one number seen again and again."""
    document_index = np.broadcast_to(np.zeros((), dtype=np.int32), (count,))
    index = helpers.build_sample_idx(np.array([3], dtype=np.int32), document_index, 8, 1, 33, True, True)
    assert index.dtype == dtype
    assert index.tolist() == [[8 * i // 3, 8 * i % 3] for i in range(5)]


def test_tokens_beyond_4_gib_are_read(tmp_path: Path) -> None:
    """A file with a hole: two documents, of which only the first and the last ids lie on the disk."""
    lengths, dtype = [2**31 - 1, 4], np.dtype(np.uint16)
    prefix = tmp_path / "far"
    with open(f"{prefix}.bin", "wb") as stream:
        np.array([7, 8], dtype=dtype).tofile(stream)
        stream.seek((lengths[0] - 2) * dtype.itemsize)
        np.array([1, 2, 3, 4, 5, 6], dtype=dtype).tofile(stream)
        assert stream.tell() == sum(lengths) * dtype.itemsize > 2**32
    assert os.stat(f"{prefix}.bin").st_blocks * 512 < 2**20
    real = write_documents(tmp_path / "small", [[1], [2]])
    index = bytearray(Path(f"{real}.idx").read_bytes())
    index[HEADER_BYTES : HEADER_BYTES + 8] = np.array(lengths, dtype=np.int32).tobytes()
    index[HEADER_BYTES + 8 : HEADER_BYTES + 24] = np.array([0, lengths[0] * 2], dtype=np.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(index)

    assert read_index(str(prefix)).tokens == 2**31 + 3
    dataset = IndexedDataset(str(prefix))
    assert np.asarray(dataset[1]).tolist() == [3, 4, 5, 6]
    assert np.asarray(dataset.get(0, offset=2**31 - 4, length=3)).tolist() == [0, 1, 2]
    cfg = run_config(data_path=(str(prefix),), split="1,0,0", seq_length=2**20)
    train = build_datasets(cfg, NullTokenizer(99), [2048, 0, 0], shuffle=False)[0]
    assert train is not None
    assert len(train) == (2**31 + 2) // 2**20 == 2048
    assert train[0]["tokens"][:3].tolist() == [7, 8, 0]
    assert train[2047]["labels"][-4:].tolist() == [1, 2, 3, 4]


def test_offsets_written_beyond_32_bits(tmp_path: Path) -> None:
    lengths, prefix = np.array([2**30, 5, 2**31 - 1, 2**30], dtype=np.int32), tmp_path / "d"
    total = int(lengths.sum(dtype=np.int64))
    with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
        writer.add_documents(_Counted(4 * total), lengths.tobytes())
        assert writer.tokens == total > 2**31
        writer.commit()
    os.truncate(f"{prefix}.bin", 4 * total)
    assert read_index(str(prefix)).tokens == total
    dataset = IndexedDataset(str(prefix))
    assert dataset.index.sequence_pointers.tolist() == [0, 4 * 2**30, 4 * (2**30 + 5), 4 * (2**30 + 5 + 2**31 - 1)]


def test_an_index_written_in_parts_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[1] * length for length in (3, 1, 4, 1, 5, 9, 2)]
    whole = Path(write_documents(tmp_path / "whole", documents) + ".idx").read_bytes()
    for part in (1, 2, 3, 7, 8):
        monkeypatch.setattr(indexed, "_INDEX_PART", part)
        assert Path(write_documents(tmp_path / f"{part}", documents) + ".idx").read_bytes() == whole


class _Counted(bytes):
    """Empty bytes that say they are many: the ids of a test are not written."""

    size: int

    def __new__(cls, size: int) -> _Counted:
        made = super().__new__(cls)
        made.size = size
        return made

    def __len__(self) -> int:
        return self.size


def test_building_allocates_what_it_returns_and_no_more() -> None:
    """Bytes as the table of the documentation has them: 4 for a place of a document, 8 + 4 for a sample."""
    documents, sequence = 400_000, 64
    lengths = np.random.default_rng(0).integers(1, 100, size=documents).astype(np.int32)
    epochs = Epochs.covering(int(lengths.sum()), sequence, 3 * int(lengths.sum()) // sequence)
    order = np.arange(documents, dtype=np.int32)
    tracemalloc.start()
    document_index, sample_index, shuffle_index = build_indices(lengths, order, epochs, seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    samples = epochs.samples(epochs.count)
    assert document_index.nbytes == 4 * documents * epochs.count
    assert (sample_index.nbytes, shuffle_index.nbytes) == (8 * (samples + 1), 4 * samples)
    # The sample index is of C++ memory, which tracemalloc does not see.
    assert peak < document_index.nbytes + shuffle_index.nbytes + 100_000


def test_more_documents_than_32_bits_count_are_refused_by_name(tmp_path: Path) -> None:
    """An index with a hole for 2**31 lengths, offsets and boundaries."""
    count = 2**31
    prefix = write_documents(tmp_path / "d", [[1, 2]])
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(HEADER_BYTES - 16)
        np.array([count, count + 1], dtype=np.int64).tofile(stream)
        stream.truncate(HEADER_BYTES + count * 12 + (count + 1) * 8)
        stream.seek(HEADER_BYTES + count * 12 - 8)
        np.array([4], dtype=np.int64).tofile(stream)
        stream.seek(-8, os.SEEK_END)
        np.array([count], dtype=np.int64).tofile(stream)
    cfg = run_config(data_path=(prefix,), split="1,0,0", seq_length=8)
    with pytest.raises(DataError, match=r"more documents(.|\n)*d: 2147483648(.|\n)*2147483647"):
        build_datasets(cfg, NullTokenizer(99), [4, 0, 0])
