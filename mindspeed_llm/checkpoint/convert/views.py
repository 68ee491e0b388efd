"""Sources that look at another source: as megatron-core's tensors, as Hugging Face's, in another padding or dtype.

Nothing is computed until it is read, and a read takes the rows and columns that were asked for from the source below.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_llm.checkpoint.hf_io import TensorInfo, TensorSource
from mindspeed_llm.checkpoint.names import NameTable, WeightEntry
from mindspeed_llm.checkpoint.transforms import part_rows, pieces, select
from mindspeed_llm.models.family import Vocab

Rows = tuple[int, int]


class Megatron:
    """Hugging Face tensors as whole megatron-core tensors, without the second copy of a tied embedding.

    Args:
        table: the weights; its ``turned`` matrices must already be seen as ``[out, in]``.
        source: holds every tensor of the table.
        values: the model's heads, and ``padded_vocab_size``: rows above the vocabulary are zero.
    """

    def __init__(self, table: NameTable, source: TensorSource, values: Mapping[str, Any]) -> None:
        self._table, self._source, self._values = table, source, values
        self.tensors: dict[str, TensorInfo] = {}
        for entry in table.entries.values():
            if entry.exported:
                parts = [source.tensors[name] for name in entry.hf]
                rows = sum(part.shape[0] for part in parts)
                if isinstance(entry.shard, Vocab):
                    rows = values["padded_vocab_size"]
                self.tensors[entry.mcore] = TensorInfo((rows, *parts[0].shape[1:]), parts[0].dtype)

    def read(self, name: str, rows: Rows | None = None, columns: Rows | None = None) -> Tensor:
        """See :class:`TensorSource`."""
        entry, info = self._table.entries[name], self.tensors[name]
        wanted = rows or (0, info.shape[0])
        held = [self._source.tensors[part].shape[0] for part in entry.hf]
        blocks = select(pieces(entry.transform, held, self._values), [wanted])
        found = [self._source.read(entry.hf[block.part], (block.start, block.stop), columns) for block in blocks]
        return _padded(found, info, wanted, columns)


class HuggingFace:
    """Whole megatron-core tensors as Hugging Face's, without vocabulary padding and tied copies.

    Args:
        table: the weights; ``turned`` matrices are still seen as ``[out, in]``.
        source: holds every exported tensor of the table.
        values: the model's heads, and ``vocab_size``.
    """

    def __init__(self, table: NameTable, source: TensorSource, values: Mapping[str, Any]) -> None:
        self._source = source
        self._parts: dict[str, _Part] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for entry in table.entries.values():
            if entry.exported:
                info = source.tensors[entry.mcore]
                merged = values["vocab_size"] if isinstance(entry.shard, Vocab) else info.shape[0]
                counts = part_rows(entry.transform, merged, values)
                for name, count, part in zip(entry.hf, counts, _located(entry, counts, values), strict=True):
                    self._parts[name] = part
                    self.tensors[name] = TensorInfo((count, *info.shape[1:]), info.dtype)

    def read(self, name: str, rows: Rows | None = None, columns: Rows | None = None) -> Tensor:
        """See :class:`TensorSource`."""
        part = self._parts[name]
        start, stop = rows or (0, self.tensors[name].shape[0])
        found: list[Tensor] = []
        block = bisect_right(part.starts, start) - 1
        while start < stop:
            end = part.starts[block + 1] if block + 1 < len(part.starts) else stop
            at = part.merged[block] + start - part.starts[block]
            count = min(end, stop) - start
            found.append(self._source.read(part.mcore, (at, at + count), columns))
            start, block = start + count, block + 1
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True)
class _Part:
    """Where the row blocks of one Hugging Face tensor begin, in itself (ascending) and in the merged tensor."""

    mcore: str
    starts: Sequence[int]
    merged: Sequence[int]


def _located(entry: WeightEntry, counts: Sequence[int], values: Mapping[str, Any]) -> Iterable[_Part]:
    begins: list[dict[int, int]] = [{} for _ in counts]
    at = 0
    for block in pieces(entry.transform, counts, values):
        begins[block.part][block.start] = at
        at += block.stop - block.start
    for blocks in begins:
        starts = sorted(blocks)
        yield _Part(entry.mcore, starts, [blocks[start] for start in starts])


class Repadded:
    """Whole megatron-core tensors with another number of rows above the vocabulary.

    Args:
        table: says which tensors have rows of the vocabulary.
        source: of the tensors; others than the table's are left out.
        values: ``vocab_size`` and ``padded_vocab_size``.
    """

    def __init__(self, table: NameTable, source: TensorSource, values: Mapping[str, Any]) -> None:
        self._source, self._vocab = source, values["vocab_size"]
        self.tensors: dict[str, TensorInfo] = {}
        for entry in table.entries.values():
            if entry.exported:
                info = source.tensors[entry.mcore]
                if isinstance(entry.shard, Vocab):
                    info = TensorInfo((values["padded_vocab_size"], *info.shape[1:]), info.dtype)
                self.tensors[entry.mcore] = info

    def read(self, name: str, rows: Rows | None = None, columns: Rows | None = None) -> Tensor:
        """See :class:`TensorSource`."""
        info = self.tensors[name]
        if info.shape == self._source.tensors[name].shape:
            return self._source.read(name, rows, columns)
        start, stop = rows or (0, info.shape[0])
        held = min(stop, self._vocab)
        found = [self._source.read(name, (start, held), columns)] if start < held else []
        return _padded(found, info, (start, stop), columns)


def _padded(found: list[Tensor], info: TensorInfo, rows: Rows, columns: Rows | None) -> Tensor:
    missing = rows[1] - rows[0] - sum(part.shape[0] for part in found)
    if missing:
        width = info.shape[1:] if columns is None else (columns[1] - columns[0],)
        found.append(torch.zeros((missing, *width), dtype=info.dtype))
    return found[0] if len(found) == 1 else torch.cat(found)
