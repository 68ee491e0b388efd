"""Gemma 3, its text models: five windowed layers to one, each kind with a rotary base of its own."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, QK_NORMS, SANDWICH_NORMS, SPLIT_ATTENTION, SPLIT_GATED_MLP
from mindspeed_llm.models.family import Const, Derived, Expect, Ignore, ModelFamily, Values
from mindspeed_llm.models.gemma2 import QUERY_SCALE, cappings, interleaved_windows
from mindspeed_llm.models.rope import rope_parameters, rope_values
from mindspeed_llm.models.rules import ROOT_SCALED_EMBEDDINGS, SIZES, activation, heads, plain, ties
from mindspeed_llm.models.windows import FULL, SLIDING

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def _rope_to_values(hf_config: Values) -> dict[str, Any]:
    """``rope_parameters`` by kind of layer, or ``rope_theta``, ``rope_scaling`` and ``rope_local_base_freq``."""
    by_kind: Values = hf_config.get("rope_parameters") or {}
    everywhere: dict[str, Any] = dict(by_kind.get(FULL) or hf_config.get("rope_scaling") or {})
    everywhere.setdefault("rope_theta", hf_config.get("rope_theta") or _GLOBAL_THETA)
    windowed: dict[str, Any] = dict(by_kind.get(SLIDING) or {})
    windowed.setdefault("rope_theta", hf_config.get("rope_local_base_freq") or _LOCAL_THETA)
    local = rope_values(windowed, hf_config)["rotary_base"]
    return {**rope_values(everywhere, hf_config), "rotary_base_local": local}


def _rope_to_hf(values: Values) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": values["rotary_base_local"]}
    return {"rope_parameters": {FULL: rope_parameters(values), SLIDING: local}}


FAMILY = ModelFamily(
    name="gemma3_text",
    hf_model_type="gemma3_text",
    hf_architectures=("Gemma3ForCausalLM",),
    config=(
        *SIZES,
        heads(head_dim=256),
        Derived(
            "rope_parameters",
            "rope_theta",
            "rope_scaling",
            "rope_local_base_freq",
            to_values=_rope_to_values,
            to_hf=_rope_to_hf,
        ),
        activation("hidden_activation", gelu_pytorch_tanh="gelu_tanh", gelu="gelu"),
        ROOT_SCALED_EMBEDDINGS,
        QUERY_SCALE,
        *cappings(None, None),
        interleaved_windows(6),
        ties(default=True),
        plain(
            "embedding_multiplier",
            "softmax_scale",
            "attn_logit_softcapping",
            "output_logit_softcapping",
            "rotary_base_local",
            "window_size",
            "window_attn_skip_freq",
            layernorm_zero_centered_gamma=True,
            post_norm=True,
            qk_layernorm=True,
        ),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="no published model has it"),
        Expect("use_bidirectional_attention", False, None, why="decoder-only"),
        Ignore("hidden_act", why="transformers reads hidden_activation"),
        Ignore("cache_implementation", why="says how generation keeps keys and values"),
    ),
    weights=(*EMBEDDING_AND_HEAD, *SANDWICH_NORMS, *SPLIT_ATTENTION, *QK_NORMS, *SPLIT_GATED_MLP),
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
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
)
