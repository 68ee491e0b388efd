"""Samples: boundaries, epochs, masks, positions in closed form; indices and blends against megatron-core's classes."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm.data.batches import document_boundaries, document_mask
from mindspeed_llm.data.datasets import build_datasets
from mindspeed_llm.data.indices import Epochs
from mindspeed_llm.data.inputs import split_sizes, tokenizer_of
from mindspeed_llm.data.manifest import Manifest, write_manifest
from mindspeed_llm.data.tokenizer import NullTokenizer, load_tokenizer
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import TOKENIZER, numbered_documents, run_config, write_documents

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

EOD = 999
NULL = NullTokenizer(EOD)
#: Tokens of each document of case 25, and one more for its end.
CASE_25 = (4, 6, 3, 21)
SAMPLE_COUNTS = (1, 7, 11, 13, 23, 24, 40, 100)


def train_dataset(prefix: str, samples: int, *, shuffle: bool = True, **values: Any) -> Any:
    cfg = run_config(**{"data_path": (prefix,), "split": "1,0,0", "seq_length": 8, **values})
    return build_datasets(cfg, NULL, [samples, 0, 0], shuffle=shuffle)[0]


def theirs(prefix: str, samples: int, folder: Path, **values: Any) -> GPTDataset:
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=8,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(folder),
        tokenizer=NULL,  # pyright: ignore[reportArgumentType]
        **{"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **values},
    )
    config.split_matrix[1:] = [None, None]  # pyright: ignore
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]  # pyright: ignore


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[str, list[int]]:
    documents = numbered_documents(CASE_25, EOD)
    return write_documents(tmp_path / "corpus", documents), [token for document in documents for token in document]


def test_sample_i_is_the_stream_from_8i(corpus: tuple[str, list[int]]) -> None:
    prefix, stream = corpus
    per_epoch = (len(stream) - 1) // 8
    dataset = train_dataset(prefix, per_epoch, shuffle=False)
    assert len(dataset) == per_epoch == 4
    for number in range(per_epoch):
        cut = stream[8 * number : 8 * number + 9]
        assert dataset[number]["tokens"].tolist() == cut[:-1]
        assert dataset[number]["labels"].tolist() == cut[1:]
        assert dataset[number]["loss_mask"].tolist() == [1.0] * 8
        assert dataset[number]["position_ids"].tolist() == list(range(8))


def test_three_epochs_are_one_stream(corpus: tuple[str, list[int]]) -> None:
    prefix, stream = corpus
    wanted = 2 * ((len(stream) - 1) // 8) + 3
    dataset = train_dataset(prefix, wanted, shuffle=False)
    stream = stream * 3
    assert len(dataset) == (len(stream) - 1) // 8 >= wanted
    inputs = [token for number in range(len(dataset)) for token in dataset[number]["tokens"].tolist()]
    labels = [token for number in range(len(dataset)) for token in dataset[number]["labels"].tolist()]
    assert inputs == stream[: len(inputs)]
    assert labels == stream[1 : len(labels) + 1]


@pytest.mark.parametrize(("tokens", "samples"), [(9, 1), (10, 1), (16, 1), (17, 2)])
def test_one_token_more_than_the_sequences(tmp_path: Path, tokens: int, samples: int) -> None:
    prefix = write_documents(tmp_path / "d", numbered_documents([3, tokens - 3], EOD))
    assert len(train_dataset(prefix, samples, shuffle=False)) == samples


def test_too_short_a_corpus_is_an_error(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "d", numbered_documents([3, 5], EOD))
    with pytest.raises(DataError, match=r"shorter than one sample(.|\n)*8 tokens(.|\n)*at least 9 tokens"):
        train_dataset(prefix, 1)


def expected_fields(tokens: list[int], flags: dict[str, bool]) -> tuple[list[float], list[int], list[list[bool]]]:
    """Loss mask, positions and forbidden attention, token by token."""
    document, start = 0, 0
    documents, positions = [], []
    for place, token in enumerate(tokens):
        documents.append(document)
        positions.append(place - (start if flags.get("reset_position_ids") else 0))
        if token == EOD:
            document, start = document + 1, place + 1
    loss = [0.0 if flags.get("eod_mask_loss") and token == EOD else 1.0 for token in tokens]
    apart = flags.get("reset_attention_mask", False)
    forbidden = [
        [key > query or (apart and documents[key] != documents[query]) for key in range(len(tokens))]
        for query in range(len(tokens))
    ]
    return loss, positions, forbidden


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"reset_position_ids": True},
        {"reset_attention_mask": True},
        {"eod_mask_loss": True},
        {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
    ],
)
def test_flags_act_at_the_end_of_documents_and_nowhere_else(
    corpus: tuple[str, list[int]], tmp_path: Path, flags: dict[str, bool]
) -> None:
    prefix, _ = corpus
    ours = train_dataset(prefix, 12, **flags)
    reference = theirs(prefix, 12, tmp_path / "theirs", **flags)
    ends = 0
    for number in range(12):
        sample, their_sample = ours[number], reference[number]
        loss, positions, forbidden = expected_fields(sample["tokens"].tolist(), flags)
        ends += sample["tokens"].tolist().count(EOD)
        assert sample["loss_mask"].tolist() == loss
        assert sample["position_ids"].tolist() == positions
        for name, values in sample.items():
            assert torch.equal(values, their_sample[name]), name
        if flags.get("reset_attention_mask"):
            mask = document_mask(sample["tokens"][None], EOD)
            assert mask[0, 0].tolist() == forbidden
            assert torch.equal(mask[0], their_sample["attention_mask"])
    assert ends > 5


def test_boundaries_of_a_batch_of_rows() -> None:
    tokens = torch.tensor([[EOD, 1, 2, EOD, 3, 4], [1, 2, 3, 4, 5, EOD], [1, EOD, EOD, 2, 3, 4]])
    boundaries = document_boundaries(tokens, EOD)
    assert boundaries.dtype == torch.int32
    assert boundaries.tolist() == [0, 1, 4, 6, 12, 14, 15, 18]
    mask = document_mask(tokens, EOD)
    for row in range(3):
        edges = sorted({edge - 6 * row for edge in boundaries.tolist() if 6 * row <= edge <= 6 * row + 6})
        blocks = torch.ones(6, 6, dtype=torch.bool)
        for begin, end in pairwise(edges):
            blocks[begin:end, begin:end] = torch.ones(end - begin, end - begin).tril() == 0
        assert torch.equal(mask[row, 0], blocks)


@pytest.mark.parametrize("samples", SAMPLE_COUNTS)
def test_shuffled_indices_are_megatrons(tmp_path: Path, samples: int) -> None:
    lengths = np.random.default_rng(0).integers(2, 12, size=15).tolist()
    prefix = write_documents(tmp_path / "d", numbered_documents(lengths, EOD))
    ours, reference = train_dataset(prefix, samples), theirs(prefix, samples, tmp_path / "theirs")
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert np.array_equal(getattr(ours, name), getattr(reference, name)), name


def test_an_epoch_that_ends_with_a_full_sequence_lacks_the_token_after_it(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "d", numbered_documents([6, 10], EOD))
    ours, reference = train_dataset(prefix, 2), theirs(prefix, 2, tmp_path / "theirs")
    assert np.array_equal(ours.sample_index, reference.sample_index)
    assert ours.document_index.size == 4


def test_the_last_epoch_is_shuffled_apart_in_some_of_these() -> None:
    """So that the comparison above covers both rules."""
    rng = np.random.default_rng(0)
    tokens = int(rng.integers(2, 12, size=15).sum())
    kinds = {Epochs.covering(tokens, 8, samples).separate_last for samples in SAMPLE_COUNTS[3:]}
    assert kinds == {True, False}


def test_seed_changes_the_order(corpus: tuple[str, list[int]]) -> None:
    prefix, _ = corpus
    orders = [[train_dataset(prefix, 12, seed=seed)[i]["tokens"].tolist() for i in range(12)] for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]


def test_new_data_at_an_old_prefix_is_not_read_through_old_indices(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "d", numbered_documents([4, 30, 5], EOD))
    before = train_dataset(prefix, 4, shuffle=False)
    documents = numbered_documents([30, 4, 5], EOD)
    write_documents(tmp_path / "d", documents)
    stream = [token for document in documents for token in document]
    after = train_dataset(prefix, 4, shuffle=False)
    assert after[0]["tokens"].tolist() == stream[:8]
    assert not np.array_equal(before.sample_index, after.sample_index)
    again = train_dataset(prefix, 4, shuffle=False)
    assert isinstance(again.sample_index, np.memmap)
    assert again[3]["tokens"].tolist() == stream[24:32]


def test_a_folder_that_cannot_be_written(corpus: tuple[str, list[int]], tmp_path: Path) -> None:
    prefix, stream = corpus
    Path(prefix).write_text("a file where the folder of the cache would be")
    assert train_dataset(prefix, 4, shuffle=False)[0]["tokens"].tolist() == stream[:8]
    with pytest.raises(DataError, match="--data-cache-path"):
        train_dataset(prefix, 4, data_cache_path=f"{prefix}/cache")


def two_corpora(tmp_path: Path) -> tuple[str, str]:
    low = write_documents(tmp_path / "low", [[*range(10), EOD]] * 40)
    high = write_documents(tmp_path / "high", [[*range(100, 110), EOD]] * 40)
    return low, high


@pytest.mark.parametrize("weights", [("3", "1"), ("0.5", "0.5"), None])
def test_blends_are_drawn_by_weight(tmp_path: Path, weights: tuple[str, str] | None) -> None:
    low, high = two_corpora(tmp_path)
    words = (weights[0], low, weights[1], high) if weights else (low, high)
    dataset = train_dataset(low, 80, data_path=words)
    ours = [int(dataset[i]["tokens"].min()) >= 100 or 105 in dataset[i]["tokens"] for i in range(80)]
    share = (float(weights[1]) / sum(map(float, weights))) if weights else 0.5
    assert abs(sum(ours) / 80 - share) < 0.03


def test_paths_per_split(tmp_path: Path) -> None:
    low, high = two_corpora(tmp_path)
    cfg = run_config(seq_length=8, train_data_path=(low,), valid_data_path=(f"{high}.bin",))
    train, valid, test = build_datasets(cfg, NULL, [5, 3, 0])
    assert max(token for i in range(5) for token in train[i]["tokens"].tolist() if token != EOD) < 10  # pyright: ignore
    assert min(token for i in range(3) for token in valid[i]["tokens"].tolist()) >= 100  # pyright: ignore
    assert test is None


def test_paths_from_files(tmp_path: Path) -> None:
    low, high = two_corpora(tmp_path)
    (tmp_path / "joint.txt").write_text(f"0.5 {low}\n0.5 {high}\n")
    (tmp_path / "splits.json").write_text(json.dumps({"train": [low], "valid": None, "test": None}))
    joint = run_config(seq_length=8, data_args_path=str(tmp_path / "joint.txt"), split="1,0,0")
    assert len(build_datasets(joint, NULL, [20, 0, 0])[0]) == 20  # pyright: ignore[reportArgumentType]
    apart = run_config(seq_length=8, per_split_data_args_path=str(tmp_path / "splits.json"))
    assert len(build_datasets(apart, NULL, [20, 0, 0])[0]) >= 20  # pyright: ignore[reportArgumentType]


def test_splits_share_no_document(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "d", numbered_documents([10] * 100, EOD))
    cfg = run_config(seq_length=8, data_path=(prefix,), split="80,10,10", seed=3)
    seen = []
    for dataset in build_datasets(cfg, NULL, [80, 8, 8]):
        assert dataset is not None
        seen.append({token for i in range(len(dataset)) for token in dataset[i]["tokens"].tolist()} - {EOD})
    assert max(seen[0]) < min(seen[1]) < max(seen[1]) < min(seen[2])


@pytest.mark.parametrize(
    ("values", "sizes", "message"),
    [
        ({"split": "1,0,0"}, [4, 4, 0], "no data for validation"),
        ({"split": "99,1,0"}, [4, 4, 0], "validation is shorter"),
        ({"data_path": ("0.5", "PREFIX", "also", "PREFIX")}, [4, 0, 0], "must alternate"),
        ({"data_path": ("-1", "PREFIX")}, [4, 0, 0], "above 0"),
        ({"data_path": ("nowhere",)}, [4, 0, 0], "nowhere.idx"),
        ({"data_path": None}, [4, 0, 0], "one place"),
        ({"mock_data": True}, [4, 0, 0], "one place"),
        ({"train_data_path": ("PREFIX",)}, [4, 0, 0], "one place"),
        ({"seq_length": None}, [4, 0, 0], "--seq-length"),
    ],
)
def test_what_is_wrong_is_named(
    corpus: tuple[str, list[int]], values: dict[str, Any], sizes: list[int], message: str
) -> None:
    prefix, _ = corpus
    values = {
        name: tuple(prefix if word == "PREFIX" else word for word in value) if isinstance(value, tuple) else value
        for name, value in values.items()
    }
    cfg = run_config(**{"data_path": (prefix,), "seq_length": 8, "split": "1,0,0", **values})
    with pytest.raises(DataError, match=message):
        build_datasets(cfg, NULL, sizes)


def test_data_of_another_tokenizer_is_refused(corpus: tuple[str, list[int]]) -> None:
    prefix, _ = corpus
    tokenizer = load_tokenizer(TOKENIZER)
    manifest = Manifest(
        tool="test", key="text", tokenizer="elsewhere", tokenizer_hash=tokenizer.hash, vocab_size=4096,
        eod=tokenizer.eod, append_eod=True, dtype="uint16", documents=4, tokens=34, bad_rows=0, sources=(),
    )  # fmt: skip
    cfg = run_config(data_path=(prefix,), seq_length=8, split="1,0,0")
    write_manifest(prefix, manifest)
    assert build_datasets(cfg, tokenizer, [4, 0, 0])[0] is not None
    write_manifest(prefix, replace(manifest, tokenizer_hash="0123456789abcdef"))
    with pytest.raises(DataError, match="another tokenizer"):
        build_datasets(cfg, tokenizer, [4, 0, 0])
    write_manifest(prefix, replace(manifest, eod=5))
    with pytest.raises(DataError, match="end with another token"):
        build_datasets(cfg, tokenizer, [4, 0, 0])


def test_mock_data_is_megatrons() -> None:
    cfg = run_config(mock_data=True, vocab_size=100, seq_length=8)
    ours = build_datasets(cfg, tokenizer_of(cfg), [5, 0, 0])[0]
    assert isinstance(ours, MockGPTDataset)
    tokens = ours[0]["tokens"].tolist()
    for first, second in pairwise(tokens):
        assert second == (first + 1) % 100 or first == 99 or second == 99


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({"train_iters": 10, "eval_interval": 4, "eval_iters": 2}, (80, 16, 16)),
        ({"train_samples": 33, "eval_interval": None, "eval_iters": 2}, (33, 16, 16)),
        ({"train_iters": 10, "eval_interval": 4, "eval_iters": 0}, (80, 0, 0)),
        ({"train_iters": 10, "eval_iters": 2, "split": "99,1,0"}, (80, 16, 0)),
        ({"train_iters": 10, "eval_iters": 2, "split": "100"}, (80, 0, 0)),
    ],
)
def test_samples_of_each_split(values: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    assert split_sizes(run_config(global_batch_size=8, **values)) == sizes


def test_padding_in_the_data_is_left_out_of_the_loss_only_when_it_is_nothing_else(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    pad, eod = tokenizer.special_ids["pad_token"], tokenizer.eod
    prefix = write_documents(tmp_path / "d", [[1, 2, pad, 3, 4, 5, eod, 6, 7]])
    cfg = run_config(data_path=(prefix,), seq_length=8, split="1,0,0")
    assert build_datasets(cfg, tokenizer, [1, 0, 0])[0][0]["loss_mask"].tolist() == [1, 0, 1, 1, 1, 1, 1, 1]  # pyright: ignore
    for other in ("eos_token", "unk_token"):
        shared = copy(tokenizer)
        shared.special_ids = {"eos_token": eod, other: pad, "pad_token": pad}
        assert build_datasets(cfg, shared, [1, 0, 0])[0][0]["loss_mask"].tolist() == [1.0] * 8  # pyright: ignore
