"""Rotary positions in config.json: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Derived, Values

DEFAULT_ROPE_THETA = 10000.0
"""What transformers takes when a config names no theta."""

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
            "truncate": "rope_scaling_truncate",
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
    "longrope": (
        {"long_factor": "long_factor", "short_factor": "short_factor"},
        {
            "factor": "rope_scaling_factor",
            "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
            "attention_factor": "rope_scaling_attention_factor",
        },
    ),
}
_SCALING_OFF: Mapping[str, Any] = {
    "rope_scaling_factor": None,
    "rope_scaling_original_max_position_embeddings": None,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "rope_scaling_truncate": True,
    "rope_scaling_mscale": None,
    "rope_scaling_mscale_all_dim": None,
    "rope_scaling_attention_factor": None,
    "long_factor": None,
    "short_factor": None,
}
"""Every field that a rope scaling may set, with the value that it has where the scaling does not name it."""


_LONGROPE_SPELLINGS = ("su", "longrope")


def rope(*, theta: float = DEFAULT_ROPE_THETA, partial: float | None = None, trained: int | None = None) -> Derived:
    """Rule for rotary positions, the same in all layers.

    Args:
        theta: what transformers takes for the family where config.json names none.
        partial: the part of each head that is rotated where config.json does not say it; None: always all of it.
        trained: the context before any stretching, for families whose configuration always has a number for it at its
            top: what transformers takes where config.json does not.
    """

    def to_values(hf_config: Values) -> dict[str, Any]:
        given, factor = rope_of(hf_config, theta)
        if partial is None and factor not in (None, 1.0):
            raise ConversionError("config.json: partial_rotary_factor is not supported for this family", got=factor)
        if trained is not None:
            hf_config = {"original_max_position_embeddings": trained, **hf_config}
        values = rope_values(given, hf_config)
        if partial is not None:
            values["rotary_percent"] = partial if factor is None else factor
        return values

    def to_hf(values: Values) -> dict[str, Any]:
        result = rope_parameters(values)
        if partial is not None:
            result["partial_rotary_factor"] = values["rotary_percent"]
        written: dict[str, Any] = {"rope_parameters": result}
        if trained is not None:
            context = values["rope_scaling_original_max_position_embeddings"]
            written["original_max_position_embeddings"] = context or values["max_position_embeddings"]
        return written

    return Derived(
        "rope_parameters",
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        to_values=to_values,
        to_hf=to_hf,
    )


def rope_of(hf_config: Values, theta: float) -> tuple[dict[str, Any], float | None]:
    """The rope settings in the form of transformers 5, and the part of a head that is rotated where it is said."""
    given = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise ConversionError("config.json: rope settings per layer type are not supported here", got=", ".join(nested))
    if given.get("rope_theta") is None:
        at_top = hf_config.get("rope_theta")
        given["rope_theta"] = theta if at_top is None else at_top
    partial = given.pop("partial_rotary_factor", None)
    return given, hf_config.get("partial_rotary_factor") if partial is None else partial


def rope_values(given: Mapping[str, Any], hf_config: Values) -> dict[str, Any]:
    """Our fields for one set of rope parameters."""
    given = dict(given)
    legacy_type = given.pop("type", None)
    rope_type = given.pop("rope_type", None) or legacy_type or "default"
    rope_type = "longrope" if rope_type in _LONGROPE_SPELLINGS else rope_type
    if rope_type not in _SCALING_KEYS:
        raise ConversionError("config.json: unknown rope_type", got=rope_type, allowed=", ".join(_SCALING_KEYS))
    values: dict[str, Any] = dict(_SCALING_OFF)
    values["position_embedding_type"] = "rope"
    values["rotary_base"] = given.pop("rope_theta")
    values["rope_scaling_type"] = None if rope_type == "default" else rope_type
    required, optional = _SCALING_KEYS[rope_type]
    missing = [key for key in required if given.get(key) is None]
    if missing:
        raise ConversionError(f"config.json: rope type {rope_type!r} lacks {', '.join(missing)}")
    for key, name in {**required, **optional}.items():
        value: Any = given.pop(key, None)
        if value is not None:
            values[name] = tuple(cast(list[float], value)) if isinstance(value, list) else value
    if rope_type in ("linear", "dynamic"):
        # some configs carry it although transformers reads max_position_embeddings instead
        given.pop("original_max_position_embeddings", None)
    surplus = sorted(key for key, value in given.items() if value is not None)
    if surplus and rope_type != "default":
        raise ConversionError(
            f"config.json: rope type {rope_type!r} has keys that it does not read", got=", ".join(surplus)
        )
    if rope_type in ("yarn", "llama3", "longrope"):
        _fill_original_length(hf_config, values)
    return values


def _fill_original_length(hf_config: Values, values: dict[str, Any]) -> None:
    """As transformers: a top-level key wins, then the rope's own, then the full length; the factor of yarn and
    longrope follows."""
    length: int = hf_config["max_position_embeddings"]
    original = hf_config.get("original_max_position_embeddings")
    original = original or values["rope_scaling_original_max_position_embeddings"] or length
    values["rope_scaling_original_max_position_embeddings"] = original
    if values["rope_scaling_factor"] is None:
        values["rope_scaling_factor"] = length / original


def rope_parameters(values: Values) -> dict[str, Any]:
    """One set of rope parameters for our fields."""
    rope_type = values["rope_scaling_type"] or "default"
    required, optional = _SCALING_KEYS[rope_type]
    result: dict[str, Any] = {"rope_type": rope_type, "rope_theta": values["rotary_base"]}
    for key, name in {**required, **optional}.items():
        if key in required or values[name] != _SCALING_OFF[name]:
            result[key] = list(values[name]) if isinstance(values[name], tuple) else values[name]
    return result
