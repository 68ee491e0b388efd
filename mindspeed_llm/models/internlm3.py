"""InternLM3 8B."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORM_BLOCK, QKV_BIAS
from mindspeed_llm.models.family import Const, Expect, ModelFamily, Rename
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties

FAMILY = ModelFamily(
    name="internlm3",
    hf_model_type="internlm3",
    hf_architectures=("InternLM3ForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(),
        SWIGLU,
        ties(default=False),
        plain(),
        Rename("qkv_bias", "add_qkv_bias", default=False),
        Const(add_bias_linear=False),
        Expect("bias", False, why="the published model has none"),
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK, QKV_BIAS),
    chat_template="intern2",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
        "qkv_bias": True,
        "bias": False,
        "tie_word_embeddings": False,
    },
)
