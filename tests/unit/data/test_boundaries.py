"""Boundaries of samples and documents: dumps in closed form, attention as of documents alone, samples as Megatron's."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm.data.datasets import build_datasets
from mindspeed_llm.data.manifest import Manifest, write_manifest
from mindspeed_llm.data.tokenizer import NullTokenizer
from mindspeed_llm.tools.samples import main
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.unit.data.corpus import numbered_documents, run_config, write_documents

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

EOD = 256
NULL = NullTokenizer(EOD)
#: Documents of 3, 5, 2 and 20 tokens and their ends, and one that is nothing but its end.
LENGTHS = (4, 6, 3, 21, 1)
FLAGS = {
    "none": [],
    "positions": ["--reset-position-ids"],
    "attention": ["--reset-attention-mask"],
    "loss": ["--eod-mask-loss"],
    "all": ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"],
}

MANIFEST: dict[str, Any] = {
    "tool": "test", "key": "text", "tokenizer": "elsewhere", "tokenizer_hash": NULL.hash, "vocab_size": EOD + 1,
    "eod": EOD, "append_eod": True, "dtype": "uint16", "documents": len(LENGTHS), "tokens": sum(LENGTHS),
    "bad_rows": 0, "sources": (),
}  # fmt: skip


def dump(capsys: pytest.CaptureFixture[str], prefix: str, count: int, *flags: str) -> list[dict[str, Any]]:
    arguments = ["--data-path", prefix, "--seq-length", "8", "--count", str(count), "--no-shuffle", *flags]
    assert main(arguments) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def expected_rows(stream: list[int], count: int, flags: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for start in range(0, 8 * count, 8):
        tokens = stream[start : start + 8]
        row: dict[str, Any] = {"tokens": tokens, "labels": stream[start + 1 : start + 9]}
        row["loss_mask"] = [0.0 if "--eod-mask-loss" in flags and token == EOD else 1.0 for token in tokens]
        begins = [0, *(place + 1 for place, token in enumerate(tokens[:-1]) if token == EOD)]
        own = [max(begin for begin in begins if begin <= place) for place in range(8)]
        row["position_ids"] = [place - own[place] if "--reset-position-ids" in flags else place for place in range(8)]
        if "--reset-attention-mask" in flags:
            row["cu_seqlens"] = [*begins, 8]
        rows.append(row)
    return rows


@pytest.mark.parametrize("name", FLAGS)
def test_a_dump_of_three_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    documents = numbered_documents(LENGTHS, EOD)
    prefix = write_documents(tmp_path / "d", documents)
    write_manifest(prefix, Manifest(**MANIFEST))
    stream = [token for document in documents for token in document] * 3
    count = (len(stream) - 1) // 8
    assert count > 2 * ((len(stream) // 3 - 1) // 8)
    rows = dump(capsys, prefix, count, *FLAGS[name])
    assert rows == expected_rows(stream, count, FLAGS[name])


@pytest.mark.parametrize("epochs", [1, 3])
def test_shuffling_loses_and_doubles_nothing(tmp_path: Path, epochs: int) -> None:
    """A sample and its labels are neighbours of the stream, and all of them together are the whole stream."""
    documents = numbered_documents(LENGTHS * 7, 9999)
    prefix = write_documents(tmp_path / "d", documents)
    tokens = sum(map(len, documents))
    count = (epochs * tokens - 1) // 8
    cfg = run_config(data_path=(prefix,), split="1,0,0", seq_length=8)
    train = build_datasets(cfg, NullTokenizer(9999), [count, 0, 0])[0]
    assert train is not None
    assert len(train) == count
    assert Counter(train.document_index.tolist()) == dict.fromkeys(range(len(documents)), epochs)
    stream = [token for number in train.document_index for token in documents[number]]
    pairs = Counter(pairwise(stream[: 8 * count + 1]))
    seen: Counter[tuple[int, int]] = Counter()
    for number in range(count):
        seen.update(zip(train[number]["tokens"].tolist(), train[number]["labels"].tolist(), strict=True))
    assert seen == pairs
    assert len(stream) - 8 * count <= 8


def mcore_datasets(folder: Path, seed: int, sizes: list[int], **values: Any) -> list[Any]:
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=8,
        path_to_cache=None,
        tokenizer=NULL,  # pyright: ignore[reportArgumentType]
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=False,
        **values,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


@pytest.mark.parametrize("seed", [1, 77])
@pytest.mark.parametrize("sizes", [[30, 6, 4], [190, 40, 12]])
@pytest.mark.parametrize("kind", ["one", "weights", "no weights", "per split"])
def test_samples_are_megatrons(tmp_path: Path, kind: str, sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(3)
    prefixes = []
    for name in ("a", "b"):
        documents = [[*rng.integers(0, EOD, size=length), EOD] for length in rng.integers(1, 20, size=60)]
        prefixes.append(write_documents(tmp_path / name, documents))
    a, b = prefixes
    ours, theirs = {
        "one": ({"data_path": (a,), "split": "80,12,8"}, {"blend": ([a], None), "split": "80,12,8"}),
        "weights": (
            {"data_path": ("3", a, "1", b), "split": "70,20,10"},
            {"blend": ([a, b], [3.0, 1.0]), "split": "70,20,10"},
        ),
        "no weights": ({"data_path": (a, b), "split": "70,20,10"}, {"blend": ([a, b], None), "split": "70,20,10"}),
        "per split": (
            {"train_data_path": ("0.2", a, "0.8", b), "valid_data_path": (b,), "test_data_path": (a,)},
            {"blend_per_split": [([a, b], [0.2, 0.8]), ([b], None), ([a], None)]},
        ),
    }[kind]
    resets = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    cfg = run_config(**ours, **resets, seq_length=8, seed=seed)
    reference = mcore_datasets(tmp_path, seed, sizes, **theirs)
    for split, (mine, other) in enumerate(zip(build_datasets(cfg, NULL, sizes), reference, strict=True)):
        assert mine is not None
        assert len(mine) == len(other)
        assert kind == "no weights" or len(mine) >= sizes[split]
        for number in range(len(mine)):
            sample, expected = mine[number], other[number]
            assert sample.keys() == expected.keys()
            assert all(np.array_equal(sample[name], expected[name]) for name in expected), (split, number)


VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "bounds": {"reset_attention_mask": True, "create_attention_mask_in_dataloader": False},
    "mask": {"reset_attention_mask": True},
    "bounds, positions": {
        "reset_attention_mask": True,
        "create_attention_mask_in_dataloader": False,
        "reset_position_ids": True,
    },
    "mask, positions": {"reset_attention_mask": True, "reset_position_ids": True},
    "mask, two rows": {"reset_attention_mask": True, "micro_batch_size": 2},
}


@pytest.mark.parametrize("model", ["q25", "llama31"])
def test_packed_documents_are_computed_as_if_alone(pool: Pool, tmp_path: Path, model: str) -> None:
    """Logits of each document equal transformers' for it alone; with rotary positions, wherever they begin."""
    from transformers import AutoModelForCausalLM

    folder, samples = hf_folder(model), 6
    prefix = write_documents(tmp_path / "d", numbered_documents(LENGTHS * 2, EOD))
    (found,) = pool.run(
        "tests.unit.data.cases_boundaries:outputs", 1, timeout=120,
        folder=folder, prefix=prefix, eod=EOD, samples=samples, variants=VARIANTS,
    )  # fmt: skip
    tokens = torch.cat([batch["tokens"] for batch in found["whole"]])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    alone = torch.empty(samples, 8, reference.config.vocab_size)
    with torch.no_grad():
        whole = reference(tokens).logits
        for row in range(samples):
            edges = [0, *(place + 1 for place in range(7) if tokens[row, place] == EOD), 8]
            for begin, end in pairwise(edges):
                alone[row, begin:end] = reference(tokens[row : row + 1, begin:end]).logits[0]
    # So that the comparison below means something.
    assert (whole - alone).abs().max() > 1e-2
    labels = torch.cat([batch["labels"] for batch in found["whole"]])
    for name, batches in found.items():
        logits = torch.cat([batch["logits"] for batch in batches])
        losses = torch.cat([batch["losses"] for batch in batches])
        assert torch.equal(torch.cat([batch["tokens"] for batch in batches]), tokens)
        assert (batches[0]["attention_mask"] is not None) == name.startswith("mask")
        expected = whole if name == "whole" else alone
        assert (logits[..., : expected.shape[-1]] - expected).abs().max() <= 1e-5, name
        nll = torch.nn.functional.cross_entropy(expected.transpose(1, 2), labels, reduction="none")
        assert (losses.view_as(nll) - nll).abs().max() <= 1e-5, name
