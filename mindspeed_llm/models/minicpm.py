"""MiniCPM 1B and 2B: factors on embeddings, residual and logits (Hu et al. 2024, section 3.2)."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORM_BLOCK
from mindspeed_llm.models.family import Const, Derived, Expect, Ignore, ModelFamily, Rename, Values
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties


def _factors_to_values(hf_config: Values) -> dict[str, Any]:
    hidden, layers = hf_config.get("hidden_size"), hf_config.get("num_hidden_layers")
    if not hidden or not layers:
        raise ConversionError("config.json lacks 'hidden_size' or 'num_hidden_layers'")
    return {
        "residual_multiplier": hf_config.get("scale_depth", 1) / layers**0.5,
        "output_multiplier": hf_config.get("dim_model_base", 1) / hidden,
    }


def _factors_to_hf(values: Values) -> dict[str, Any]:
    return {
        "scale_depth": values["residual_multiplier"] * values["num_layers"] ** 0.5,
        "dim_model_base": values["output_multiplier"] * values["hidden_size"],
    }


FAMILY = ModelFamily(
    name="minicpm",
    hf_model_type="minicpm",
    hf_architectures=("MiniCPMForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(),
        SWIGLU,
        ties(default=True),
        Rename("scale_emb", "embedding_multiplier", default=1),
        Derived(
            "scale_depth",
            "dim_model_base",
            to_values=_factors_to_values,
            to_hf=_factors_to_hf,
            depends=("hidden_size", "num_layers"),
        ),
        plain("embedding_multiplier", "residual_multiplier", "output_multiplier"),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="no published model has it"),
        Expect("num_experts", 0, why="the mixture is another family"),
        Ignore("pretraining_tp", "attn_implementation", why="say how, not what"),
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK),
    chat_template="minicpm",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 16,
        "tie_word_embeddings": True,
    },
)
