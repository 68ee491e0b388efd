"""The whole tensor <-> the part that one tensor-parallel rank holds.

megatron-core cuts ``linear_qkv`` plainly over dim 0 also when there are fewer KV heads than ranks (its attention
gathers the rows again), so queries, keys and values need no rule of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Column, Replicated, Row, Shard, Vocab

Rows = tuple[int, int]


def global_shape(rule: Shard, local: Sequence[int], tp_size: int) -> list[int]:
    """Shape of the whole tensor, of which a rank holds ``local``; vocabulary padding included."""
    shape = list(local)
    if not isinstance(rule, Replicated):
        shape[1 if isinstance(rule, Row) else 0] *= tp_size
    return shape


def local_rows(rule: Shard, total: int, tp_rank: int, tp_size: int) -> list[Rows]:
    """Row ranges of a tensor of ``total`` rows that rank ``tp_rank`` holds, in its order.

    Raises:
        ConversionError: the rows do not divide.
    """
    if not isinstance(rule, Column | Vocab):
        return [(0, total)]
    parts = rule.parts if isinstance(rule, Column) else 1
    if total % (parts * tp_size):
        raise ConversionError(
            "rows do not divide over the tensor-parallel ranks", got=f"{total} rows, {parts} parts, TP {tp_size}"
        )
    whole, size = total // parts, total // parts // tp_size
    return [(part * whole + tp_rank * size, part * whole + (tp_rank + 1) * size) for part in range(parts)]


def local_columns(rule: Shard, total: int, tp_rank: int, tp_size: int) -> Rows | None:
    """Range of dim 1 that rank ``tp_rank`` holds, or None for all of it."""
    if not isinstance(rule, Row):
        return None
    if total % tp_size:
        raise ConversionError("columns do not divide over the tensor-parallel ranks", got=f"{total}, TP {tp_size}")
    size = total // tp_size
    return tp_rank * size, (tp_rank + 1) * size


def shard(rule: Shard, whole: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """What rank ``tp_rank`` holds of ``whole`` (for a vocabulary: of the padded tensor)."""
    columns = local_columns(rule, whole.shape[1], tp_rank, tp_size) if isinstance(rule, Row) else None
    if columns is not None:
        return whole[:, columns[0] : columns[1]]
    return torch.cat([whole[start:stop] for start, stop in local_rows(rule, whole.shape[0], tp_rank, tp_size)])


def unshard(rule: Shard, locals_: Sequence[Tensor]) -> Tensor:
    """The inverse of :func:`shard`: the whole tensor from those of all ranks, in rank order."""
    if isinstance(rule, Replicated) or len(locals_) == 1:
        return locals_[0]
    if isinstance(rule, Row):
        return torch.cat(list(locals_), dim=1)
    parts = rule.parts if isinstance(rule, Column) else 1
    chunks = [local.chunk(parts) for local in locals_]
    return torch.cat([chunk[part] for part in range(parts) for chunk in chunks])
