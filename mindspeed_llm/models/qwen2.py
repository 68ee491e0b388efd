"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.blocks import DENSE_GQA, EMBEDDING_AND_HEAD, PRE_NORM_BLOCK, QKV_BIAS
from mindspeed_llm.models.family import Const, Derived, Expect, ModelFamily, Values


def _window_to_values(hf_config: Values) -> dict[str, Any]:
    """transformers: layers from ``max_window_layers`` on see the last ``sliding_window`` tokens, themselves included;
    ``layer_types`` says so layer by layer. megatron-core's window counts the tokens to the left."""
    off: dict[str, Any] = {"window_size": None, "window_attn_skip_freq": None}
    window = hf_config.get("sliding_window", 4096) if hf_config.get("use_sliding_window") else None
    layers = hf_config["num_hidden_layers"]
    layer_types = hf_config.get("layer_types")
    if layer_types is None:
        first = hf_config.get("max_window_layers", 28)
        layer_types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    unknown = set(layer_types) - {"sliding_attention", "full_attention"}
    if unknown or len(layer_types) != layers:
        raise ConversionError(
            "config.json: layer_types must name full_attention or sliding_attention once per layer",
            got=f"{len(layer_types)} entries of {', '.join(sorted(set(layer_types)))} for {layers} layers",
        )
    if "sliding_attention" not in layer_types:
        return off
    if not window:
        raise ConversionError("config.json: layer_types has sliding_attention, but there is no sliding_window in use")
    return {
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": tuple(int(kind == "sliding_attention") for kind in layer_types),
    }


def _window_to_hf(values: Values) -> dict[str, Any]:
    layers, window, pattern = values["num_layers"], values["window_size"], values["window_attn_skip_freq"]
    if window is None:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": layers}
    if pattern is None:
        pattern = [1] * layers
    elif isinstance(pattern, int):
        pattern = [int((i + 1) % pattern != 0) for i in range(layers)]
    if window[1] != 0 or len(pattern) != layers:
        raise ConversionError("this attention window cannot be written as Qwen2", got=f"{window}, {pattern}")
    return {
        "use_sliding_window": True,
        "sliding_window": window[0] + 1,
        "max_window_layers": pattern.index(1) if 1 in pattern else layers,
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern],
    }


FAMILY = ModelFamily(
    name="qwen2",
    hf_model_type="qwen2",
    hf_architectures=("Qwen2ForCausalLM",),
    config=(
        *DENSE_GQA,
        Const(add_qkv_bias=True, add_bias_linear=False),
        Expect("use_mrope", False, None, why="text only: positions have one axis"),
        Derived(
            "use_sliding_window",
            "sliding_window",
            "max_window_layers",
            "layer_types",
            to_values=_window_to_values,
            to_hf=_window_to_hf,
            depends=("num_layers",),
        ),
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK, QKV_BIAS),
    chat_template="qwen",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    },
)
