"""Gemma 2: norms around attention and MLP, every other layer windowed, capped scores and logits."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, SANDWICH_NORMS, SPLIT_ATTENTION, SPLIT_GATED_MLP
from mindspeed_llm.models.family import Const, Derived, Expect, Ignore, ModelFamily, Values
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import ROOT_SCALED_EMBEDDINGS, SIZES, activation, heads, plain, ties
from mindspeed_llm.models.windows import FULL, SLIDING, layer_types, window_tokens, window_values


def _scale_to_values(hf_config: Values) -> dict[str, Any]:
    scalar = hf_config.get("query_pre_attn_scalar")
    return {"softmax_scale": (256 if scalar is None else scalar) ** -0.5}


def _scale_to_hf(values: Values) -> dict[str, Any]:
    scale = values["softmax_scale"]
    if scale is None:
        return {"query_pre_attn_scalar": values["kv_channels"]}
    scalar = scale**-2
    # An integer in every published config; its inverse root comes back with a rounding error.
    return {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar}


QUERY_SCALE = Derived("query_pre_attn_scalar", to_values=_scale_to_values, to_hf=_scale_to_hf)


def _capping(key: str, ours: str, default: float | None) -> Derived:
    """An absent key means ``default``, null means none."""
    return Derived(
        key,
        to_values=lambda hf_config: {ours: hf_config.get(key, default)},
        to_hf=lambda values: {key: values[ours]},
    )


def cappings(scores: float | None, logits: float | None) -> tuple[Derived, Derived]:
    """Rules for the soft caps, with what transformers takes for the family where a key is absent."""
    return (
        _capping("attn_logit_softcapping", "attn_logit_softcapping", scores),
        _capping("final_logit_softcapping", "output_logit_softcapping", logits),
    )


def interleaved_windows(period: int, window: int = 4096) -> Derived:
    """Rule for windows in all layers but each ``period``-th, unless ``layer_types`` says otherwise; ``window`` is what
    transformers takes where config.json names no size."""

    def to_values(hf_config: Values) -> dict[str, Any]:
        layers = hf_config.get("num_hidden_layers")
        if not layers:
            raise ConversionError("config.json lacks 'num_hidden_layers'")
        every = hf_config.get("sliding_window_pattern") or hf_config.get("_sliding_window_pattern") or period
        kinds = hf_config.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in range(layers)]
        return window_values(hf_config.get("sliding_window", window), kinds, layers)

    def to_hf(values: Values) -> dict[str, Any]:
        return {"sliding_window": window_tokens(values), "layer_types": layer_types(values)}

    return Derived(
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "layer_types",
        to_values=to_values,
        to_hf=to_hf,
        depends=("num_layers",),
    )


FAMILY = ModelFamily(
    name="gemma2",
    hf_model_type="gemma2",
    hf_architectures=("Gemma2ForCausalLM",),
    config=(
        *SIZES,
        heads(head_dim=256),
        rope(),
        activation("hidden_activation", gelu_pytorch_tanh="gelu_tanh", gelu="gelu"),
        ROOT_SCALED_EMBEDDINGS,
        QUERY_SCALE,
        *cappings(50.0, 30.0),
        interleaved_windows(2),
        ties(default=True),
        plain(
            "embedding_multiplier",
            "softmax_scale",
            "attn_logit_softcapping",
            "output_logit_softcapping",
            "window_size",
            "window_attn_skip_freq",
            layernorm_zero_centered_gamma=True,
            post_norm=True,
        ),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="no published model has it"),
        Expect("use_bidirectional_attention", False, None, why="decoder-only"),
        Ignore("hidden_act", why="transformers reads hidden_activation"),
        Ignore("cache_implementation", why="says how generation keeps keys and values"),
    ),
    weights=(*EMBEDDING_AND_HEAD, *SANDWICH_NORMS, *SPLIT_ATTENTION, *SPLIT_GATED_MLP),
    chat_template="gemma",
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
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
)
