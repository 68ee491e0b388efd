"""GLM-4 9B in transformers' layout: half of each head rotates, in neighbouring pairs."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, FUSED_GATED_MLP, PRE_NORMS, QKV_BIAS, SPLIT_ATTENTION
from mindspeed_llm.models.family import Const, ModelFamily, Rename
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties

FAMILY = ModelFamily(
    name="glm",
    hf_model_type="glm",
    hf_architectures=("GlmForCausalLM",),
    config=(
        *SIZES,
        heads(head_dim=128),
        rope(partial=0.5),
        SWIGLU,
        ties(default=False),
        plain("rotary_percent", rotary_interleaved=True),
        Rename("attention_bias", "add_qkv_bias", default=True),
        Const(add_bias_linear=False),
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORMS, *SPLIT_ATTENTION, QKV_BIAS, *FUSED_GATED_MLP),
    chat_template="glm4",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1.5625e-07,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
)
