"""Mixtral 8x7B and 8x22B: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORMS, SPLIT_ATTENTION
from mindspeed_llm.models.experts import (
    EXPERTS_OF_MLP_SIZE,
    TRAINING_OF_THE_ROUTER,
    number_of_experts,
    plain_routing,
    routed_experts,
)
from mindspeed_llm.models.family import Const, Expect, ModelFamily
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties
from mindspeed_llm.models.windows import all_layers

FAMILY = ModelFamily(
    name="mixtral",
    hf_model_type="mixtral",
    hf_architectures=("MixtralForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(),
        SWIGLU,
        ties(default=False),
        plain("window_size", "window_attn_skip_freq", "num_moe_experts"),
        Const(add_bias_linear=False, add_qkv_bias=False),
        all_layers(default=None),
        *number_of_experts("num_local_experts"),
        EXPERTS_OF_MLP_SIZE,
        plain_routing(),
        TRAINING_OF_THE_ROUTER,
        Expect("router_jitter_noise", 0, 0.0, why="--moe-input-jitter-eps says it"),
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        *SPLIT_ATTENTION,
        *routed_experts("model.layers.{l}.block_sparse_moe", "w1", "w3", "w2"),
    ),
    chat_template="mistral",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
)
