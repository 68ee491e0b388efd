"""GLM-4-0414, 9B and 32B: GLM-4 with norms around attention and MLP."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, FUSED_GATED_MLP, PRE_NORMS, QKV_BIAS, SPLIT_ATTENTION
from mindspeed_llm.models.family import Const, ModelFamily, ParamMap, Rename
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties

_MCORE = "decoder.layers.{l}."
_HF = "model.layers.{l}."

FAMILY = ModelFamily(
    name="glm4",
    hf_model_type="glm4",
    hf_architectures=("Glm4ForCausalLM",),
    config=(
        *SIZES,
        heads(head_dim=128),
        rope(partial=0.5),
        SWIGLU,
        ties(default=False),
        plain("rotary_percent", rotary_interleaved=True, post_norm=True),
        Rename("attention_bias", "add_qkv_bias", default=True),
        Const(add_bias_linear=False),
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        *SPLIT_ATTENTION,
        QKV_BIAS,
        ParamMap(_MCORE + "post_attn_norm.weight", (_HF + "post_self_attn_layernorm.weight",)),
        *FUSED_GATED_MLP,
        ParamMap(_MCORE + "post_mlp_layernorm.weight", (_HF + "post_mlp_layernorm.weight",)),
    ),
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
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
)
