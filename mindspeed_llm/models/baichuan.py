"""Baichuan and Baichuan 2: 7B with rotary positions, 13B with ALiBi; the second ones norm the output layer's rows."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORMS, SPLIT_GATED_MLP
from mindspeed_llm.models.family import (
    Column,
    Const,
    Derived,
    Drop,
    Ignore,
    ModelFamily,
    ParamMap,
    QkvStacked,
    Row,
    Values,
)
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties

_MCORE, _HF = "decoder.layers.{l}.", "model.layers.{l}."
_FIRST_VOCABULARY = 64000
"""That of Baichuan 1, whose output layer is used as it is; config.json does not say it otherwise."""


def _positions_to_values(hf_config: Values) -> dict[str, Any]:
    """The code of 7B and of 13B reads other keys for the length, and that is all that tells them apart."""
    rotary = hf_config.get("max_position_embeddings")
    length = rotary or hf_config.get("model_max_length")
    if not length:
        raise ConversionError("config.json lacks 'max_position_embeddings' (7B) or 'model_max_length' (13B)")
    return {"position_embedding_type": "rope" if rotary else "alibi", "max_position_embeddings": length}


def _positions_to_hf(values: Values) -> dict[str, Any]:
    length = values["max_position_embeddings"]
    result = {"model_max_length": length}
    return result | ({"max_position_embeddings": length} if values["position_embedding_type"] == "rope" else {})


def _head_to_values(hf_config: Values) -> dict[str, Any]:
    return {"normalize_output_weight": hf_config.get("vocab_size") != _FIRST_VOCABULARY}


def _head_to_hf(values: Values) -> dict[str, Any]:
    if values["normalize_output_weight"] == (values["vocab_size"] == _FIRST_VOCABULARY):
        raise ConversionError(
            "Baichuan norms the output layer unless the vocabulary is its first one",
            got=f"normalize_output_weight {values['normalize_output_weight']}, vocabulary {values['vocab_size']}",
        )
    return {}


FAMILY = ModelFamily(
    name="baichuan",
    hf_model_type="baichuan",
    hf_architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    config=(
        *(rule for rule in SIZES if "max_position_embeddings" not in rule.hf_keys),
        heads(),
        Derived(
            "max_position_embeddings",
            "model_max_length",
            to_values=_positions_to_values,
            to_hf=_positions_to_hf,
        ),
        Derived(to_values=_head_to_values, to_hf=_head_to_hf, depends=("vocab_size",)),
        SWIGLU,
        ties(default=False),
        plain("normalize_output_weight"),
        Const(rotary_base=10000.0, rope_scaling_type=None, add_bias_linear=False, add_qkv_bias=False),
        Ignore("_from_model_config", "gradient_checkpointing", "z_loss_weight", why="says nothing about the decoder"),
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        ParamMap(
            _MCORE + "self_attention.linear_qkv.weight", (_HF + "self_attn.W_pack.weight",), QkvStacked(), Column()
        ),
        ParamMap(_MCORE + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), shard=Row()),
        *SPLIT_GATED_MLP,
        Drop(_HF + "self_attn.rotary_emb.inv_freq", "computed from the config; old checkpoints stored it"),
    ),
    chat_template="baichuan2",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "model_max_length": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
)
