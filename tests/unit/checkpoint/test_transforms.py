"""Transforms and layouts against plain index arithmetic, with values that tell every element apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_llm.checkpoint.layout import local_rows, shard, unshard
from mindspeed_llm.checkpoint.transforms import merge, part_rows, pieces, select, split
from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Column, Copy, GateUp, QkvByGroup, Replicated, Row, Shard, Transform, Vocab


def heads(count: int, groups: int, channels: int) -> dict[str, int]:
    return {"num_attention_heads": count, "num_query_groups": groups, "kv_channels": channels, "hidden_size": 0}


def distinct(*shape: int, start: int = 0) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).reshape(shape)


def test_qkv_rows_lie_as_megatron_reads_them() -> None:
    """megatron-core views the output as [groups, heads per group + 2, channels] and splits q, k, v on the middle."""
    count, groups, channels, hidden = 6, 3, 4, 5
    q = distinct(count * channels, hidden)
    k = distinct(groups * channels, hidden, start=1000)
    v = distinct(groups * channels, hidden, start=2000)
    merged = merge(QkvByGroup(), [q, k, v], heads(count, groups, channels))
    mixed = merged.view(groups, count // groups + 2, channels, hidden)
    assert torch.equal(mixed[:, :2].reshape(count * channels, hidden), q)
    assert torch.equal(mixed[:, 2].reshape(groups * channels, hidden), k)
    assert torch.equal(mixed[:, 3].reshape(groups * channels, hidden), v)


@given(
    groups=st.integers(1, 5),
    per_group=st.integers(1, 4),
    channels=st.integers(1, 4),
    bias=st.booleans(),
    transform=st.sampled_from([Copy(), GateUp(), QkvByGroup()]),
)
def test_split_undoes_merge(groups: int, per_group: int, channels: int, bias: bool, transform: Transform) -> None:
    values = heads(groups * per_group, groups, channels)
    merged_rows = groups * (per_group + 2) * channels * (2 if isinstance(transform, GateUp) else 1)
    rows = part_rows(transform, merged_rows, values)
    parts = [distinct(count, *(() if bias else (3,)), start=10_000 * i) for i, count in enumerate(rows)]
    merged = merge(transform, parts, values)
    assert merged.shape[0] == merged_rows == sum(rows)
    for part, back in zip(parts, split(transform, merged, values), strict=True):
        assert torch.equal(part, back)


@given(
    rule=st.sampled_from([Replicated(), Column(), Column(parts=2), Column(parts=3), Row(), Vocab()]),
    tp=st.integers(1, 5),
    size=st.integers(1, 3),
)
def test_unshard_undoes_shard(rule: Shard, tp: int, size: int) -> None:
    whole = distinct(6 * tp * size, tp * 2)
    parts = [shard(rule, whole, rank, tp) for rank in range(tp)]
    assert torch.equal(unshard(rule, parts), whole)
    if not isinstance(rule, Replicated):
        assert sum(part.numel() for part in parts) == whole.numel()


def test_gate_and_up_are_cut_one_by_one() -> None:
    gate, up = distinct(4, 3), distinct(4, 3, start=100)
    first = shard(Column(parts=2), torch.cat([gate, up]), 0, 2)
    assert torch.equal(first, torch.cat([gate[:2], up[:2]]))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_selecting_rows_equals_merging_and_slicing(
    groups: int, per_group: int, channels: int, data: st.DataObject
) -> None:
    values = heads(groups * per_group, groups, channels)
    total = groups * (per_group + 2) * channels
    rows = part_rows(QkvByGroup(), total, values)
    parts = [distinct(count, start=1000 * i) for i, count in enumerate(rows)]
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    wanted = [(start, stop), (0, start)]
    chosen = [parts[p.part][p.start : p.stop] for p in select(pieces(QkvByGroup(), rows, values), wanted)]
    merged = merge(QkvByGroup(), parts, values)
    assert torch.equal(torch.cat([*chosen, merged[:0]]), torch.cat([merged[start:stop], merged[:start]]))


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConversionError, match="6 heads \\+ 2 x 3 KV heads"):
        part_rows(QkvByGroup(), 47, heads(6, 3, 4))
    with pytest.raises(ConversionError, match="even"):
        part_rows(GateUp(), 7, {})
    with pytest.raises(ConversionError, match="10 rows, 2 parts, TP 4"):
        local_rows(Column(parts=2), 10, 0, 4)
