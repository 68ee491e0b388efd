"""Qwen3 with a mixture of experts: 30B-A3B, 235B-A22B."""

from __future__ import annotations

from mindspeed_llm.models.blocks import DENSE_LAYERS_MLP, EMBEDDING_AND_HEAD, PRE_NORMS, QK_NORMS, SPLIT_ATTENTION
from mindspeed_llm.models.experts import (
    RENORMALISED,
    SPARSE_LAYERS,
    TRAINING_OF_THE_ROUTER,
    number_of_experts,
    plain_routing,
    routed_experts,
)
from mindspeed_llm.models.family import Const, Expect, ModelFamily, Rename
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties
from mindspeed_llm.models.windows import LAST_LAYERS

FAMILY = ModelFamily(
    name="qwen3_moe",
    hf_model_type="qwen3_moe",
    hf_architectures=("Qwen3MoeForCausalLM",),
    config=(
        *SIZES,
        heads(head_dim=None),
        rope(),
        SWIGLU,
        ties(default=False),
        plain("window_size", "window_attn_skip_freq", "num_moe_experts", qk_layernorm=True),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="no published model has it"),
        LAST_LAYERS,
        *number_of_experts("num_experts", "num_local_experts"),
        Rename("moe_intermediate_size", "moe_ffn_hidden_size"),
        RENORMALISED,
        SPARSE_LAYERS,
        plain_routing("moe_layer_freq", "moe_router_pre_softmax"),
        TRAINING_OF_THE_ROUTER,
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        *SPLIT_ATTENTION,
        *QK_NORMS,
        *DENSE_LAYERS_MLP,
        *routed_experts("model.layers.{l}.mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    chat_template="qwen3",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    },
)
