"""A family's weight table, written out for one depth: which tensor is called what on either side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.models.family import Drop, ModelFamily, ParamMap, Shard, Transform

_LAYER = "{l}"


@dataclass(frozen=True)
class WeightEntry:
    """One megatron-core tensor (its global name, layers counted over the whole model) and what it is made of.

    ``transposed``: see :class:`~mindspeed_llm.models.family.ParamMap`. ``exported`` is false for the second copy of a
    tied embedding: it is filled, but not written.
    """

    mcore: str
    hf: tuple[str, ...]
    transform: Transform
    shard: Shard
    transposed: bool = False
    exported: bool = True


@dataclass(frozen=True)
class NameTable:
    """All weights of one model.

    Args:
        entries: by megatron-core name, in the order in which weights are streamed.
        tied: Hugging Face names that may stand on disk although they are ties, and the name they must equal.
        dropped: patterns of Hugging Face names that are read by nobody.
    """

    entries: Mapping[str, WeightEntry]
    tied: Mapping[str, str]
    dropped: tuple[re.Pattern[str], ...]

    def hf_names(self) -> list[str]:
        """Every name that a complete checkpoint has, in streaming order."""
        return [name for entry in self.entries.values() if entry.exported for name in entry.hf]

    def turned(self) -> list[str]:
        """Hugging Face names of matrices that stand as ``[in, out]``."""
        return [name for entry in self.entries.values() if entry.transposed for name in entry.hf]

    def is_dropped(self, hf_name: str) -> bool:
        """Whether the tensor is one that checkpoints may carry and nobody needs."""
        return any(pattern.fullmatch(hf_name) for pattern in self.dropped)


def compile_names(family: ModelFamily, values: Mapping[str, Any]) -> NameTable:
    """The table of ``family`` for one model.

    Args:
        values: ``num_layers``, ``untie_embeddings_and_output_weights``, and what ``when`` in the table names.
    """
    maps = [weight for weight in family.weights if isinstance(weight, ParamMap)]
    maps = [weight for weight in maps if weight.when is None or values[weight.when]]
    by_mcore = {weight.mcore: weight for weight in maps}
    entries: dict[str, WeightEntry] = {}
    tied: dict[str, str] = {}
    for weight, layer in _in_order(maps, values["num_layers"]):
        source, exported = weight, True
        if weight.tied_to is not None and not values["untie_embeddings_and_output_weights"]:
            source, exported = by_mcore[weight.tied_to], False
            tied.update(zip(weight.hf, source.hf, strict=True))
        name = weight.mcore.replace(_LAYER, layer)
        hf = tuple(hf_name.replace(_LAYER, layer) for hf_name in source.hf)
        entries[name] = WeightEntry(name, hf, source.transform, source.shard, source.transposed, exported)
    dropped = tuple(
        re.compile(re.escape(weight.hf).replace(re.escape(_LAYER), r"\d+"))
        for weight in family.weights
        if isinstance(weight, Drop)
    )
    return NameTable(entries, tied, dropped)


def _in_order(maps: Iterable[ParamMap], num_layers: int) -> Iterable[tuple[ParamMap, str]]:
    """Embedding first, then layer by layer, then the rest."""
    plain = [weight for weight in maps if _LAYER not in weight.mcore]
    layered = [weight for weight in maps if _LAYER in weight.mcore]
    first = [weight for weight in plain if weight.mcore.startswith("embedding.")]
    yield from ((weight, "") for weight in first)
    for layer in range(num_layers):
        yield from ((weight, str(layer)) for weight in layered)
    yield from ((weight, "") for weight in plain if weight not in first)
