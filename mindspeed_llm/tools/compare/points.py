"""Where two sides are compared: a module of ours and those of transformers that compute the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mindspeed_llm.checkpoint.layout import unshard
from mindspeed_llm.checkpoint.names import NameTable, WeightEntry
from mindspeed_llm.checkpoint.transforms import split
from mindspeed_llm.models.family import Column, Copy, Replicated, Row, Shard, Transform, Vocab

WHOLE, SAME = Replicated(), Copy()
_WORD_EMBEDDINGS = "embedding.word_embeddings"
HEAD = "output_layer"
"""Logits as the loss reads them: scaled or capped, if the family does that."""
_INSIDE_A_LAYER = re.compile(r"decoder\.layers\.\d+(\..+)?")


@dataclass(frozen=True)
class Point:
    """One tensor of a forward pass, under both names.

    Attributes:
        ours: the module whose output it is, or ``input of MODULE``; layers are counted over the whole model.
        hf: the modules of transformers whose outputs (inputs) together are the same numbers.
        shard: how tensor-parallel ranks hold its features: all of them, or by the columns of a weight.
        transform: how ours is made of transformers'.
    """

    ours: str
    hf: tuple[str, ...]
    shard: Shard = WHOLE
    transform: Transform = SAME

    def whole(self, parts: list[Tensor], values: Mapping[str, Any]) -> dict[str, Tensor]:
        """What transformers would have, by its names.

        Args:
            parts: ``[b, s, ...]`` of each tensor-parallel rank; one tensor where it is not cut.
            values: fields that describe the model.

        Raises:
            ConversionError: the features are not those of the transform.
        """
        # Weights are cut and merged over their rows, which are an output's features.
        rows = unshard(self.shard, [part.flatten(2).permute(2, 0, 1) for part in parts])
        if isinstance(self.shard, Vocab):
            rows = rows[: values["vocab_size"]]
        pieces = split(self.transform, rows, values)
        return {name: piece.permute(1, 2, 0) for name, piece in zip(self.hf, pieces, strict=True)}


ROTARY = Point("rotary_pos_emb", ("model.rotary_emb",))
"""Cosines and sines of the positions, the same for every sequence."""


def points(table: NameTable) -> dict[str, Point]:
    """Every point of a model by our name: modules with weights, what row-parallel ones are given, and what contains
    such modules on both sides."""
    found = {ROTARY.ours: ROTARY}
    for entry in table.entries.values():
        for point in _of_weight(entry, table):
            found.setdefault(point.ours, point)
    for ours, hf in _containers(table):
        found.setdefault(ours, Point(ours, (hf,)))
    return found


def _module(weight: str) -> str:
    return weight.rpartition(".")[0]


def _hf_modules(entry: WeightEntry, table: NameTable) -> tuple[str, ...]:
    names = entry.hf if entry.exported else [name for name, source in table.tied.items() if source in entry.hf]
    return tuple(map(_module, names))


def _of_weight(entry: WeightEntry, table: NameTable) -> Iterator[Point]:
    ours, hf = _module(entry.mcore), _hf_modules(entry, table)
    if ours == _WORD_EMBEDDINGS:
        # Its own output has its axes turned or not, depending on the layout; that of the module around it has not.
        yield Point(_module(ours), hf)
        return
    cut = isinstance(entry.shard, Column) or ours == HEAD
    yield Point(ours, hf, entry.shard if cut else WHOLE, entry.transform)
    if isinstance(entry.shard, Row):
        yield Point(f"input of {ours}", tuple(f"input of {name}" for name in hf), Column())


def _containers(table: NameTable) -> Iterator[tuple[str, str]]:
    """Modules inside a layer, and layers, of which all parts belong to one module of transformers."""
    around: dict[str, set[str]] = {}
    for entry in table.entries.values():
        ours, hf = _module(entry.mcore), set(_hf_modules(entry, table))
        while _INSIDE_A_LAYER.fullmatch(ours := _module(ours)):
            hf = set(map(_module, hf))
            around.setdefault(ours, set()).update(hf)
    yield from ((ours, hf.pop()) for ours, hf in around.items() if len(hf) == 1)
