"""Whole tensors into a per-rank tree, as Megatron-LM's ``--ckpt-format torch`` has it."""

# pyright: basic
# What a pickle holds has no type.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_llm.checkpoint.convert.legacy_archive import Later, TensorArchive
from mindspeed_llm.checkpoint.convert.legacy_args import namespace
from mindspeed_llm.checkpoint.convert.legacy_folders import FILE
from mindspeed_llm.checkpoint.convert.legacy_layout import (
    EMBEDDING,
    LAYER,
    OUTPUT,
    chunk_sizes,
    layer_places,
    rank_folder,
    shards_of,
)
from mindspeed_llm.checkpoint.convert.legacy_spelling import sequential_name, transformer_engine_name
from mindspeed_llm.checkpoint.convert.record import sections
from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.checkpoint.durable import sync_path
from mindspeed_llm.checkpoint.hf_io import TensorInfo
from mindspeed_llm.checkpoint.layout import local_columns, local_rows
from mindspeed_llm.checkpoint.names import NameTable
from mindspeed_llm.errors import CheckpointError

TransformerImpl = Literal["local", "transformer_engine"]


@dataclass(frozen=True)
class _Spot:
    """One tensor in the files of a stage and an expert-parallel rank, and what is to come of it for each
    tensor-parallel rank."""

    stage: int
    ep: int
    chunk: int
    key: str
    parts: tuple[Later, ...]


