"""Hunyuan-A13B: routed experts and one that every token goes to, queries and keys normed behind their rotation."""

from __future__ import annotations

from typing import Any, cast

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORMS, SPLIT_ATTENTION
from mindspeed_llm.models.experts import (
    EXPERTS_OF_MLP_SIZE,
    TRAINING_OF_THE_ROUTER,
    plain_routing,
    routed_experts,
    shared_expert_weights,
)
from mindspeed_llm.models.family import Const, Derived, Expect, Ignore, ModelFamily, ParamMap, Preset, Values
from mindspeed_llm.models.rope import rope_of, rope_parameters, rope_values
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties


def _rope_to_values(hf_config: Values) -> dict[str, Any]:
    """A fixed ``alpha`` stretches theta, whatever the length: ``theta * alpha ** (d / (d - 2))`` for heads of d."""
    given, _ = rope_of(hf_config, 10000.0)
    alpha = given.pop("alpha", None)
    if alpha:
        channels = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
        given = {"rope_theta": given["rope_theta"] * alpha ** (channels / (channels - 2))}
    return rope_values(given, hf_config)


_ROPE = Derived(
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    to_values=_rope_to_values,
    to_hf=lambda values: {"rope_parameters": rope_parameters(values)},
)


def _of_all_layers(hf_config: Values, key: str, default: int) -> int:
    """A number that config.json gives once or for each layer."""
    given: Any = hf_config.get(key)
    several = cast("list[int]", given) if isinstance(given, list) else [default if given is None else given]
    numbers = set(several)
    if len(numbers) > 1:
        raise ConversionError(f"config.json: {key} is not the same in all layers", got=sorted(numbers))
    return next(iter(numbers))


def _experts_to_values(hf_config: Values) -> dict[str, Any]:
    size = hf_config.get("intermediate_size")
    for key, wanted in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        found = _of_all_layers(hf_config, key, wanted or 0)
        if found != wanted:
            raise ConversionError(f"config.json: {key} is not supported for this family", got=found, allowed=wanted)
    return {
        "num_moe_experts": _of_all_layers(hf_config, "num_experts", 1),
        "moe_router_topk": _of_all_layers(hf_config, "moe_topk", 1),
        "moe_shared_expert_intermediate_size": size,
    }


def _experts_to_hf(values: Values) -> dict[str, Any]:
    size = values["moe_shared_expert_intermediate_size"]
    if size != values["ffn_hidden_size"]:
        raise ConversionError(
            "the shared expert has the size of intermediate_size in this family",
            got=size,
            allowed=values["ffn_hidden_size"],
        )
    return {"num_experts": values["num_moe_experts"], "moe_topk": values["moe_router_topk"]}


_EXPERTS = Derived(
    "num_experts",
    "moe_topk",
    "num_shared_expert",
    "moe_intermediate_size",
    to_values=_experts_to_values,
    to_hf=_experts_to_hf,
    depends=("ffn_hidden_size",),
)
_MCORE, _HF = "decoder.layers.{l}.self_attention.core_attention.", "model.layers.{l}.self_attn."

FAMILY = ModelFamily(
    name="hunyuan_v1_moe",
    hf_model_type="hunyuan_v1_moe",
    hf_architectures=("HunYuanMoEV1ForCausalLM",),
    config=(
        *SIZES,
        heads(),
        _ROPE,
        SWIGLU,
        ties(default=False),
        plain("num_moe_experts", qk_layernorm=True, qk_norm_after_rotary=True),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="no published model has it"),
        Expect("mlp_bias", False, why="no published model has it"),
        Expect("use_qk_norm", True, why="no published model is without"),
        Expect("use_cla", False, why="layers that share keys are not computed"),
        Expect("use_mla", False, why="no published model has it"),
        Expect("use_mixed_mlp_moe", True, why="no published model is without a shared expert"),
        Expect("norm_topk_prob", True, why="no published model is without"),
        Expect("moe_layer_num_skipped", 0, why="no published model has layers without experts"),
        _EXPERTS,
        EXPERTS_OF_MLP_SIZE,
        plain_routing("moe_shared_expert_intermediate_size"),
        Preset(moe_router_dtype="fp32"),
        TRAINING_OF_THE_ROUTER,
        Ignore("eod_token_id", "pad_id", "org_vocab_size", why="ids and size of the tokenizer"),
        Ignore("attention_head_dim", "cla_share_factor", "norm_type", "use_rotary_pos_emb", why="say it once more"),
        Ignore("moe_drop_tokens", "moe_random_routing_dropped_token", "pretraining_tp", why="how it was once trained"),
        Ignore("group_limited_greedy", "n_group", "topk_group", "routed_scaling_factor", why="of another family"),
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        *SPLIT_ATTENTION,
        ParamMap(_MCORE + "q_layernorm.weight", (_HF + "query_layernorm.weight",)),
        ParamMap(_MCORE + "k_layernorm.weight", (_HF + "key_layernorm.weight",)),
        *routed_experts("model.layers.{l}.mlp", "gate_proj", "up_proj", "down_proj", router="gate.wg"),
        *shared_expert_weights("model.layers.{l}.mlp.shared_mlp"),
    ),
    chat_template="hunyuan",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "moe_topk": 3,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
        "tie_word_embeddings": True,
    },
)
