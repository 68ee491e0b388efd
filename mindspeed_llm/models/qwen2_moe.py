"""Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B: routed experts, and one that every token goes to."""

from __future__ import annotations

from mindspeed_llm.models.blocks import DENSE_LAYERS_MLP, EMBEDDING_AND_HEAD, PRE_NORMS, QKV_BIAS, SPLIT_ATTENTION
from mindspeed_llm.models.experts import (
    RENORMALISED,
    SHARED_EXPERT,
    SPARSE_LAYERS,
    TRAINING_OF_THE_ROUTER,
    number_of_experts,
    plain_routing,
    routed_experts,
)
from mindspeed_llm.models.family import Const, Expect, Ignore, ModelFamily, Rename
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties

FAMILY = ModelFamily(
    name="qwen2_moe",
    hf_model_type="qwen2_moe",
    hf_architectures=("Qwen2MoeForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(),
        SWIGLU,
        ties(default=False),
        plain("num_moe_experts"),
        Const(add_bias_linear=False, add_qkv_bias=True),
        Expect("qkv_bias", True, why="no published model is without"),
        Expect("use_sliding_window", False, why="no published model has it"),
        Ignore("sliding_window", "max_window_layers", "layer_types", why="sizes of a window that is not in use"),
        *number_of_experts("num_experts"),
        Rename("moe_intermediate_size", "moe_ffn_hidden_size"),
        Rename("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        RENORMALISED,
        SPARSE_LAYERS,
        plain_routing(
            "moe_layer_freq",
            "moe_router_pre_softmax",
            "moe_shared_expert_intermediate_size",
            moe_shared_expert_gate=True,
        ),
        TRAINING_OF_THE_ROUTER,
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        *SPLIT_ATTENTION,
        QKV_BIAS,
        *DENSE_LAYERS_MLP,
        *routed_experts("model.layers.{l}.mlp", "gate_proj", "up_proj", "down_proj"),
        *SHARED_EXPERT,
    ),
    chat_template="qwen",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    },
)
