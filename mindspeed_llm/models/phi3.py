"""Phi-3, Phi-3.5-mini and Phi-4(-mini): one matrix for queries, keys and values, one for gate and up."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, FUSED_GATED_MLP, PRE_NORMS
from mindspeed_llm.models.family import Column, Const, Ignore, ModelFamily, ParamMap, QkvStacked, Row
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties
from mindspeed_llm.models.windows import all_layers

FAMILY = ModelFamily(
    name="phi3",
    hf_model_type="phi3",
    hf_architectures=("Phi3ForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(partial=1.0, trained=4096),
        SWIGLU,
        ties(default=False),
        all_layers(default=None),
        plain("rotary_percent", "window_size", "window_attn_skip_freq"),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Ignore("resid_pdrop", "embd_pdrop", why="dropout is the run's: --hidden-dropout"),
        Ignore(
            "attention_bias",
            "mlp_bias",
            "full_attn_mod",
            "lm_head_bias",
            "interpolate_factor",
            why="transformers does not read it",
        ),
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        ParamMap(
            "decoder.layers.{l}.self_attention.linear_qkv.weight",
            ("model.layers.{l}.self_attn.qkv_proj.weight",),
            QkvStacked(),
            Column(),
        ),
        ParamMap(
            "decoder.layers.{l}.self_attention.linear_proj.weight",
            ("model.layers.{l}.self_attn.o_proj.weight",),
            shard=Row(),
        ),
        *FUSED_GATED_MLP,
    ),
    chat_template="phi3",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "long_factor": [1.1, 1.5, 2.0, 3.0, 4.0, 5.0],
            "short_factor": [1.0, 1.0, 1.05, 1.1, 1.2, 1.3],
            "partial_rotary_factor": 0.75,
        },
        "sliding_window": 24,
        "tie_word_embeddings": False,
    },
)
