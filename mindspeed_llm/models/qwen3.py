"""Qwen3, dense: each head's queries and keys are normed."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORM_BLOCK, QK_NORMS
from mindspeed_llm.models.family import Const, Expect, ModelFamily
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties
from mindspeed_llm.models.windows import LAST_LAYERS

FAMILY = ModelFamily(
    name="qwen3",
    hf_model_type="qwen3",
    hf_architectures=("Qwen3ForCausalLM",),
    config=(
        *SIZES,
        heads(head_dim=128),
        rope(),
        SWIGLU,
        ties(default=False),
        plain("window_size", "window_attn_skip_freq", qk_layernorm=True),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="no published model has it"),
        LAST_LAYERS,
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK, *QK_NORMS),
    chat_template="qwen3",
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
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
)
