"""Our indexed files against megatron-core's own builder and reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm.data.indexed import IndexedWriter, read_index, token_dtype
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import write_documents

from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

DOCUMENTS = [[5, 1, 2], [7], list(range(300)), [65499, 0]]


@pytest.mark.parametrize("vocab_size", [1, 65499, 65500, 65536, 300000])
def test_dtype_is_megatrons(vocab_size: int) -> None:
    assert token_dtype(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_bytes_equal_megatrons_builder(tmp_path: Path, dtype: type) -> None:
    ours = write_documents(tmp_path / "ours", DOCUMENTS, dtype)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert Path(ours + suffix).read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_megatron_reads_it(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_documents(tmp_path / "d", DOCUMENTS))
    assert [np.asarray(dataset[number]).tolist() for number in range(len(dataset))] == DOCUMENTS


SPLIT = [[[5, 1], [2]], [[7]], [[1], [2, 3], [4]]]


def write_split(prefix: Path) -> str:
    with IndexedWriter(prefix, np.dtype(np.uint16), split=True) as writer:
        for document in SPLIT:
            lengths = np.array([len(sentence) for sentence in document], dtype=np.int32)
            ids = np.array([token for sentence in document for token in sentence], dtype=np.uint16)
            writer.add_documents(ids.tobytes(), lengths.tobytes(), np.array([len(document)], np.int32).tobytes())
        writer.commit()
    return str(prefix)


def test_documents_of_several_sequences_and_merging_equal_megatrons_builder(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in SPLIT:
        builder.add_document(
            torch.tensor([token for sentence in document for token in sentence]),
            [len(sentence) for sentence in document],
        )
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = write_split(tmp_path / "ours")
    for suffix in (".bin", ".idx"):
        assert Path(ours + suffix).read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    builder = IndexedDatasetBuilder(str(tmp_path / "merged.bin"), dtype=np.uint16)
    whole = write_documents(tmp_path / "whole", DOCUMENTS)
    parts = [ours, whole, ours]
    for part in parts:
        builder.add_index(part)
    builder.finalize(str(tmp_path / "merged.idx"))
    with IndexedWriter(tmp_path / "joined", np.dtype(np.uint16), split=True) as writer:
        for part in parts:
            writer.add_dataset(part)
        assert writer.documents == len(SPLIT) * 2 + len(DOCUMENTS)
        writer.commit()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"joined{suffix}").read_bytes() == (tmp_path / f"merged{suffix}").read_bytes()


def test_split_documents_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    part = write_split(tmp_path / "split")
    with (
        IndexedWriter(tmp_path / "d", np.dtype(np.uint16)) as writer,
        pytest.raises(DataError, match="split documents"),
    ):
        writer.add_dataset(part)
    with IndexedWriter(tmp_path / "d", np.dtype(np.int32)) as writer, pytest.raises(DataError, match="dtypes"):
        writer.add_dataset(part)


def test_two_writers_of_one_dataset_do_not_mix(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.dtype(np.uint16)) as writer:
        writer.add_documents(b"\x01\x00", b"\x01\x00\x00\x00")
        with pytest.raises(DataError, match="Another process"):
            IndexedWriter(tmp_path / "d", np.dtype(np.uint16))
        writer.commit()
    assert read_index(str(tmp_path / "d")).tokens == 1


def test_what_a_killed_writer_left_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "d.bin.partial").write_bytes(b"rubbish")
    assert read_index(write_documents(tmp_path / "d", DOCUMENTS)).tokens == 306


def interrupted(prefix: Path) -> None:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_documents(b"\x01\x00", b"\x01\x00\x00\x00")
        raise KeyboardInterrupt


def test_without_commit_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_lengths_must_add_up(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.dtype(np.uint16)) as writer, pytest.raises(ValueError, match="add up"):
        writer.add_documents(b"\x01\x00", b"\x02\x00\x00\x00")


def test_summary(tmp_path: Path) -> None:
    summary = read_index(write_documents(tmp_path / "d", DOCUMENTS))
    assert summary.lengths.tolist() == [3, 1, 300, 2]
    assert summary.tokens == 306
    assert summary.dtype == np.uint16


def remove_data(prefix: str) -> None:
    Path(f"{prefix}.bin").unlink()


def cut_data(prefix: str) -> None:
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-2])


def cut_index(prefix: str) -> None:
    Path(f"{prefix}.idx").write_bytes(Path(f"{prefix}.idx").read_bytes()[:-1])


def other_format(prefix: str) -> None:
    Path(f"{prefix}.idx").write_bytes(b"something else entirely, and long enough to hold a header")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_data, r"d\.bin"),
        (cut_data, "do not belong together"),
        (cut_index, "damaged"),
        (other_format, "not an index"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[str], None], message: str) -> None:
    prefix = write_documents(tmp_path / "d", DOCUMENTS)
    damage(prefix)
    with pytest.raises(DataError, match=message):
        read_index(prefix)


def test_missing_prefix_names_what_lies_beside(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus_text_document", DOCUMENTS)
    with pytest.raises(DataError, match="corpus_text_document"):
        read_index(str(tmp_path / "corpus"))
