"""Groups of rules and weights that more than one family uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import (
    Column,
    Const,
    Derived,
    Drop,
    Expect,
    GateUp,
    Ignore,
    ParamMap,
    Preset,
    QkvByGroup,
    Rename,
    Row,
    Values,
    Vocab,
)

DEFAULT_ROPE_THETA = 10000.0
"""What transformers takes when a config names no theta."""

BOOKKEEPING = Ignore(
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "_commit_hash",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "auto_map",
    "id2label",
    "label2id",
    "problem_type",
    "task_specific_params",
    "finetuning_task",
    "tokenizer_class",
    "prefix",
    "return_dict",
    "torchscript",
    "use_bfloat16",
    "is_decoder",
    "chunk_size_feed_forward",
    "output_attentions",
    "output_hidden_states",
    "unsloth_version",
    "unsloth_fixed",
    why="written by transformers for every model; says nothing about the decoder's maths",
)
TOKENS_AND_GENERATION = Ignore(
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "use_cache",
    "max_length",
    "min_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "num_beams",
    "num_return_sequences",
    "early_stopping",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    why="token ids belong to the tokenizer, the rest to generation_config.json",
)
PLAIN_DECODER = (
    Expect("is_encoder_decoder", False, why="decoder-only"),
    Expect("add_cross_attention", False, why="decoder-only"),
    Expect("pruned_heads", {}, None, why="head pruning is not computed"),
    Expect("quantization_config", None, why="weights must be plain floating point; dequantise them first"),
)


def _heads_to_values(hf_config: Values) -> dict[str, Any]:
    for key in ("num_attention_heads", "hidden_size"):
        if not hf_config.get(key):
            raise ConversionError(f"config.json lacks {key!r}")
    heads, hidden = hf_config["num_attention_heads"], hf_config["hidden_size"]
    groups = hf_config.get("num_key_value_heads") or heads
    if heads % groups:
        raise ConversionError(
            "config.json: num_attention_heads is no multiple of num_key_value_heads", got=f"{heads} and {groups}"
        )
    head_dim = hf_config.get("head_dim")
    if head_dim is None and hidden % heads:
        raise ConversionError(
            "config.json: hidden_size is no multiple of num_attention_heads", got=f"{hidden}, {heads}"
        )
    return {
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": head_dim or hidden // heads,
    }


def _heads_to_hf(values: Values) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    result = {"num_attention_heads": heads, "num_key_value_heads": values["num_query_groups"] or heads}
    head_dim = values["kv_channels"]
    if head_dim is not None and head_dim * heads != values["hidden_size"]:
        result["head_dim"] = head_dim
    return result


HEADS = Derived(
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    to_values=_heads_to_values,
    to_hf=_heads_to_hf,
    depends=("hidden_size",),
)

# key inside rope_parameters / rope_scaling -> our field, for each rope type: (required, optional)
_SCALING_KEYS: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "default": ({}, {}),
    "linear": ({"factor": "rope_scaling_factor"}, {}),
    "dynamic": ({"factor": "rope_scaling_factor"}, {}),
    "yarn": (
        {},
        {
            "factor": "rope_scaling_factor",
            "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "attention_factor": "rope_scaling_attention_factor",
            "mscale": "rope_scaling_mscale",
            "mscale_all_dim": "rope_scaling_mscale_all_dim",
        },
    ),
    "llama3": (
        {
            "factor": "rope_scaling_factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
        },
        {"original_max_position_embeddings": "rope_scaling_original_max_position_embeddings"},
    ),
}
_SCALING_OFF: Mapping[str, Any] = {
    "rope_scaling_factor": None,
    "rope_scaling_original_max_position_embeddings": None,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "rope_scaling_mscale": None,
    "rope_scaling_mscale_all_dim": None,
    "rope_scaling_attention_factor": None,
}
"""Every field that a rope scaling may set, with the value that it has where the scaling does not name it."""


def _rope_of(hf_config: Values) -> dict[str, Any]:
    """The rope settings in one form, ``rope_parameters`` of transformers 5, from that or from ``rope_theta`` and
    ``rope_scaling`` of transformers 4."""
    rope = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ConversionError("config.json: rope settings per layer type are not supported here", got=", ".join(nested))
    legacy_type = rope.pop("type", None)
    rope.setdefault("rope_type", legacy_type or "default")
    if rope.get("rope_theta") is None:
        theta = hf_config.get("rope_theta")
        rope["rope_theta"] = DEFAULT_ROPE_THETA if theta is None else theta
    partial = rope.pop("partial_rotary_factor", None) or hf_config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ConversionError("config.json: partial_rotary_factor is not supported for this family", got=partial)
    return rope


def _rope_to_values(hf_config: Values) -> dict[str, Any]:
    rope = _rope_of(hf_config)
    rope_type = rope.pop("rope_type")
    if rope_type not in _SCALING_KEYS:
        raise ConversionError("config.json: unknown rope_type", got=rope_type, allowed=", ".join(_SCALING_KEYS))
    values: dict[str, Any] = dict(_SCALING_OFF)
    values["position_embedding_type"] = "rope"
    values["rotary_base"] = rope.pop("rope_theta")
    values["rope_scaling_type"] = None if rope_type == "default" else rope_type
    required, optional = _SCALING_KEYS[rope_type]
    missing = [key for key in required if rope.get(key) is None]
    if missing:
        raise ConversionError(f"config.json: rope type {rope_type!r} lacks {', '.join(missing)}")
    for key, name in {**required, **optional}.items():
        value = rope.pop(key, None)
        if value is not None:
            values[name] = value
    if rope.pop("truncate", True) is False:
        raise ConversionError(
            "config.json: yarn without rounding of its channel range is not supported", got="truncate=false"
        )
    if rope_type in ("linear", "dynamic"):
        # some configs carry it although transformers reads max_position_embeddings instead
        rope.pop("original_max_position_embeddings", None)
    surplus = sorted(key for key, value in rope.items() if value is not None)
    if surplus and rope_type != "default":
        raise ConversionError(
            f"config.json: rope type {rope_type!r} has keys that it does not read", got=", ".join(surplus)
        )
    if rope_type in ("yarn", "llama3"):
        _fill_original_length(hf_config, values)
    return values


def _fill_original_length(hf_config: Values, values: dict[str, Any]) -> None:
    """As transformers: a top-level key wins, then the rope's own, then the full length; yarn's factor follows."""
    length: int = hf_config["max_position_embeddings"]
    original = hf_config.get("original_max_position_embeddings")
    original = original or values["rope_scaling_original_max_position_embeddings"] or length
    values["rope_scaling_original_max_position_embeddings"] = original
    if values["rope_scaling_factor"] is None:
        values["rope_scaling_factor"] = length / original


def _rope_to_hf(values: Values) -> dict[str, Any]:
    rope_type = values["rope_scaling_type"] or "default"
    required, optional = _SCALING_KEYS[rope_type]
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": values["rotary_base"]}
    for key, name in {**required, **optional}.items():
        if key in required or values[name] != _SCALING_OFF[name]:
            rope[key] = values[name]
    return {"rope_parameters": rope}


ROPE = Derived(
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    to_values=_rope_to_values,
    to_hf=_rope_to_hf,
)


def _activation_to_values(hf_config: Values) -> dict[str, Any]:
    name = hf_config.get("hidden_act", "silu")
    if name not in ("silu", "swish"):
        raise ConversionError("config.json: hidden_act is not supported for this family", got=name, allowed="silu")
    return {"activation_func": "silu"}


def _activation_to_hf(values: Values) -> dict[str, Any]:
    if values["activation_func"] != "silu":
        raise ConversionError(
            "this activation has no place in this family", got=values["activation_func"], allowed="silu"
        )
    return {"hidden_act": "silu"}


def _tie_to_values(hf_config: Values) -> dict[str, Any]:
    return {"untie_embeddings_and_output_weights": not hf_config.get("tie_word_embeddings", False)}


def _tie_to_hf(values: Values) -> dict[str, Any]:
    return {"tie_word_embeddings": not values["untie_embeddings_and_output_weights"]}


DENSE_GQA = (
    BOOKKEEPING,
    TOKENS_AND_GENERATION,
    *PLAIN_DECODER,
    Rename("num_hidden_layers", "num_layers"),
    Rename("hidden_size", "hidden_size"),
    Rename("intermediate_size", "ffn_hidden_size"),
    HEADS,
    Rename("vocab_size", "vocab_size"),
    Rename("max_position_embeddings", "max_position_embeddings"),
    Rename("rms_norm_eps", "layernorm_epsilon", default=1e-6),
    Rename("initializer_range", "init_method_std", default=0.02, recipe=True),
    Rename("attention_dropout", "attention_dropout", default=0.0, recipe=True),
    Derived("tie_word_embeddings", to_values=_tie_to_values, to_hf=_tie_to_hf),
    Derived("hidden_act", to_values=_activation_to_values, to_hf=_activation_to_hf),
    ROPE,
    Const(normalization="RMSNorm", gated_linear_unit=True, rotary_percent=1.0, qk_layernorm=False),
    Preset(hidden_dropout=0.0),
)
"""A pre-norm decoder with rope, grouped queries, RMSNorm and SwiGLU."""

EMBEDDING_AND_HEAD = (
    ParamMap("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shard=Vocab()),
    ParamMap("decoder.final_layernorm.weight", ("model.norm.weight",)),
    ParamMap("output_layer.weight", ("lm_head.weight",), shard=Vocab(), tied_to="embedding.word_embeddings.weight"),
)

_MCORE = "decoder.layers.{l}."
_HF = "model.layers.{l}."


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"{_HF}self_attn.{name}_proj.{kind}" for name in "qkv")


PRE_NORM_BLOCK = (
    ParamMap(_MCORE + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
    ParamMap(_MCORE + "self_attention.linear_qkv.weight", _qkv("weight"), QkvByGroup(), Column()),
    ParamMap(_MCORE + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), shard=Row()),
    ParamMap(_MCORE + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
    ParamMap(
        _MCORE + "mlp.linear_fc1.weight",
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        GateUp(),
        Column(parts=2),
    ),
    ParamMap(_MCORE + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), shard=Row()),
    Drop(_HF + "self_attn.rotary_emb.inv_freq", "computed from the config; old checkpoints stored it"),
)

QKV_BIAS = ParamMap(
    _MCORE + "self_attention.linear_qkv.bias", _qkv("bias"), QkvByGroup(), Column(), when="add_qkv_bias"
)
LINEAR_BIASES = (
    ParamMap(_MCORE + "self_attention.linear_qkv.bias", _qkv("bias"), QkvByGroup(), Column(), when="add_bias_linear"),
    ParamMap(_MCORE + "self_attention.linear_proj.bias", (_HF + "self_attn.o_proj.bias",), when="add_bias_linear"),
    ParamMap(
        _MCORE + "mlp.linear_fc1.bias",
        (_HF + "mlp.gate_proj.bias", _HF + "mlp.up_proj.bias"),
        GateUp(),
        Column(parts=2),
        when="add_bias_linear",
    ),
    ParamMap(_MCORE + "mlp.linear_fc2.bias", (_HF + "mlp.down_proj.bias",), when="add_bias_linear"),
)
"""Biases on every linear layer of the block, as ``add_bias_linear`` makes them."""
