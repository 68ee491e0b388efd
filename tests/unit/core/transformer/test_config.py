"""A built configuration does not change under the layers that read it."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest

import mindspeed_llm.core  # noqa: F401  the seam comes first
from mindspeed_llm.core.transformer.config import WRITTEN_AT_RUN_TIME, SuiteTransformerConfig
from mindspeed_llm.errors import ConfigError

from megatron.core.transformer.transformer_config import TransformerConfig


def sealed(**changes: Any) -> SuiteTransformerConfig:
    config = SuiteTransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **changes)
    config.hidden_dropout = 0.25
    config.seal()
    return config


@pytest.mark.parametrize("name", sorted({field.name for field in fields(SuiteTransformerConfig)} - WRITTEN_AT_RUN_TIME))
def test_every_field_is_sealed(name: str) -> None:
    config = sealed()
    before = getattr(config, name)
    with pytest.raises(ConfigError, match=f"sealed; {name} cannot change"):
        setattr(config, name, "another")
    assert getattr(config, name) is before


def test_an_unknown_attribute_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="sealed; hiden_size"):
        sealed().hiden_size = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(WRITTEN_AT_RUN_TIME))
def test_callbacks_stay_writable(name: str) -> None:
    config = sealed()
    marker = object()
    setattr(config, name, marker)
    assert getattr(config, name) is marker


def test_a_deep_copy_is_unsealed_and_independent() -> None:
    def callback() -> None: ...

    config = sealed(recompute_modules=["core_attn"])
    config.grad_scale_func = callback
    config.timers = {"timer": [1]}  # pyright: ignore[reportAttributeAccessIssue]
    twin = copy.deepcopy(config)
    assert type(twin) is SuiteTransformerConfig
    assert plain_values(twin) == plain_values(config)
    twin.hidden_dropout = 0.5
    assert twin.recompute_modules is not None
    twin.recompute_modules.append("mlp")
    assert config.hidden_dropout == 0.25
    assert config.recompute_modules == ["core_attn"]
    assert twin.grad_scale_func is callback
    assert twin.timers is config.timers
    with pytest.raises(ConfigError):
        config.hidden_dropout = 0.5
    twin.seal()
    with pytest.raises(ConfigError):
        twin.hidden_dropout = 0.1


def test_a_copy_inside_something_else_is_one_copy() -> None:
    config = sealed()
    first, second = copy.deepcopy([config, config])
    assert first is second
    assert first is not config


def plain_values(config: TransformerConfig) -> dict[str, Any]:
    """Fields that compare by value: functions made anew by each configuration do not."""
    return {name: value for name, value in vars(config).items() if name != "_sealed" and not callable(value)}


def test_it_is_megatron_cores_configuration() -> None:
    plain = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.25)
    ours = plain_values(sealed())
    assert ours == {**ours, **plain_values(plain)}
