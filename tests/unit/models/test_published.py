"""Architectures that ``--hf-config NAME`` knows, against what their makers and other suites say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.registry import CONFIG, family_layer, hf_config_path, packaged_configs


class Facts(NamedTuple):
    """What the sizes of the weights do not tell: as in litgpt 0.5.13's table, and for Qwen2 in NeMo's."""

    parameters: int
    epsilon: float
    theta: float
    positions: int
    factor: float | None = None


LONG = 131072
PUBLISHED = {
    "Qwen2-0.5B": Facts(494_032_768, 1e-6, 1e6, LONG),
    "Qwen2-1.5B": Facts(1_543_714_304, 1e-6, 1e6, LONG),
    "Qwen2-7B": Facts(7_615_616_512, 1e-6, 1e6, LONG),
    "Qwen2-72B": Facts(72_706_203_648, 1e-5, 1e6, LONG),
    "Qwen2.5-0.5B": Facts(494_032_768, 1e-6, 1e6, 32768),
    "Qwen2.5-1.5B": Facts(1_543_714_304, 1e-6, 1e6, LONG),
    "Qwen2.5-3B": Facts(3_085_938_688, 1e-6, 1e6, 32768),
    "Qwen2.5-7B": Facts(7_615_616_512, 1e-6, 1e6, LONG),
    "Qwen2.5-14B": Facts(14_770_033_664, 1e-5, 1e6, LONG),
    "Qwen2.5-32B": Facts(32_763_876_352, 1e-5, 1e6, LONG),
    "Qwen2.5-72B": Facts(72_706_203_648, 1e-5, 1e6, LONG),
    "Llama-2-7B": Facts(6_738_415_616, 1e-5, 1e4, 4096),
    "Llama-2-13B": Facts(13_015_864_320, 1e-5, 1e4, 4096),
    "Llama-2-70B": Facts(68_976_648_192, 1e-5, 1e4, 4096),
    "Llama-3-8B": Facts(8_030_261_248, 1e-5, 5e5, 8192),
    "Llama-3-70B": Facts(70_553_706_496, 1e-5, 5e5, 8192),
    "Llama-3.1-8B": Facts(8_030_261_248, 1e-5, 5e5, LONG, 8),
    "Llama-3.1-70B": Facts(70_553_706_496, 1e-5, 5e5, LONG, 8),
    "Llama-3.2-1B": Facts(1_235_814_400, 1e-5, 5e5, LONG, 32),
    "Llama-3.2-3B": Facts(3_212_749_824, 1e-5, 5e5, LONG, 32),
    "Llama-3.3-70B": Facts(70_553_706_496, 1e-5, 5e5, LONG, 8),
}
"""Numbers of parameters as the model cards give them."""


def test_the_published_models_are_these() -> None:
    assert set(packaged_configs()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_builds_it_with_the_published_number_of_parameters(name: str) -> None:
    facts = PUBLISHED[name]
    folder = packaged_configs()[name]
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Two depths tell a layer and the rest, in a fraction of the time of eighty layers.
    layers, counts = config.num_hidden_layers, []
    for depth in (1, 2):
        shallow = AutoConfig.from_pretrained(folder, num_hidden_layers=depth, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shallow, trust_remote_code=False)
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert counts[0] + (layers - 1) * (counts[1] - counts[0]) == facts.parameters
    rope = config.rope_parameters
    found = (config.rms_norm_eps, rope["rope_theta"], config.max_position_embeddings, rope.get("factor"))
    assert found == facts[1:]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_run_gets_what_transformers_reads(name: str) -> None:
    config = AutoConfig.from_pretrained(packaged_configs()[name], trust_remote_code=False)
    layer = family_layer({"hf_config": name})
    assert layer is not None
    assert not layer.binding
    values = layer.values
    assert (values["num_layers"], values["hidden_size"], values["ffn_hidden_size"], values["vocab_size"]) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
    )
    assert (values["num_attention_heads"], values["num_query_groups"]) == (
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    assert values["layernorm_epsilon"] == config.rms_norm_eps
    assert values["rotary_base"] == config.rope_parameters["rope_theta"]
    assert values["untie_embeddings_and_output_weights"] is not config.tie_word_embeddings
    assert values["add_qkv_bias"] is (config.model_type == "qwen2")
    assert values.get("window_size") is None


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
