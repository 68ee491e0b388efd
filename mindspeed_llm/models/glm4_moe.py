"""GLM-4.5 and GLM-4.5-Air: half-rotated heads, experts chosen by sigmoid and a bias that balances them."""

from __future__ import annotations

import dataclasses

from mindspeed_llm.models.blocks import (
    DENSE_LAYERS_MLP,
    EMBEDDING_AND_HEAD,
    PRE_NORMS,
    QK_NORMS,
    QKV_BIAS,
    SPLIT_ATTENTION,
)
from mindspeed_llm.models.experts import (
    FIRST_LAYERS_DENSE,
    GROUP_FIELDS,
    NO_FURTHER_TOKENS,
    TRAINING_OF_THE_ROUTER,
    balancing_bias,
    groups,
    number_of_experts,
    plain_routing,
    routed_experts,
    shared_expert_weights,
    shared_experts,
)
from mindspeed_llm.models.family import Const, Expect, ModelFamily, Preset, Rename
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties

FAMILY = ModelFamily(
    name="glm4_moe",
    hf_model_type="glm4_moe",
    hf_architectures=("Glm4MoeForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(partial=0.5),
        SWIGLU,
        ties(default=False),
        plain("rotary_percent", "qk_layernorm", "num_moe_experts"),
        Const(add_bias_linear=False),
        Rename("attention_bias", "add_qkv_bias", default=False),
        Rename("use_qk_norm", "qk_layernorm", default=False),
        *number_of_experts("n_routed_experts", "num_local_experts"),
        Rename("moe_intermediate_size", "moe_ffn_hidden_size"),
        shared_experts("n_shared_experts"),
        FIRST_LAYERS_DENSE,
        Expect("norm_topk_prob", True, why="megatron-core's sigmoid shares always sum to one"),
        Rename("routed_scaling_factor", "moe_router_topk_scaling_factor", default=1.0),
        groups(judges=2),
        plain_routing(
            "moe_layer_freq",
            "moe_router_topk_scaling_factor",
            "moe_shared_expert_intermediate_size",
            *GROUP_FIELDS,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
        ),
        Preset(moe_router_dtype="fp32"),
        TRAINING_OF_THE_ROUTER,
        NO_FURTHER_TOKENS,
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        *SPLIT_ATTENTION,
        QKV_BIAS,
        *(dataclasses.replace(weight, when="qk_layernorm") for weight in QK_NORMS),
        *DENSE_LAYERS_MLP,
        *routed_experts("model.layers.{l}.mlp", "gate_proj", "up_proj", "down_proj"),
        *shared_expert_weights("model.layers.{l}.mlp.shared_experts"),
        balancing_bias("model.layers.{l}.mlp.gate.e_score_correction_bias"),
    ),
    chat_template="glm4_moe",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "attention_bias": True,
        "use_qk_norm": True,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    },
)
