"""A family's weight table, written out for one depth: which tensor is called what on either side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.config.layers import layers_of_experts
from mindspeed_llm.models.family import Drop, ModelFamily, ParamMap, Shard, Transform

_LAYER, _EXPERT = "{l}", "{e}"


@dataclass(frozen=True)
class WeightEntry:
    """One megatron-core tensor (its global name, layers counted over the whole model) and what it is made of.

    ``transposed``: see :class:`~mindspeed_llm.models.family.ParamMap`. ``exported`` is false for the second copy of a
    tied embedding: it is filled, but not written. ``expert``: the one that the tensor belongs to, counted over the
    whole model; its ``shard`` is then over expert-tensor-parallel ranks.
    """

    mcore: str
    hf: tuple[str, ...]
    transform: Transform
    shard: Shard
    transposed: bool = False
    exported: bool = True
    expert: int | None = None
    trained: bool = True


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
        values: ``num_layers``, ``untie_embeddings_and_output_weights``, ``num_moe_experts`` of a mixture, and what
            ``when`` in the table names.
    """
    maps = [weight for weight in family.weights if isinstance(weight, ParamMap)]
    maps = [weight for weight in maps if weight.when is None or values[weight.when]]
    maps = [weight for weight in maps if weight.unless is None or not values[weight.unless]]
    by_mcore = {weight.mcore: weight for weight in maps}
    entries: dict[str, WeightEntry] = {}
    tied: dict[str, str] = {}
    for weight, layer, expert in _in_order(maps, values):
        source, exported = weight, True
        if weight.tied_to is not None and not values["untie_embeddings_and_output_weights"]:
            source, exported = by_mcore[weight.tied_to], False
            tied.update(zip(weight.hf, source.hf, strict=True))
        name, *hf = (text.replace(_LAYER, layer).replace(_EXPERT, str(expert)) for text in (weight.mcore, *source.hf))
        entries[name] = WeightEntry(
            name,
            tuple(hf),
            source.transform,
            source.shard,
            source.transposed,
            exported,
            expert,
            source.trained,
        )
    dropped = tuple(
        re.compile(re.escape(weight.hf).replace(re.escape(_LAYER), r"\d+"))
        for weight in family.weights
        if isinstance(weight, Drop)
    )
    return NameTable(entries, tied, dropped)


def _in_order(maps: Iterable[ParamMap], values: Mapping[str, Any]) -> Iterable[tuple[ParamMap, str, int | None]]:
    """Embedding first, then layer by layer, in a layer expert by expert, then the rest."""
    plain = [weight for weight in maps if _LAYER not in weight.mcore]
    layered = [weight for weight in maps if _LAYER in weight.mcore]
    first = [weight for weight in plain if weight.mcore.startswith("embedding.")]
    mixed = layers_of_experts(values)
    yield from ((weight, "", None) for weight in first)
    for layer in range(values["num_layers"]):
        kinds = [weight for weight in layered if weight.experts in (None, mixed[layer])]
        yield from ((weight, str(layer), None) for weight in kinds if _EXPERT not in weight.mcore)
        for expert in range(values["num_moe_experts"] if mixed[layer] else 0):
            yield from ((weight, str(layer), expert) for weight in kinds if _EXPERT in weight.mcore)
    yield from ((weight, "", None) for weight in plain if weight not in first)
