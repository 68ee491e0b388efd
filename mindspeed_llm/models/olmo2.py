"""OLMo 2: norms behind attention and MLP only, and over all heads of the queries and of the keys."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, SPLIT_ATTENTION, SPLIT_GATED_MLP
from mindspeed_llm.models.family import Column, Const, Expect, ModelFamily, ParamMap
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties

_MCORE = "decoder.layers.{l}."
_HF = "model.layers.{l}."

FAMILY = ModelFamily(
    name="olmo2",
    hf_model_type="olmo2",
    hf_architectures=("Olmo2ForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(),
        SWIGLU,
        ties(default=False),
        plain(pre_norm=False, post_norm=True, qk_norm_over_heads=True),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="no published model has it"),
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *SPLIT_ATTENTION,
        ParamMap(_MCORE + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",), shard=Column()),
        ParamMap(_MCORE + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",), shard=Column()),
        ParamMap(_MCORE + "post_attn_norm.weight", (_HF + "post_attention_layernorm.weight",)),
        *SPLIT_GATED_MLP,
        ParamMap(_MCORE + "post_mlp_layernorm.weight", (_HF + "post_feedforward_layernorm.weight",)),
    ),
    chat_template="olmo2",
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
