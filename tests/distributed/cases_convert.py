"""What the ranks run to show that converted checkpoints are those of megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import mindspeed_llm.core  # noqa: F401  brings megatron-core in behind its seam
from mindspeed_llm.checkpoint import export, hf_io
from mindspeed_llm.core.build import build_chunks, transformer_config
from mindspeed_llm.models.registry import family_for
from mindspeed_llm.training.initialize import initialize
from tests.distributed.cases_hf_weights import configuration, parallel_groups

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor


def load(folder: Path, converted: Path, ids: torch.Tensor | None = None, **flags: Any) -> dict[str, Any]:
    """Loads a ``torch_dist`` save by megatron-core's own reader into chunks full of NaN.

    Args:
        folder: the Hugging Face folder that says what the model is.
        ids: ``[b, s]``; with these, logits ``[b, s, v]`` are computed, which wants one process.

    Returns:
        The weights by their Hugging Face names on the first rank, what megatron-core would save, and the logits.
    """
    cfg = configuration(folder, **flags)
    initialize(cfg)
    chunks = build_chunks(cfg, transformer_config(cfg))
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    state = {name: chunk.sharded_state_dict() for name, chunk in zip(names, chunks, strict=True)}
    saved: dict[str, Any] = {}
    for value in nested_values(state):
        parts = value.build() if hasattr(value, "build") else value
        for part in nested_values(parts) if isinstance(parts, dict | list) else [parts]:
            if isinstance(part, ShardedTensor):
                saved[part.key] = part.global_shape
            elif isinstance(part, ShardedObject):
                saved[part.unique_key] = None
    loaded: Any = dist_checkpointing.load(state, str(converted))
    for name, chunk in zip(names, chunks, strict=True):
        chunk.load_state_dict(loaded[name])
    family = family_for(hf_io.read_config(folder))
    stream = export.iter_hf_weights(chunks, family, cfg, groups=parallel_groups())
    found: dict[str, Any] = {"weights": {name: tensor.clone() for name, tensor in stream}, "saved": saved}
    if ids is not None:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        with torch.no_grad():
            found["logits"] = chunks[0].eval()(ids, positions, None)
    return found
