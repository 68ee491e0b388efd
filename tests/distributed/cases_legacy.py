"""What the ranks run to leave a per-rank tree as Megatron-LM does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import mindspeed_llm.core  # noqa: F401  brings megatron-core in behind its seam
from mindspeed_llm.config.run import RunConfig
from tests.distributed.cases_hf_weights import configuration, load

from megatron.core import parallel_state


def save_tree(folder: Path, out: Path, **flags: Any) -> None:
    """The weights of ``folder`` in megatron-core's model, saved under the names of Megatron-LM 0.16.1's
    ``get_checkpoint_name``, with what its ``generate_state_dict`` puts beside them.

    Args:
        folder: a Hugging Face folder.
        out: the folder of the save.
        flags: the layout.
    """
    cfg = configuration(folder, **flags)
    chunks = load(folder, cfg)
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    models = [chunk.state_dict_for_save_checkpoint() for chunk in chunks]
    state: dict[str, Any] = {"args": arguments(cfg), "checkpoint_version": 3.0, "iteration": 7}
    state |= {"model": models[0]} if len(models) == 1 else {f"model{i}": model for i, model in enumerate(models)}
    state["optimizer"] = {"state": {0: {"exp_avg": torch.ones(9)}}, "param_groups": [{"lr": 1e-3}]}
    state["rng_state"] = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}]
    (out / name).mkdir(parents=True)
    torch.save(state, out / name / "model_optim_rng.pt")
    dist.barrier()


def arguments(cfg: RunConfig, **more: Any) -> argparse.Namespace:
    """Megatron-LM's command line for the model of ``cfg`` in this layout."""
    t = cfg.transformer
    return argparse.Namespace(
        tensor_model_parallel_size=t.tensor_model_parallel_size,
        pipeline_model_parallel_size=t.pipeline_model_parallel_size,
        expert_model_parallel_size=1,
        num_layers=t.num_layers,
        hidden_size=t.hidden_size,
        ffn_hidden_size=t.ffn_hidden_size,
        num_attention_heads=t.num_attention_heads,
        num_query_groups=t.num_query_groups,
        group_query_attention=True,
        swiglu=True,
        add_bias_linear=t.add_bias_linear,
        add_qkv_bias=t.add_qkv_bias,
        norm_epsilon=t.layernorm_epsilon,
        normalization="RMSNorm",
        padded_vocab_size=cfg.model.padded_vocab_size,
        untie_embeddings_and_output_weights=cfg.model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=1000000,
        params_dtype=torch.float32,
        rope_scaling_factor=8.0,
        **more,
    )
