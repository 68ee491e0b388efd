"""Qwen1.5, Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORM_BLOCK, QKV_BIAS
from mindspeed_llm.models.family import Const, Expect, ModelFamily
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties
from mindspeed_llm.models.windows import LAST_LAYERS

FAMILY = ModelFamily(
    name="qwen2",
    hf_model_type="qwen2",
    hf_architectures=("Qwen2ForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(),
        SWIGLU,
        ties(default=False),
        plain("window_size", "window_attn_skip_freq"),
        Const(add_qkv_bias=True, add_bias_linear=False),
        Expect("use_mrope", False, None, why="text only: positions have one axis"),
        LAST_LAYERS,
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK, QKV_BIAS),
    chat_template="qwen",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    },
)
