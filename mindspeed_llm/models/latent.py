"""Rules and weights of multi-head latent attention, as DeepSeek's configurations say it."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.config.latent import latent_scale
from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Column, Derived, ParamMap, Row, Values
from mindspeed_llm.models.rope import rope_of, rope_values

_SIZES = ("num_attention_heads", "hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _to_values(hf_config: Values) -> dict[str, Any]:
    missing = [key for key in _SIZES if not hf_config.get(key)]
    if missing:
        raise ConversionError(f"config.json lacks {', '.join(missing)}")
    heads = hf_config["num_attention_heads"]
    if hf_config.get("num_key_value_heads", heads) not in (None, heads):
        raise ConversionError(
            "config.json: with latent attention every head has keys of its own",
            got=f"num_key_value_heads {hf_config['num_key_value_heads']}",
            allowed=heads,
        )
    if hf_config.get("rms_norm_eps", 1e-6) != 1e-6:
        raise ConversionError(
            "config.json: norms of latents have an epsilon of 1e-6 whatever rms_norm_eps is; here all share one",
            got=hf_config["rms_norm_eps"],
            allowed=1e-6,
        )
    rotated = hf_config["qk_rope_head_dim"]
    rope = rope_values(rope_of(hf_config, 10000.0)[0], hf_config)
    yarn = rope["rope_scaling_type"] == "yarn"
    return {
        "multi_latent_attention": True,
        "num_attention_heads": heads,
        "group_query_attention": False,
        "num_query_groups": heads,
        "kv_channels": hf_config["v_head_dim"],
        "q_lora_rank": hf_config.get("q_lora_rank"),
        "kv_lora_rank": hf_config["kv_lora_rank"],
        "qk_head_dim": hf_config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": hf_config["v_head_dim"],
        "softmax_scale": latent_scale(
            hf_config["qk_nope_head_dim"] + rotated,
            rope["rope_scaling_factor"] if yarn else None,
            rope["rope_scaling_mscale_all_dim"],
        ),
    }


def _to_hf(values: Values) -> dict[str, Any]:
    channels = values["qk_head_dim"] + values["qk_pos_emb_head_dim"]
    scale = latent_scale(channels, values["rope_scaling_factor"], values["rope_scaling_mscale_all_dim"])
    if values["softmax_scale"] != scale or not values["multi_latent_attention"]:
        raise ConversionError(
            "this family has latent attention, its scores scaled by its rotary scaling",
            got=f"--softmax-scale {values['softmax_scale']}",
            allowed=scale,
        )
    heads = values["num_attention_heads"]
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": values["q_lora_rank"],
        "kv_lora_rank": values["kv_lora_rank"],
        "qk_nope_head_dim": values["qk_head_dim"],
        "qk_rope_head_dim": values["qk_pos_emb_head_dim"],
        "v_head_dim": values["v_head_dim"],
    }


LATENT_HEADS = Derived(
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    to_values=_to_values,
    to_hf=_to_hf,
    depends=("rope_scaling_factor", "rope_scaling_mscale_all_dim"),
)
"""Heads over latents; ``head_dim`` and ``qk_head_dim`` are written by transformers and say nothing new."""

_MCORE = "decoder.layers.{l}.self_attention."
_HF = "model.layers.{l}.self_attn."

LATENT_ATTENTION = (
    ParamMap(_MCORE + "linear_q_proj.weight", (_HF + "q_proj.weight",), shard=Column(), unless="q_lora_rank"),
    ParamMap(_MCORE + "linear_q_down_proj.weight", (_HF + "q_a_proj.weight",), when="q_lora_rank"),
    ParamMap(_MCORE + "q_layernorm.weight", (_HF + "q_a_layernorm.weight",), when="q_lora_rank"),
    ParamMap(_MCORE + "linear_q_up_proj.weight", (_HF + "q_b_proj.weight",), shard=Column(), when="q_lora_rank"),
    ParamMap(_MCORE + "linear_kv_down_proj.weight", (_HF + "kv_a_proj_with_mqa.weight",)),
    ParamMap(_MCORE + "kv_layernorm.weight", (_HF + "kv_a_layernorm.weight",)),
    ParamMap(_MCORE + "linear_kv_up_proj.weight", (_HF + "kv_b_proj.weight",), shard=Column()),
    ParamMap(_MCORE + "linear_proj.weight", (_HF + "o_proj.weight",), shard=Row()),
)
