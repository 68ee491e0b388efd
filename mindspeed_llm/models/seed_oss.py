"""Seed-OSS 36B."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORM_BLOCK, QKV_BIAS
from mindspeed_llm.models.family import Const, Expect, Ignore, ModelFamily
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties

FAMILY = ModelFamily(
    name="seed_oss",
    hf_model_type="seed_oss",
    hf_architectures=("SeedOssForCausalLM",),
    config=(
        *SIZES,
        heads(head_dim=128),
        rope(),
        SWIGLU,
        ties(default=False),
        plain(),
        Const(add_bias_linear=False, add_qkv_bias=True),
        Expect("attention_bias", True, why="q, k and v of the published model have biases"),
        Expect("attention_out_bias", False, why="the published model's output projection has none"),
        Expect("mlp_bias", False, why="the published model's MLP has none"),
        Ignore("residual_dropout", why="dropout is the run's: --hidden-dropout"),
        Ignore("pretraining_tp", why="slices the same matrix product; transformers itself no longer reads it"),
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK, QKV_BIAS),
    chat_template="seed_oss",
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
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "tie_word_embeddings": False,
    },
)
