"""How one megatron-core tensor is made of Hugging Face tensors, and taken apart again.

Every transform here is an order of row blocks, so it is described once, by :func:`pieces`; both directions and the
reading of only some rows follow from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Copy, GateUp, QkvByGroup, QkvStacked, Transform

Rows = tuple[int, int]
"""Half-open range of rows, ``[start, stop)``."""


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of the Hugging Face tensor number ``part``."""

    part: int
    start: int
    stop: int


def part_rows(transform: Transform, merged_rows: int, values: Mapping[str, Any]) -> list[int]:
    """Rows that each Hugging Face tensor must have for a megatron-core tensor of ``merged_rows`` rows.

    Raises:
        ConversionError: ``merged_rows`` does not fit the model's heads.
    """
    if isinstance(transform, Copy):
        return [merged_rows]
    if isinstance(transform, GateUp):
        if merged_rows % 2:
            raise ConversionError("gate and up need an even number of rows", got=merged_rows)
        return [merged_rows // 2, merged_rows // 2]
    heads, groups, channels = _attention_sizes(values)
    if merged_rows != (heads + 2 * groups) * channels:
        raise ConversionError(
            "linear_qkv does not have the rows of its heads",
            got=merged_rows,
            allowed=f"({heads} heads + 2 x {groups} KV heads) x {channels} channels",
        )
    if isinstance(transform, QkvStacked):
        return [merged_rows]
    return [heads * channels, groups * channels, groups * channels]


def pieces(transform: Transform, rows: Sequence[int], values: Mapping[str, Any]) -> list[Piece]:
    """The row blocks of the megatron-core tensor from top to bottom, for Hugging Face tensors of ``rows`` rows.

    Args:
        values: ``num_attention_heads``, ``num_query_groups`` and ``kv_channels``, for q, k and v.
    """
    if not isinstance(transform, QkvByGroup | QkvStacked):
        return [Piece(part, 0, count) for part, count in enumerate(rows)]
    heads, groups, channels = _attention_sizes(values)
    apart = [heads * channels, groups * channels, groups * channels]
    stacked = isinstance(transform, QkvStacked)
    if list(rows) != ([sum(apart)] if stacked else apart):
        raise ConversionError(
            "q, k, v do not have the rows of their heads",
            got=list(rows),
            allowed=f"{heads} heads, {groups} KV heads, {channels} channels each",
        )
    # Where the rows of q, k and v begin: in three tensors, or in one.
    parts, begins = ((0, 0, 0), (0, apart[0], apart[0] + apart[1])) if stacked else ((0, 1, 2), (0, 0, 0))
    sizes = (heads // groups * channels, channels, channels)
    return [
        Piece(part, begin + group * size, begin + (group + 1) * size)
        for group in range(groups)
        for part, begin, size in zip(parts, begins, sizes, strict=True)
    ]


def merge(transform: Transform, parts: Sequence[Tensor], values: Mapping[str, Any]) -> Tensor:
    """Hugging Face tensors ``[rows_i, ...]`` -> one tensor ``[sum rows_i, ...]`` in megatron-core's order."""
    blocks = pieces(transform, [part.shape[0] for part in parts], values)
    return torch.cat([parts[block.part][block.start : block.stop] for block in blocks])


def split(transform: Transform, merged: Tensor, values: Mapping[str, Any]) -> list[Tensor]:
    """The inverse of :func:`merge`, bit for bit."""
    rows = part_rows(transform, merged.shape[0], values)
    found: list[dict[int, Tensor]] = [{} for _ in rows]
    at = 0
    for block in pieces(transform, rows, values):
        found[block.part][block.start] = merged[at : at + block.stop - block.start]
        at += block.stop - block.start
    parts = ([blocks[start] for start in sorted(blocks)] for blocks in found)
    return [blocks[0] if len(blocks) == 1 else torch.cat(blocks) for blocks in parts]


def select(blocks: Iterable[Piece], wanted: Sequence[Rows]) -> Iterator[Piece]:
    """The pieces that make up rows ``wanted`` of the merged tensor, in that order."""
    located: list[tuple[int, Piece]] = []
    at = 0
    for block in blocks:
        located.append((at, block))
        at += block.stop - block.start
    for start, stop in wanted:
        for at, block in located:
            first, last = max(start, at), min(stop, at + block.stop - block.start)
            if first < last:
                yield Piece(block.part, block.start + first - at, block.start + last - at)


def _attention_sizes(values: Mapping[str, Any]) -> tuple[int, int, int]:
    heads = values["num_attention_heads"]
    groups = values["num_query_groups"] or heads
    return heads, groups, values["kv_channels"] or values["hidden_size"] // heads
