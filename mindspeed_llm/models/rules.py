"""Groups of rules about config.json that more than one family uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Const, Derived, Expect, Ignore, Preset, Rename, Values

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


def heads(head_dim: int | None = None) -> Derived:
    """Rule for the numbers of heads and the size of one; ``head_dim`` is what transformers takes for the family where
    config.json does not say it, by default the hidden size shared out."""

    def to_values(hf_config: Values) -> dict[str, Any]:
        return _heads_to_values(hf_config, head_dim)

    def to_hf(values: Values) -> dict[str, Any]:
        count, size = values["num_attention_heads"], values["kv_channels"]
        result = {"num_attention_heads": count, "num_key_value_heads": values["num_query_groups"] or count}
        if size is not None and (head_dim is not None or size * count != values["hidden_size"]):
            result["head_dim"] = size
        return result

    return Derived(
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        to_values=to_values,
        to_hf=to_hf,
        depends=("hidden_size",),
    )


def _heads_to_values(hf_config: Values, default: int | None) -> dict[str, Any]:
    for key in ("num_attention_heads", "hidden_size"):
        if not hf_config.get(key):
            raise ConversionError(f"config.json lacks {key!r}")
    count, hidden = hf_config["num_attention_heads"], hf_config["hidden_size"]
    groups = hf_config.get("num_key_value_heads") or count
    if count % groups:
        raise ConversionError(
            "config.json: num_attention_heads is no multiple of num_key_value_heads", got=f"{count} and {groups}"
        )
    head_dim = hf_config.get("head_dim") or default
    if head_dim is None and hidden % count:
        raise ConversionError(
            "config.json: hidden_size is no multiple of num_attention_heads", got=f"{hidden}, {count}"
        )
    return {
        "num_attention_heads": count,
        "group_query_attention": groups != count,
        "num_query_groups": groups,
        "kv_channels": head_dim or hidden // count,
    }


def activation(key: str = "hidden_act", **spellings: str) -> Derived:
    """Rule for the non-linearity: transformers' names and ours, the name first that is meant where ``key`` is absent
    and, of several for one of ours, written."""

    def to_values(hf_config: Values) -> dict[str, Any]:
        name = hf_config.get(key) or next(iter(spellings))
        if name not in spellings:
            raise ConversionError(
                f"config.json: {key} is not supported for this family", got=name, allowed=", ".join(spellings)
            )
        return {"activation_func": spellings[name]}

    def to_hf(values: Values) -> dict[str, Any]:
        for name, ours in spellings.items():
            if ours == values["activation_func"]:
                return {key: name}
        raise ConversionError(
            "this activation has no place in this family",
            got=values["activation_func"],
            allowed=", ".join(sorted(set(spellings.values()))),
        )

    return Derived(key, to_values=to_values, to_hf=to_hf)


def divisor(key: str, ours: str, *, default: float = 1.0) -> Derived:
    """Rule for a factor of ours that config.json gives as what is divided by; ``default`` is what an absent key
    means."""

    def to_values(hf_config: Values) -> dict[str, Any]:
        given = hf_config.get(key)
        if given == 0:
            raise ConversionError(f"config.json: {key} divides", got=given, allowed="anything but 0")
        return {ours: 1 / (default if given is None else given)}

    return Derived(key, to_values=to_values, to_hf=lambda values: {key: 1 / values[ours]})


def ties(*, default: bool) -> Derived:
    """Rule for embedding and output layer as one matrix; ``default`` is what an absent key means."""

    def to_values(hf_config: Values) -> dict[str, Any]:
        tied = hf_config.get("tie_word_embeddings")
        return {"untie_embeddings_and_output_weights": not (default if tied is None else tied)}

    def to_hf(values: Values) -> dict[str, Any]:
        return {"tie_word_embeddings": not values["untie_embeddings_and_output_weights"]}

    return Derived("tie_word_embeddings", to_values=to_values, to_hf=to_hf)


_PLAIN: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "pre_norm": True,
    "post_norm": False,
    "embedding_layernorm": False,
    "qk_layernorm": False,
    "qk_norm_over_heads": False,
    "qk_norm_after_rotary": False,
    "gated_linear_unit": True,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "num_moe_experts": None,
    "multi_latent_attention": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_base_local": None,
    "no_rope_freq": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "softmax_scale": None,
    "attn_logit_softcapping": None,
    "output_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "output_multiplier": 1.0,
    "normalize_output_weight": False,
}
"""What most decoders have in common beyond their sizes."""


def plain(*others: str, **changes: Any) -> Const:
    """What every model of a family computes alike: that of most decoders, with ``changes``; the fields ``others``
    belong to other rules of the family."""
    return Const(**{name: value for name, value in {**_PLAIN, **changes}.items() if name not in others})


SIZES = (
    BOOKKEEPING,
    TOKENS_AND_GENERATION,
    *PLAIN_DECODER,
    Rename("num_hidden_layers", "num_layers"),
    Rename("hidden_size", "hidden_size"),
    Rename("intermediate_size", "ffn_hidden_size"),
    Rename("vocab_size", "vocab_size"),
    Rename("max_position_embeddings", "max_position_embeddings"),
    Rename("rms_norm_eps", "layernorm_epsilon", default=1e-6),
    Rename("initializer_range", "init_method_std", default=0.02, recipe=True),
    Rename("attention_dropout", "attention_dropout", default=0.0, recipe=True),
    Preset(hidden_dropout=0.0),
)
"""Sizes, norm epsilon and dropout by the names that most configurations give them."""

SWIGLU = activation(silu="silu", swish="silu")
GEGLU = activation(gelu_pytorch_tanh="gelu_tanh", gelu="gelu")


def _root_to_values(hf_config: Values) -> dict[str, Any]:
    hidden = hf_config.get("hidden_size")
    if not hidden:
        raise ConversionError("config.json lacks 'hidden_size'")
    return {"embedding_multiplier": hidden**0.5}


def _root_to_hf(values: Values) -> dict[str, Any]:
    if values["embedding_multiplier"] != values["hidden_size"] ** 0.5:
        raise ConversionError(
            "embeddings are multiplied by the square root of the hidden size in this family",
            got=values["embedding_multiplier"],
            allowed=values["hidden_size"] ** 0.5,
        )
    return {}


ROOT_SCALED_EMBEDDINGS = Derived(to_values=_root_to_values, to_hf=_root_to_hf, depends=("hidden_size",))
"""Gemma's factor on the embeddings, which config.json leaves unsaid."""
