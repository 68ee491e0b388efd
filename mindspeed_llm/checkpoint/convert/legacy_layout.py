"""On which stage of a per-rank tree each layer is, and what its ranks are called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.checkpoint.names import NameTable
from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Shard

EMBEDDING, OUTPUT, FINAL_NORM = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
)
EXPERT = re.compile(r"(.+\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def shards_of(table: NameTable) -> dict[str, Shard]:
    """How each tensor of a model is cut; a tied output layer is none."""
    return {name: entry.shard for name, entry in table.entries.items() if entry.exported}


def rank_folder(target: Target, tp: int, pp: int, ep: int = 0) -> str:
    """The name of the folder of one rank."""
    stage = f"_{pp:03d}" if target.pp > 1 else ""
    expert = f"_{ep:03d}" if target.ep > 1 else ""
    return f"mp_rank_{tp:02d}{stage}{expert}"


@dataclass(frozen=True, order=True)
class Place:
    """Where a layer is: on which stage, in which of its chunks, and which of the chunk's."""

    stage: int
    chunk: int
    slot: int


def chunk_sizes(target: Target, places: int) -> list[int]:
    """Places of every chunk in the order of the model: the first chunk of each stage, then the second of each.

    Args:
        places: for layers, those without one (``noop_layers``) among them.

    Raises:
        ConversionError: places would be left over.
    """
    if target.layer_list is not None:
        sizes = list(target.layer_list)
    else:
        size = target.layers_per_virtual_stage or places // target.pp
        sizes = [size] * (places // size // target.pp * target.pp) if size > 0 else []
    if sum(sizes) != places or len(sizes) % target.pp:
        raise ConversionError("the layout does not place every layer", got=f"{sum(sizes)} of {places}: {target}")
    return sizes


def layer_places(target: Target, layers: int) -> list[Place]:
    """The place of each layer.

    Raises:
        ConversionError: layers would be left over.
    """
    places: list[Place] = []
    at = 0
    for number, size in enumerate(chunk_sizes(target, layers + len(target.noop_layers))):
        chunk, stage = divmod(number, target.pp)
        places += [Place(stage, chunk, slot) for slot in range(size) if at + slot not in target.noop_layers]
        at += size
    if len(places) != layers:
        raise ConversionError("places without a layer are not places of the model", got=target.noop_layers)
    return places
