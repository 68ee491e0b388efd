"""A config.json of the same kind of model, small enough for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Ignore, ModelFamily
from mindspeed_llm.tools.new_family.folder import Class, Model
from mindspeed_llm.tools.new_family.keys import Reading

_LAYERS, _HIDDEN, _FFN, _VOCAB, _HEADS, _LENGTH = 4, 64, 128, 328, 4, 512
_WINDOW, _TRAINED = 8, 64


def tiny_config(family: ModelFamily, model: Model, reading: Reading) -> dict[str, Any]:
    """Keys of config.json: the model's own where no size is in them. Empty where the rules do not go both ways yet."""
    kind = model.kind
    known = {key: value for key, value in model.config.items() if key not in reading.left}
    try:
        values = family.config_to_values(known)
        small = {**values, **_shrunk(values)}
        written: dict[str, Any] = {}
        for rule in family.config:
            if not rule.recipe:
                written |= rule.to_hf(small)
            elif not isinstance(rule, Ignore):
                written |= {key: 0.0 for key, _ in _dropouts(rule.to_hf(small), kind)}
    except (ConversionError, KeyError, TypeError):
        return {}
    written |= {key: value for key in reading.pinned if (value := _pinned(key, model)) is not None}
    for key in list(written):
        without = {name: value for name, value in written.items() if name != key}
        if _means(family, kind, without) == _means(family, kind, written):
            written = without
    return written


def _means(family: ModelFamily, kind: Class, config: Mapping[str, Any]) -> Any:
    """What the family and transformers make of a config.json."""
    try:
        return family.config_to_values(config), kind.filled(config)
    except (ConversionError, KeyError, TypeError):
        return None


def _dropouts(written: Mapping[str, Any], kind: Class) -> list[tuple[str, Any]]:
    """Those that transformers has on where config.json is silent."""
    return [(key, value) for key, value in written.items() if "drop" in key and kind.silent.get(key)]


def _pinned(key: str, model: Model) -> Any:
    value = model.full.get(key)
    return None if model.kind.silent.get(key) == value else value


def _shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have to do with sizes."""
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    groups, channels = values.get("num_query_groups") or heads, values.get("kv_channels") or hidden // heads
    size = _HIDDEN // _HEADS if channels * heads == hidden else 2 * _HIDDEN // _HEADS
    small: dict[str, Any] = {
        "num_layers": _LAYERS,
        "hidden_size": _HIDDEN,
        "ffn_hidden_size": _FFN if values["ffn_hidden_size"] != 4 * hidden else 4 * _HIDDEN,
        "vocab_size": _VOCAB,
        "num_attention_heads": _HEADS,
        "num_query_groups": _HEADS if groups == heads else 2,
        "group_query_attention": groups != heads,
        "kv_channels": size,
        "max_position_embeddings": _LENGTH,
        "layernorm_epsilon": values.get("layernorm_epsilon"),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if values.get("window_size"):
        small["window_size"] = (_WINDOW - 1, 0)
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        if isinstance(pattern := values.get(name), tuple):
            # Of both kinds, if there are both.
            small[name] = (1, 0, 1, 0) if len(set(pattern)) > 1 else pattern[:1] * _LAYERS
    if trained := values.get("rope_scaling_original_max_position_embeddings"):
        small["rope_scaling_original_max_position_embeddings"] = _TRAINED
        if values.get("rope_scaling_factor") == values["max_position_embeddings"] / trained:
            small["rope_scaling_factor"] = _LENGTH / _TRAINED
    pairs = int(size * values.get("rotary_percent", 1.0)) // 2
    for name in ("long_factor", "short_factor"):
        if factors := values.get(name):
            small[name] = tuple(factors[place * len(factors) // pairs] for place in range(pairs))
    if values.get("embedding_multiplier") == hidden**0.5:
        small["embedding_multiplier"] = _HIDDEN**0.5
    if values.get("softmax_scale") == channels**-0.5:
        small["softmax_scale"] = size**-0.5
    return small
