"""Batches in every layout against one process that reads alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_llm.data.batches import build_data_iterator, document_boundaries, document_mask
from mindspeed_llm.data.sampler import DataParallelCut
from tests.distributed.pool import Pool
from tests.unit.data.corpus import numbered_documents, run_config, write_documents

CASES = "tests.unit.data.cases_batches"
EOD = 999
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
GLOBAL_BATCH = 4
TP2 = {"tensor_model_parallel_size": 2}
RESETS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    lengths = np.random.default_rng(1).integers(3, 14, size=60).tolist()
    return write_documents(tmp_path / "d", numbered_documents(lengths, EOD))


def settings(prefix: str, **values: Any) -> dict[str, Any]:
    return {
        "data_path": (prefix,),
        "split": "1,0,0",
        "seq_length": 8,
        "micro_batch_size": 1,
        "num_workers": 0,
        "vocab_size": 1000,
        **values,
    }


def read(pool: Pool, world_size: int, layout: dict[str, int], prefix: str, steps: int, **values: Any) -> list[Any]:
    return pool.run(
        f"{CASES}:read", world_size, timeout=60, layout=layout, eod=EOD, steps=steps, samples=40,
        **settings(prefix, **values),
    )  # fmt: skip


def global_batches(results: list[list[dict[str, Any]]], field: str, per_step: int) -> list[torch.Tensor]:
    """Global batches from what the data-parallel ranks read, micro-step by micro-step."""
    ranks = {batches[0]["dp"]: batches for batches in results}
    micro = [torch.cat([ranks[dp][step][field] for dp in sorted(ranks)]) for step in range(len(results[0]))]
    return [torch.cat(micro[start : start + per_step]) for start in range(0, len(micro), per_step)]


@pytest.mark.parametrize("values", [{}, RESETS])
def test_every_cut_gives_the_same_global_batches(pool: Pool, prefix: str, values: dict[str, bool]) -> None:
    alone = read(pool, 1, {}, prefix, 12, **values)
    cuts = {
        "micro-batch 4": (read(pool, 1, {}, prefix, 3, micro_batch_size=4, **values), 1),
        "dp2": (read(pool, 2, {}, prefix, 6, **values), 2),
        "tp2 dp2, micro-batch 2": (read(pool, 4, TP2, prefix, 3, micro_batch_size=2, **values), 1),
        "two workers": (read(pool, 1, {}, prefix, 6, micro_batch_size=2, num_workers=2, **values), 2),
    }
    for field in FIELDS:
        expected = global_batches(alone, field, GLOBAL_BATCH)
        for name, (results, per_step) in cuts.items():
            found = global_batches(results, field, per_step)
            assert len(found) == 3
            assert all(map(torch.equal, found, expected)), (name, field)


def test_resuming_in_the_middle_of_an_epoch_continues(pool: Pool, prefix: str) -> None:
    straight = global_batches(read(pool, 1, {}, prefix, 12), "tokens", GLOBAL_BATCH)
    resumed = global_batches(read(pool, 2, {}, prefix, 2, consumed=8), "tokens", 2)
    assert torch.equal(resumed[0], straight[2])


def test_middle_stages_get_boundaries_and_only_with_resets(pool: Pool, prefix: str) -> None:
    layout = {"pipeline_model_parallel_size": 4}
    plain = read(pool, 4, layout, prefix, 1, micro_batch_size=2)
    for batches in plain:
        edge = batches[0]["pp"] in (0, 3)
        assert all((batches[0][field] is not None) == edge for field in FIELDS)
        assert batches[0]["attention_mask"] is batches[0]["cu_seqlens"] is None
    reset = read(pool, 4, layout, prefix, 1, micro_batch_size=2, reset_attention_mask=True)
    tokens = reset[0][0]["tokens"]
    for batches in reset:
        assert torch.equal(batches[0]["attention_mask"], document_mask(tokens, EOD))
        assert torch.equal(batches[0]["cu_seqlens"], document_boundaries(tokens, EOD))
    without = read(pool, 1, {}, prefix, 1, reset_attention_mask=True, create_attention_mask_in_dataloader=False)
    assert without[0][0]["attention_mask"] is None
    assert torch.equal(without[0][0]["cu_seqlens"], document_boundaries(without[0][0]["tokens"], EOD))


def test_virtual_stages(pool: Pool) -> None:
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert pool.run(f"{CASES}:needs", 2, layout=layout, chunks=2) == [[True, False], [False, True]]
    assert pool.run(f"{CASES}:needs", 2, layout=layout, chunks=2, reset_attention_mask=True) == [[True, True]] * 2


def test_loss_weights_arrive_bit_for_bit(pool: Pool) -> None:
    expected = torch.tensor([[0.1, 1e-30, -2.5, 1 / 3]])
    assert all(torch.equal(mask, expected) for mask in pool.run(f"{CASES}:share_weights", 2, layout=TP2))


def test_all_ranks_learn_that_the_data_is_used_up(pool: Pool) -> None:
    assert {*pool.run(f"{CASES}:run_out", 2, layout=TP2)} == {"The data is used up before training ended."}


def test_an_id_beyond_the_vocabulary_is_named_on_all_ranks(pool: Pool) -> None:
    for message in pool.run(f"{CASES}:too_high", 2, layout=TP2):
        assert "no row" in message
        assert "id 10" in message


def test_missing_data_leaves_no_rank_waiting(pool: Pool) -> None:
    assert {*pool.run(f"{CASES}:build_missing", 4, layout=TP2)} == {"A file of the dataset is missing."}


def test_cut_follows_the_data_parallel_group(pool: Pool) -> None:
    assert pool.run(f"{CASES}:cut", 4, layout=TP2) == [(3, 0, 2), (3, 0, 2), (3, 1, 2), (3, 1, 2)]


class CountingDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset that says how often it is read."""

    reads = 0

    def __len__(self) -> int:
        return 10**9 + 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads += 1
        return {"tokens": torch.tensor([index])}


def test_opening_at_a_billion_samples_reads_none_before() -> None:
    dataset = CountingDataset()
    iterator = build_data_iterator(dataset, run_config(num_workers=0), 10**9, DataParallelCut(4))
    assert iterator is not None
    assert dataset.reads == 0
    assert next(iterator)["tokens"].flatten().tolist() == [10**9 + i for i in range(4)]
    assert dataset.reads == 4


def test_a_cached_blend_is_the_same_on_all_ranks_and_the_next_time(pool: Pool, prefix: str, tmp_path: Path) -> None:
    other = write_documents(tmp_path / "other", [[*range(500, 520), EOD]] * 30)
    blend = {"data_path": ("1", prefix, "3", other)}
    alone = read(pool, 1, {}, prefix, 12, **blend)
    cached = {**blend, "data_cache_path": str(tmp_path / "cache")}
    for _ in range(2):
        found = read(pool, 2, {}, prefix, 6, **cached)
        assert all(map(torch.equal, global_batches(found, "tokens", 2), global_batches(alone, "tokens", 4)))
    assert list((tmp_path / "cache").glob("*BlendedDataset*"))
