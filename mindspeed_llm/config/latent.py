"""Multi-head latent attention: what follows from its sizes, and what must hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import ConfigError


def latent_scale(channels: int, factor: float | None, mscale_all_dim: float | None) -> float | None:
    """Factor on the scores: the inverse root of a query's channels, times yarn's temperature squared where it acts on
    all channels [Peng et al. 2023, section 3.4; DeepSeek-V2's code]; None: the inverse root alone."""
    if not mscale_all_dim or not factor or factor <= 1:
        return None
    return (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2 * channels**-0.5


def latent_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an attention over latents that nobody needs to give."""
    if not values["multi_latent_attention"]:
        return {}
    changes = {"kv_channels": values["v_head_dim"], "num_query_groups": values["num_attention_heads"]}
    if values["softmax_scale"] is None and values["rope_scaling_type"] == "yarn":
        channels = values["qk_head_dim"] + values["qk_pos_emb_head_dim"]
        scale = latent_scale(channels, values["rope_scaling_factor"], values["rope_scaling_mscale_all_dim"])
        changes["softmax_scale"] = scale
    return changes


def latent_attention_is_whole(cfg: RunConfig) -> Iterator[ConfigError]:
    """Latents have sizes and rotary positions, and under tensor parallelism sequence parallelism beside them."""
    m, t = cfg.model, cfg.transformer
    if not t.multi_latent_attention:
        given = [f"--{name.replace('_', '-')}" for name in ("kv_lora_rank", "q_lora_rank") if cfg.value(name)]
        if given:
            yield ConfigError(f"{' and '.join(given)}: of latent attention", fix="--multi-latent-attention")
        return
    sizes = {
        "--kv-lora-rank": m.kv_lora_rank,
        "--q-lora-rank": 1 if m.q_lora_rank is None else m.q_lora_rank,
        "--qk-head-dim": m.qk_head_dim,
        "--qk-pos-emb-head-dim": m.qk_pos_emb_head_dim,
        "--v-head-dim": m.v_head_dim,
    }
    for flag, size in sizes.items():
        if size is None or size < 1:
            yield ConfigError(f"--multi-latent-attention needs a {flag}", got=size, allowed="1 or more")
    if m.position_embedding_type != "rope" or m.qk_pos_emb_head_dim % 2:
        yield ConfigError(
            "latent attention turns pairs of channels",
            got=f"{m.position_embedding_type}, --qk-pos-emb-head-dim {m.qk_pos_emb_head_dim}",
            fix="--position-embedding-type rope and an even --qk-pos-emb-head-dim",
        )
    if m.rotary_base_local is not None or m.qk_norm_over_heads or t.add_qkv_bias or m.rotary_percent != 1.0:
        yield ConfigError(
            "latent attention has one rotary base, norms on its latents, no biases, and turns all its rotary channels",
            fix="leave out --rotary-base-local, --qk-norm-over-heads, --add-qkv-bias, --rotary-percent",
        )
    if t.tensor_model_parallel_size > 1 and not t.sequence_parallel:
        yield ConfigError(
            "latents are the same on all tensor-parallel ranks, and megatron-core counts their gradients once only with"
            " sequence parallelism",
            fix="add --sequence-parallel",
        )
