"""SmolLM3: every fourth layer knows no positions."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORM_BLOCK
from mindspeed_llm.models.family import Const, Derived, Expect, Ignore, ModelFamily, Values
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties
from mindspeed_llm.models.windows import LAST_LAYERS


def _positions_to_values(hf_config: Values) -> dict[str, Any]:
    """transformers marks the layers that do rotate, megatron-core those that do not."""
    layers = hf_config.get("num_hidden_layers") or 0
    marks = hf_config.get("no_rope_layers")
    if marks is None:
        interval = hf_config.get("no_rope_layer_interval") or 4
        marks = [int((i + 1) % interval != 0) for i in range(layers)]
    if len(marks) != layers:
        raise ConversionError("config.json: no_rope_layers must name every layer", got=f"{len(marks)} of {layers}")
    return {"no_rope_freq": None if all(marks) else tuple(1 - int(mark) for mark in marks)}


def _positions_to_hf(values: Values) -> dict[str, Any]:
    layers, pattern = values["num_layers"], values["no_rope_freq"]
    if isinstance(pattern, int):
        pattern = [int((i + 1) % pattern == 0) for i in range(layers)]
    return {"no_rope_layers": [1 - int(skips) for skips in pattern or [0] * layers]}


FAMILY = ModelFamily(
    name="smollm3",
    hf_model_type="smollm3",
    hf_architectures=("SmolLM3ForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(theta=2_000_000.0),
        SWIGLU,
        ties(default=True),
        Derived(
            "no_rope_layers",
            "no_rope_layer_interval",
            to_values=_positions_to_values,
            to_hf=_positions_to_hf,
            depends=("num_layers",),
        ),
        LAST_LAYERS,
        plain("no_rope_freq", "window_size", "window_attn_skip_freq"),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="the published models have none"),
        Expect("mlp_bias", False, why="the published models have none"),
        Ignore("pretraining_tp", why="slices the same matrix product; transformers itself no longer reads it"),
    ),
    weights=(*EMBEDDING_AND_HEAD, *PRE_NORM_BLOCK),
    chat_template="smollm3",
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
        "no_rope_layer_interval": 2,
        "no_rope_layers": [1, 0, 1, 0],
        "tie_word_embeddings": True,
    },
)
