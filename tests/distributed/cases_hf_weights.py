"""What the ranks run to show that Hugging Face weights survive every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_llm.core  # noqa: F401  brings megatron-core in behind its seam
from mindspeed_llm.checkpoint import engine, export, hf_io
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.build import build_chunks, transformer_config, wrap_ddp
from mindspeed_llm.core.groups import expert_tensor_group
from mindspeed_llm.models.registry import family_for
from mindspeed_llm.training.initialize import initialize
from mindspeed_llm.training.weights import parallel_groups

from megatron.core import parallel_state


def configuration(folder: Path, **flags: Any) -> RunConfig:
    hf_config = hf_io.read_config(folder)
    values = family_for(hf_config).config_to_values(hf_config)
    common = {
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "seq_length": 32,
        "train_iters": 1,
        "lr": 1e-3,
        "use_cpu_initialization": True,
    }
    return from_values({**values, **common, **flags}, world_size=dist.get_world_size())


def load(folder: Path, cfg: RunConfig, wrapped: bool = False) -> list[Any]:
    initialize(cfg)
    config = transformer_config(cfg)
    chunks = build_chunks(cfg, config)
    if wrapped:
        chunks = wrap_ddp(cfg, config, chunks)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    engine.load_hf_weights(
        chunks,
        family_for(hf_io.read_config(folder)),
        folder,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        etp=(expert_tensor_group().rank(), expert_tensor_group().size()),
        cfg=cfg,
    )
    return chunks


def round_trip(folder: Path, out: Path, wrapped: bool, **flags: Any) -> dict[str, Any]:
    """Loads, exports as a stream and as a folder; returns the stream of this rank and its live tensors."""
    cfg = configuration(folder, **flags)
    chunks = load(folder, cfg, wrapped)
    family = family_for(hf_io.read_config(folder))
    groups = parallel_groups()
    stream = {name: tensor.clone() for name, tensor in export.iter_hf_weights(chunks, family, cfg, groups=groups)}
    export.save_hf(chunks, family, cfg, out, dtype=torch.float32, groups=groups, source=folder, max_shard_bytes=100_000)
    live = {name: tensor.detach().clone() for name, tensor in engine.live_tensors(chunks).items()}
    return {"stream": stream, "live": live}


def logits(folder: Path, ids: torch.Tensor, **flags: Any) -> torch.Tensor:
    """``[b, s, v]`` of the loaded model on one rank. ``ids: [b, s]``."""
    chunks = load(folder, configuration(folder, **flags))
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        return chunks[0].eval()(ids, positions, None)
