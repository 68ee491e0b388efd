"""Mistral 7B and the dense models after it."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORM_BLOCK
from mindspeed_llm.models.family import Const, ModelFamily
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties
from mindspeed_llm.models.windows import all_layers

FAMILY = ModelFamily(
    name="mistral",
    hf_model_type="mistral",
    hf_architectures=("MistralForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(),
        SWIGLU,
        ties(default=False),
        plain("window_size", "window_attn_skip_freq"),
        Const(add_bias_linear=False, add_qkv_bias=False),
        all_layers(default=4096),
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK),
    chat_template="mistral",
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
        "sliding_window": 8,
        "tie_word_embeddings": False,
    },
)
