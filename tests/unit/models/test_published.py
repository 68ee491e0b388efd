"""Architectures that ``--hf-config NAME`` knows, against what their makers and other suites say of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.registry import CONFIG, family_layer, hf_config_path, packaged_configs
from tests.oracles import ORACLES
from tests.unit.models.published import PUBLISHED, hf_config, shallow, stored_shapes


def test_the_published_models_are_these() -> None:
    assert set(packaged_configs()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_builds_it_with_the_published_number_of_parameters(name: str) -> None:
    assert sum(map(math.prod, stored_shapes(name).values())) == PUBLISHED[name].parameters


def _rope(config: Any) -> dict[str, Any]:
    """``rope_parameters`` as transformers reads them, of Gemma 3 those of the layers without a window."""
    found = getattr(config, "rope_parameters", None) or {}
    return dict(found.get("full_attention", found))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_run_gets_what_is_published_and_what_transformers_reads(name: str) -> None:
    facts, config = PUBLISHED[name], shallow(name).config
    layer = family_layer({"hf_config": name})
    assert layer is not None
    assert not layer.binding
    values, rope = layer.values, _rope(config)
    if alpha := rope.get("alpha"):
        stretch = alpha ** (config.head_dim / (config.head_dim - 2))
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"] * stretch}
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    assert (values["num_attention_heads"], values["num_query_groups"]) == (heads, groups)
    rotates = values.get("position_embedding_type") in (None, "rope")
    assert rotates is (facts.theta is not None)
    epsilon = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
    assert values["layernorm_epsilon"] == epsilon == facts.epsilon
    if rotates:
        assert values["rotary_base"] == rope["rope_theta"] == facts.theta
        assert (values["rope_scaling_type"] or "default") == rope["rope_type"]
    if rope.get("rope_type") == "longrope":  # transformers: as far as the longest exceeds the original
        rope["factor"] = config.max_position_embeddings / config.original_max_position_embeddings
    assert values.get("rope_scaling_factor") == rope.get("factor") == facts.factor
    assert values["max_position_embeddings"] == facts.positions
    assert values["untie_embeddings_and_output_weights"] is not config.tie_word_embeddings


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_run_has_the_windows_that_are_published_and_that_transformers_reads(name: str) -> None:
    layer = family_layer({"hf_config": name})
    assert layer is not None
    values: Mapping[str, Any] = layer.values
    window, depth = values.get("window_size"), values["num_layers"]
    size = PUBLISHED[name].window
    assert window == (size and (size - 1, 0))
    if values["model_type_hf"] in ORACLES:
        return
    whole = hf_config(name)
    config = AutoConfig.for_model(whole.pop("model_type"), **whole)
    read = getattr(config, "sliding_window", None)
    everywhere = "sliding_attention" if read else "full_attention"
    kinds: list[str] = getattr(config, "layer_types", None) or [everywhere] * depth
    pattern = values.get("window_attn_skip_freq") or [1] * depth
    found = [bool(window and windowed) for windowed in pattern]
    assert found == [kind == "sliding_attention" for kind in kinds]
    assert size in (None, read)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hf_config_path("Qwen2.5-7B") == packaged_configs()["Qwen2.5-7B"]
    (tmp_path / "Qwen2.5-7B").mkdir()
    assert hf_config_path("Qwen2.5-7B") == packaged_configs()["Qwen2.5-7B"]
    (tmp_path / "Qwen2.5-7B" / CONFIG).write_text(json.dumps({}))
    assert hf_config_path("Qwen2.5-7B") == Path("Qwen2.5-7B")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("Qwen2.5-7b", "Qwen2.5-7B"),
        ("Qwen/Qwen2.5-32B", "Qwen2.5-32B"),
        ("Llama-3.2-2B", "Llama-3.2-1B"),
        ("Meta-Llama-3.1-8B", "Llama-3.1-8B"),
        ("something else", "Llama-2-7B"),
        (str(Path(__file__)), "Llama-2-7B"),
    ],
)
def test_an_unknown_name_is_answered_with_the_near_ones(given: str, near: str) -> None:
    with pytest.raises(ConfigError, match="no published model of that name") as caught:
        family_layer({"hf_config": given})
    assert near in str(caught.value)
