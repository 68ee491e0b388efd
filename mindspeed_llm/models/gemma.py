"""Gemma: norms multiply by one plus their weight, embeddings by the root of the hidden size."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORM_BLOCK
from mindspeed_llm.models.family import Const, Expect, Ignore, ModelFamily
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import GEGLU, ROOT_SCALED_EMBEDDINGS, SIZES, heads, plain, ties

FAMILY = ModelFamily(
    name="gemma",
    hf_model_type="gemma",
    hf_architectures=("GemmaForCausalLM",),
    config=(
        *SIZES,
        heads(head_dim=256),
        rope(),
        GEGLU,
        ROOT_SCALED_EMBEDDINGS,
        ties(default=True),
        plain("embedding_multiplier", layernorm_zero_centered_gamma=True),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="no published model has it"),
        Expect("use_bidirectional_attention", False, None, why="decoder-only"),
        Ignore("hidden_activation", why="transformers reads hidden_act"),
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK),
    chat_template="gemma",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
)
