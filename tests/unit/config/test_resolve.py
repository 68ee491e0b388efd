"""Precedence, sources, and what may not be overridden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_llm.config.files import read_environment, read_yaml
from mindspeed_llm.config.resolve import Layer, format_non_default, from_values, provenance, resolve
from mindspeed_llm.errors import ConfigError

MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}


@given(st.sets(st.integers(0, 3), min_size=1))
def test_the_last_layer_that_says_it_wins(saying: set[int]) -> None:
    layers = [Layer("base", MODEL)]
    layers += [Layer(f"source {rank}", {"seed": 100 + rank} if rank in saying else {}) for rank in range(4)]
    cfg = resolve(layers)
    assert cfg.training.seed == 100 + max(saying)
    assert cfg.sources["seed"] == f"source {max(saying)}"


def test_defaults_have_no_source() -> None:
    cfg = from_values(MODEL)
    assert "seed" not in cfg.sources
    assert "seed" not in {row.name for row in provenance(cfg)}


def test_start_up_list_shows_values_that_are_not_default_with_sources() -> None:
    text = format_non_default(resolve([Layer("recipe.yaml", MODEL), Layer("command line", {"seed": 7})], world_size=2))
    assert "[training]\n  seed" in text
    assert "= 7  (command line)" in text
    assert "= 64  (recipe.yaml)" in text
    assert "= 16  (derived)" in text  # kv_channels
    assert "= 2  (launcher)" in text  # world_size
    assert "num_workers" not in text


def test_weights_bind_shapes() -> None:
    weights = Layer("/models/tiny", MODEL, binding=True)
    with pytest.raises(ConfigError, match="--num-layers contradicts the weights that are loaded") as caught:
        resolve([weights, Layer("command line", {"num_layers": 8, "hidden_size": 32})])
    text = str(caught.value)
    assert "2 problems" in text
    assert "got: 8 (command line)" in text
    assert "allowed: 4 (/models/tiny)" in text


def test_weights_do_not_bind_what_changes_no_shape() -> None:
    weights = Layer("/models/tiny", {**MODEL, "rotary_base": 1e4}, binding=True)
    cfg = resolve([weights, Layer("command line", {"rotary_base": 1e6, "num_layers": 4})])
    assert cfg.model.rotary_base == 1e6
    assert cfg.notices == ("--rotary-base: 10000.0 (/models/tiny) is overridden by 1000000.0 (command line)",)


def test_an_architecture_without_weights_can_be_changed() -> None:
    cfg = resolve([Layer("config.json", MODEL), Layer("command line", {"num_layers": 8})])
    assert cfg.transformer.num_layers == 8
    assert "--num-layers: 4 (config.json) is overridden by 8 (command line)" in cfg.notices


def test_unknown_names_are_refused_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="num_layer is not a known option") as caught:
        from_values({**MODEL, "num_layer": 4})
    assert "num_layers" in str(caught.value)


def test_launcher_values_cannot_be_given() -> None:
    with pytest.raises(ConfigError, match="world_size is not a known option"):
        from_values({**MODEL, "world_size": 4})


def test_value_finds_a_field_in_any_section() -> None:
    cfg = from_values({**MODEL, "overlap_grad_reduce": True})
    assert cfg.value("overlap_grad_reduce") is True
    with pytest.raises(KeyError):
        cfg.value("not_a_field")


def test_yaml_is_flat_or_grouped_in_any_spelling(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        """
num-layers: 4
hidden_size: 64
transformer:
  num_attention_heads: 4
  disable-bias-linear: true
  swiglu: true
model:
  max-position-embeddings: 64
disable_bias_linear: true
no-create-attention-mask-in-dataloader: true
data_path: [0.3, a, 0.7, b]
save: null
lr: 1e-4
"""
    )
    reading = read_yaml(str(path))
    assert reading.errors == []
    cfg = resolve([reading.layer()])
    assert cfg.transformer.add_bias_linear is False
    assert cfg.transformer.gated_linear_unit is True
    assert cfg.model.activation_func == "silu"
    assert cfg.data.create_attention_mask_in_dataloader is False
    assert cfg.data.data_path == ("0.3", "a", "0.7", "b")
    assert cfg.optimizer.lr == 1e-4
    assert cfg.sources["num_layers"] == str(path)


def test_a_yaml_flag_set_to_false_is_its_opposite(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("disable-bias-linear: false\nbf16: no\nswiglu: false\n")
    assert read_yaml(str(path)).values == {"add_bias_linear": True, "bf16": False}


def test_all_yaml_problems_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("num-layerz: 4\nhidden-size: wide\nmoe-router-fusion: true\nmodels: {vocab-size: 3}\n")
    texts = [str(error) for error in read_yaml(str(path)).errors]
    assert len(texts) == 4
    assert "models is not a section" in texts[0]
    assert "--num-layerz is not a known option" in texts[1]
    assert "--hidden-size does not take this value" in texts[2]
    assert "needs TransformerEngine" in texts[3]


@pytest.mark.parametrize(
    ("content", "message"), [("- a\n", "must map flags to values"), ("a: [", "is not YAML"), (None, "cannot be read")]
)
def test_files_that_are_no_configuration(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_yaml(str(path))


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("save: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        read_yaml(str(path))


def test_environment_names_flags_in_capitals() -> None:
    environ = {"MINDSPEED_LLM_SEED": "7", "MINDSPEED_LLM_SWIGLU": "1", "MINDSPEED_LLM_DEVICE": "cpu", "HOME": "/root"}
    reading = read_environment(environ)
    assert reading.errors == []
    assert reading.values == {"seed": 7, "gated_linear_unit": True, "activation_func": "silu"}


def test_a_bad_value_names_its_variable() -> None:
    (error,) = read_environment({"MINDSPEED_LLM_LR": "abc"}).errors
    assert error.what == "--lr does not take this value (environment MINDSPEED_LLM_LR)"


def test_a_key_given_twice_is_an_error_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-3\nmodel:\n  vocab-size: 3\n  vocab_size: 4\n\nlr: 2e-3\n")
    told = [(error.what, error.got) for error in read_yaml(str(path)).errors]
    assert told == [
        (f"vocab_size is given twice ({path})", "lines 3 and 4"),
        (f"lr is given twice ({path})", "lines 1 and 6"),
    ]


def test_an_unknown_variable_with_our_prefix_is_an_error() -> None:
    (error,) = read_environment({"MINDSPEED_LLM_SEDE": "7"}).errors
    assert "--sede is not a known option (environment MINDSPEED_LLM_SEDE)" in str(error)
    assert "--seed" in str(error)
