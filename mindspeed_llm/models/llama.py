"""Llama 1 to 3.3, and the models that share its architecture: CodeLlama, Yi, SmolLM2."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, LINEAR_BIASES, PRE_NORM_BLOCK
from mindspeed_llm.models.family import Derived, Ignore, ModelFamily, Values
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties


def _biases_to_values(hf_config: Values) -> dict[str, Any]:
    """attention_bias means q, k, v and o; mlp_bias gate, up and down. megatron-core has one switch for all of them."""
    attention, mlp = bool(hf_config.get("attention_bias")), bool(hf_config.get("mlp_bias"))
    if attention != mlp:
        raise ConversionError(
            "config.json: attention_bias and mlp_bias must agree, megatron-core has one switch (add_bias_linear)",
            got=f"attention_bias={attention}, mlp_bias={mlp}",
            allowed="both true or both false",
        )
    return {"add_bias_linear": attention, "add_qkv_bias": attention}


def _biases_to_hf(values: Values) -> dict[str, Any]:
    if values["add_qkv_bias"] != values["add_bias_linear"]:
        raise ConversionError("Llama has no bias on queries, keys and values alone", got="add_qkv_bias", allowed="no")
    return {"attention_bias": values["add_bias_linear"], "mlp_bias": values["add_bias_linear"]}


FAMILY = ModelFamily(
    name="llama",
    hf_model_type="llama",
    hf_architectures=("LlamaForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(),
        SWIGLU,
        ties(default=False),
        plain(),
        Derived("attention_bias", "mlp_bias", to_values=_biases_to_values, to_hf=_biases_to_hf),
        Ignore("pretraining_tp", why="slices the same matrix product; transformers itself no longer reads it"),
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK, *LINEAR_BIASES),
    chat_template="llama3",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
)
