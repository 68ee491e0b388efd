"""Tensors that hold all experts of a layer, ``[experts, ...]``, and those that a family's table makes of them.

The table names a part of one: ``NAME[3]`` is that of expert 3, ``NAME[3][0::2]`` every second entry of its last axis
from the first on (GPT-OSS keeps gate and up in turn).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_llm.checkpoint.hf_io import TensorInfo, TensorSource, Turned
from mindspeed_llm.checkpoint.names import NameTable

_PART = re.compile(r"(.+?)\[(\d+)\](?:\[(\d+)::(\d+)\])?")
Rows = tuple[int, int]


class _Part(NamedTuple):
    """Of the tensor ``whole`` expert ``expert``, and of its last axis the entries ``start::step``."""

    whole: str
    expert: int
    start: int
    step: int


def _parse(name: str) -> _Part | None:
    match = _PART.fullmatch(name)
    if match is None:
        return None
    return _Part(match[1], int(match[2]), int(match[3] or 0), int(match[4] or 1))


def stored_name(name: str) -> str:
    """The tensor that ``name`` of a table is, or is a part of."""
    part = _parse(name)
    return name if part is None else part.whole


def as_planned(source: TensorSource, table: NameTable) -> TensorSource:
    """Stored Hugging Face tensors by the names of ``table``, matrices as ``[out, in]``."""
    return Turned(_Apart(source, table.hf_names()), table.turned())


def as_stored(source: TensorSource, table: NameTable) -> TensorSource:
    """The inverse of :func:`as_planned`."""
    return _Together(Turned(source, table.turned()))


def stored_tensors(planned: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Names and shapes of what is stored, for those of a table, in the same order."""
    result: dict[str, TensorInfo] = {}
    for name, info in planned.items():
        part = _parse(name)
        if part is None:
            result[name] = info
            continue
        experts = max(part.expert + 1, result[part.whole].shape[0] if part.whole in result else 0)
        result[part.whole] = TensorInfo((experts, *info.shape[:-1], info.shape[-1] * part.step), info.dtype)
    return result


def join(tensors: Iterable[tuple[str, Tensor]], table: NameTable) -> Iterator[tuple[str, Tensor]]:
    """Tensors by the names of ``table`` as what is stored; those of all experts appear with their last part."""
    missing: dict[str, set[_Part]] = {}
    for part in filter(None, map(_parse, table.hf_names())):
        missing.setdefault(part.whole, set()).add(part)
    wholes: dict[str, Tensor] = {}
    for name, tensor in tensors:
        part = _parse(name)
        if part is None:
            yield name, tensor
            continue
        if part.whole not in wholes:
            experts = 1 + max(other.expert for other in missing[part.whole])
            wholes[part.whole] = tensor.new_empty(experts, *tensor.shape[:-1], tensor.shape[-1] * part.step)
        wholes[part.whole][part.expert, ..., part.start :: part.step] = tensor
        missing[part.whole].remove(part)
        if not missing[part.whole]:
            yield part.whole, wholes.pop(part.whole)


class _Apart:
    """A source in which the parts ``names`` of stacked tensors are seen instead of those."""

    def __init__(self, source: TensorSource, names: Iterable[str]) -> None:
        self._source = source
        self.tensors = dict(source.tensors)
        self._parts: dict[str, _Part] = {}
        for name in names:
            part = _parse(name)
            if part is None or part.whole not in source.tensors:
                continue
            info = source.tensors[part.whole]
            self.tensors.pop(part.whole, None)
            if part.expert < info.shape[0] and len(info.shape) > 1:
                self.tensors[name] = TensorInfo((*info.shape[1:-1], info.shape[-1] // part.step), info.dtype)
                self._parts[name] = part

    def read(self, name: str, rows: Rows | None = None, columns: Rows | None = None) -> Tensor:
        """See :class:`TensorSource`."""
        part = self._parts.get(name)
        if part is None:
            return self._source.read(name, rows, columns)
        whole = self._source.read(part.whole, (part.expert, part.expert + 1))[0]
        return _cut(whole[..., part.start :: part.step], rows, columns)


class _Together:
    """A source in which the stacked tensors are seen instead of their parts."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.tensors = stored_tensors(source.tensors)
        self._names: dict[str, list[list[tuple[str, _Part]]]] = {}
        for name in source.tensors:
            part = _parse(name)
            if part is not None:
                experts = self._names.setdefault(part.whole, [[] for _ in range(self.tensors[part.whole].shape[0])])
                experts[part.expert].append((name, part))

    def read(self, name: str, rows: Rows | None = None, columns: Rows | None = None) -> Tensor:
        """See :class:`TensorSource`."""
        if name not in self._names:
            return self._source.read(name, rows, columns)
        info = self.tensors[name]
        first, last = rows or (0, info.shape[0])
        result = torch.empty(last - first, *info.shape[1:], dtype=info.dtype)
        for expert in range(first, last):
            for piece, part in self._names[name][expert]:
                result[expert - first, ..., part.start :: part.step] = self._source.read(piece)
        return _cut(result, None, columns)


def _cut(tensor: Tensor, rows: Rows | None, columns: Rows | None) -> Tensor:
    tensor = tensor if rows is None else tensor[slice(*rows)]
    return tensor if columns is None else tensor[:, slice(*columns)]
