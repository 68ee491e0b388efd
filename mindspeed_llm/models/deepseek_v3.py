"""DeepSeek-V3 and R1: latent attention, experts chosen by sigmoid within groups, a bias that balances them."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.blocks import DENSE_LAYERS_MLP, EMBEDDING_AND_HEAD, PRE_NORMS
from mindspeed_llm.models.experts import (
    FIRST_LAYERS_DENSE,
    NO_FURTHER_TOKENS,
    TRAINING_OF_THE_ROUTER,
    balancing_bias,
    number_of_experts,
    plain_routing,
    routed_experts,
    shared_expert_weights,
    shared_experts,
)
from mindspeed_llm.models.family import Const, Derived, Expect, Ignore, ModelFamily, Preset, Rename, Values
from mindspeed_llm.models.latent import LATENT_ATTENTION, LATENT_HEADS
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, plain, ties


def _groups_to_values(hf_config: Values) -> dict[str, Any]:
    groups, chosen, few = (hf_config.get(key) or 1 for key in ("n_group", "topk_group", "num_experts_per_tok"))
    if groups == 1:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if few != 2 * chosen:
        raise ConversionError(
            "config.json: a group is judged by its two best experts, which megatron-core does where a token has two"
            " experts a group",
            got=f"num_experts_per_tok {few}, topk_group {chosen}",
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _groups_to_hf(values: Values) -> dict[str, Any]:
    return {"n_group": values["moe_router_num_groups"] or 1, "topk_group": values["moe_router_group_topk"] or 1}


_GROUPS = Derived(
    "n_group", "topk_group", to_values=_groups_to_values, to_hf=_groups_to_hf, depends=("moe_router_topk",)
)

FAMILY = ModelFamily(
    name="deepseek_v3",
    hf_model_type="deepseek_v3",
    hf_architectures=("DeepseekV3ForCausalLM",),
    config=(
        *SIZES,
        LATENT_HEADS,
        rope(),
        SWIGLU,
        ties(default=False),
        plain(
            "num_moe_experts",
            "softmax_scale",
            "multi_latent_attention",
            qk_layernorm=True,
            rotary_interleaved=True,
        ),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("rope_interleave", True, why="no published model turns other pairs"),
        Expect("attention_bias", False, why="no published model has it"),
        *number_of_experts("n_routed_experts", "num_local_experts"),
        Rename("moe_intermediate_size", "moe_ffn_hidden_size"),
        shared_experts("n_shared_experts"),
        FIRST_LAYERS_DENSE,
        Expect("moe_layer_freq", 1, why="no published model has dense layers in between"),
        Expect("norm_topk_prob", True, why="megatron-core's sigmoid shares always sum to one"),
        Expect("scoring_func", "sigmoid", why="the one that the family has"),
        Expect("topk_method", "noaux_tc", why="the one that the family has"),
        Rename("routed_scaling_factor", "moe_router_topk_scaling_factor", default=2.5),
        _GROUPS,
        plain_routing(
            "moe_layer_freq",
            "moe_router_topk_scaling_factor",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_shared_expert_intermediate_size",
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
        ),
        Preset(moe_router_dtype="fp32"),
        TRAINING_OF_THE_ROUTER,
        Ignore("ep_size", "pretraining_tp", why="how the model was once trained"),
        Ignore("aux_loss_alpha", "seq_aux", why="--moe-aux-loss-coeff, --moe-router-load-balancing-type say it here"),
        NO_FURTHER_TOKENS,
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        *LATENT_ATTENTION,
        *DENSE_LAYERS_MLP,
        *routed_experts("model.layers.{l}.mlp", "gate_proj", "up_proj", "down_proj"),
        *shared_expert_weights("model.layers.{l}.mlp.shared_experts"),
        balancing_bias("model.layers.{l}.mlp.gate.e_score_correction_bias"),
    ),
    chat_template="deepseek3",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        "tie_word_embeddings": False,
    },
)