class LegacySink:
    """Writes one tree; see :class:`~.streams.TensorSink`. A tied output layer is written where a stage needs a copy.

    Args:
        folder: empty; what the ``mp_rank_*`` folders are to be in.
        tensors: all weights of the model, by global name, in the order in which they come.
        table: the weights of the model, which says how they are cut.
        target: the layout.
        values: the model, as fields of the run configuration.
        transformer_impl: whose names the norms have.
        iteration: of the save.

    Raises:
        ConversionError: the layout does not fit the model.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorInfo],
        *,
        table: NameTable,
        target: Target,
        values: Mapping[str, Any],
        transformer_impl: TransformerImpl = "local",
        iteration: int,
    ) -> None:
        self._folder, self._tensors, self._shards, self._target = folder, tensors, shards_of(table), target
        self._order, self._at, self._row = list(tensors), 0, 0
        layers = values["num_layers"]
        self._chunks = len(chunk_sizes(target, layers + len(target.noop_layers))) // target.pp
        self._experts = {name: entry.expert for name, entry in table.entries.items()}
        self._local_experts = (values["num_moe_experts"] or 0) // target.ep
        self._spots = self._place(layers, transformer_impl)
        counted: Counter[torch.dtype] = Counter()
        for info in tensors.values():
            counted[info.dtype] += torch.Size(info.shape).numel()
        dtype = counted.most_common(1)[0][0]
        self._args = namespace(
            values, target, dtype=dtype, chunks=self._chunks, transformer_impl=transformer_impl, iteration=iteration
        )
        self._iteration, self._values = iteration, values
        self._files: dict[tuple[int, int, int], TensorArchive] = {}

    def _place(self, layers: int, transformer_impl: TransformerImpl) -> dict[str, list[_Spot]]:
        places = layer_places(self._target, layers)
        ends = {True: (0, 0), False: (self._target.pp - 1, self._chunks - 1)}
        spots: dict[str, list[_Spot]] = {}
        for name in self._tensors:
            spelled = transformer_engine_name(name, self._tensors) if transformer_impl != "local" else name
            match = LAYER.fullmatch(spelled)
            if match is None:
                spots[name] = self._everywhere(*ends[name.startswith("embedding.")], spelled, name)
                continue
            place = places[int(match[1])]
            key, expert = f"decoder.layers.{place.slot}.{match[2]}", self._experts[name]
            if expert is None:
                spots[name] = self._everywhere(place.stage, place.chunk, key, name)
            else:
                rank, local = divmod(expert, self._local_experts)
                key = sequential_name(key, local)
                spots[name] = [_Spot(place.stage, rank, place.chunk, key, self._parts(name))]
        if OUTPUT not in self._tensors and ends[True] != ends[False]:
            spots[EMBEDDING] += self._everywhere(*ends[False], OUTPUT, EMBEDDING)
        return spots

    def _everywhere(self, stage: int, chunk: int, key: str, name: str) -> list[_Spot]:
        """A tensor of which every expert-parallel rank has a copy."""
        return [_Spot(stage, ep, chunk, key, self._parts(name)) for ep in range(self._target.ep)]

    def _parts(self, name: str) -> tuple[Later, ...]:
        """Shapes of what each tensor-parallel rank holds."""
        rule, info, size = self._shards[name], self._tensors[name], self._target.tp
        parts: list[Later] = []
        for rank in range(size):
            shape = list(info.shape)
            shape[0] = sum(stop - start for start, stop in local_rows(rule, shape[0], rank, size))
            if (columns := local_columns(rule, shape[-1], rank, size)) is not None:
                shape[1] = columns[1] - columns[0]
            parts.append(Later(TensorInfo(tuple(shape), info.dtype)))
        return tuple(parts)

    def write(self, name: str, tensor: Tensor, start: int = 0) -> None:
        """See :class:`~.streams.TensorSink`."""
        expected = self._order[self._at] if self._at < len(self._order) else None
        info = self._tensors.get(name)
        if name != expected or info is None or start != self._row or tuple(tensor.shape[1:]) != info.shape[1:]:
            raise CheckpointError(
                f"tensor out of plan: {name} {tuple(tensor.shape)} at {start}", allowed=f"{expected} at {self._row}"
            )
        rule, stop = self._shards[name], start + tensor.shape[0]
        for rank in range(self._target.tp):
            columns = local_columns(rule, info.shape[-1], rank, self._target.tp)
            for first, last in local_rows(rule, info.shape[0], rank, self._target.tp):
                low, high = max(first, start), min(last, stop)
                if low < high:
                    rows = tensor[low - start : high - start]
                    self._append(name, rank, rows if columns is None else rows[:, columns[0] : columns[1]])
        self._row = stop
        if self._row >= info.shape[0]:
            self._at, self._row = self._at + 1, 0

    def _append(self, name: str, rank: int, rows: Tensor) -> None:
        for spot in self._spots[name]:
            self._file(rank, spot.stage, spot.ep).write(spot.parts[rank], rows)

    def _file(self, tp: int, stage: int, ep: int) -> TensorArchive:
        """The file of a rank; it begins with all but the tensors' elements."""
        if (tp, stage, ep) not in self._files:
            path = self._folder / rank_folder(self._target, tp, stage, ep) / FILE
            path.parent.mkdir()
            models: list[dict[str, Later]] = [{} for _ in range(self._chunks)]
            for spots in self._spots.values():
                for spot in spots:
                    if (spot.stage, spot.ep) == (stage, ep):
                        models[spot.chunk][spot.key] = spot.parts[tp]
            named = {f"model{number}": model for number, model in enumerate(models)}
            content = {
                "args": self._args,
                "checkpoint_version": 3.0,
                "iteration": self._iteration,
                "config": sections(self._values),
                **({"model": models[0]} if self._chunks == 1 else named),
            }
            self._files[tp, stage, ep] = TensorArchive(path, content)
        return self._files[tp, stage, ep]

    def finish(self) -> None:
        """See :class:`~.streams.TensorSink`."""
        if self._at != len(self._order):
            raise CheckpointError("not every planned tensor was written", got=self._order[self._at])
        target = self._target
        for tp, stage, ep in product(range(target.tp), range(target.pp), range(target.ep)):
            self._file(tp, stage, ep).finish()
            sync_path(self._folder / rank_folder(target, tp, stage, ep))
        sync_path(self._folder)

    def abandon(self) -> None:
        """See :class:`~.streams.TensorSink`."""
        for file in self._files.values():
            file.abandon()
