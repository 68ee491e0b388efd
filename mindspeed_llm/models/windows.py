"""Which layers see only the last tokens: ``layer_types`` of config.json and what stands for it in older ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Derived, Values

SLIDING, FULL = "sliding_attention", "full_attention"
NO_WINDOW: dict[str, Any] = {"window_size": None, "window_attn_skip_freq": None}


def window_values(window: int | None, layer_types: Sequence[str], layers: int) -> dict[str, Any]:
    """Our fields for a window of so many tokens, a query's own included, in some of the layers.

    Raises:
        ConversionError: other kinds of layers, another number of them, or windowed ones without a window.
    """
    unknown = set(layer_types) - {SLIDING, FULL}
    if unknown or len(layer_types) != layers:
        raise ConversionError(
            "config.json: layer_types must name full_attention or sliding_attention once per layer",
            got=f"{len(layer_types)} entries of {', '.join(sorted(set(layer_types)))} for {layers} layers",
        )
    if SLIDING not in layer_types:
        return dict(NO_WINDOW)
    if not window:
        raise ConversionError("config.json: layer_types has sliding_attention, but there is no sliding_window in use")
    return {
        # megatron-core's window counts the tokens to the left.
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": tuple(int(kind == SLIDING) for kind in layer_types),
    }


def layer_types(values: Values) -> list[str]:
    """The kind of each layer of a run.

    Raises:
        ConversionError: a window that Hugging Face's configurations cannot say.
    """
    layers, window, pattern = values["num_layers"], values["window_size"], values["window_attn_skip_freq"]
    if window is None:
        return [FULL] * layers
    if pattern is None:
        pattern = [1] * layers
    elif isinstance(pattern, int):
        pattern = [int((i + 1) % pattern != 0) for i in range(layers)]
    if window[1] != 0 or len(pattern) != layers:
        raise ConversionError("this attention window has no place in this family", got=f"{window}, {pattern}")
    return [SLIDING if windowed else FULL for windowed in pattern]


def window_tokens(values: Values) -> int | None:
    """Tokens that a windowed layer sees, a query's own included."""
    return None if values["window_size"] is None else values["window_size"][0] + 1


def _last_layers_to_values(hf_config: Values) -> dict[str, Any]:
    """transformers: layers from ``max_window_layers`` on see the last ``sliding_window`` tokens; ``layer_types`` says
    so layer by layer."""
    window = hf_config.get("sliding_window", 4096) if hf_config.get("use_sliding_window") else None
    layers = hf_config["num_hidden_layers"]
    kinds = hf_config.get("layer_types")
    if kinds is None:
        first = hf_config.get("max_window_layers", 28)
        kinds = [SLIDING if window and i >= first else FULL for i in range(layers)]
    return window_values(window, kinds, layers)


def _last_layers_to_hf(values: Values) -> dict[str, Any]:
    kinds, window = layer_types(values), window_tokens(values)
    if window is None:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": len(kinds)}
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else len(kinds),
        "layer_types": kinds,
    }


LAST_LAYERS = Derived(
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
    to_values=_last_layers_to_values,
    to_hf=_last_layers_to_hf,
    depends=("num_layers",),
)
"""Qwen's windows: off unless switched on, then in the last layers."""


def _all_layers_to_values(hf_config: Values, default: int | None) -> dict[str, Any]:
    window = hf_config.get("sliding_window", default)
    return dict(NO_WINDOW) if not window else {"window_size": (window - 1, 0), "window_attn_skip_freq": None}


def _all_layers_to_hf(values: Values) -> dict[str, Any]:
    if FULL in layer_types(values) and values["window_size"] is not None:
        raise ConversionError("this family has a window in every layer or in none", got=values["window_attn_skip_freq"])
    return {"sliding_window": window_tokens(values)}


def all_layers(default: int | None) -> Derived:
    """Rule for a window that every layer has; ``default`` is what an absent key means (null means none)."""
    return Derived(
        "sliding_window",
        to_values=lambda hf_config: _all_layers_to_values(hf_config, default),
        to_hf=_all_layers_to_hf,
    )
