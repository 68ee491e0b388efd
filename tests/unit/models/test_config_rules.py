"""config.json to our fields and back, against transformers' own reading of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import ModelFamily, values_of
from mindspeed_llm.models.registry import families, family_by_name, family_for
from tests.oracles import ORACLES

LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA32 = {
    **LLAMA31,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA31["rope_scaling"], "factor": 32.0},  # type: ignore[dict-item]
    "tie_word_embeddings": True,
}
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
REAL: dict[str, dict[str, Any]] = {
    "Llama-2-7b": LLAMA2,
    "Llama-1-7b": {key: value for key, value in LLAMA2.items() if key != "num_key_value_heads"},
    "Llama-3.1-8B": LLAMA31,
    "Llama-3.1-70B": {
        **LLAMA31,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "Llama-3.1-405B": {
        **LLAMA31,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
    },
    "Llama-3.2-1B": LLAMA32,
    "Qwen2.5-0.5B": QWEN25,
    "Qwen2.5 with yarn": {
        **QWEN25,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "Qwen2.5 with windows": {**QWEN25, "use_sliding_window": True, "max_window_layers": 21},
}
NEVER = {"transformers_version", "dtype"}


def read_by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """Every value that transformers computes from a config.json, its own defaults filled in."""
    kind = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[config["model_type"]]
    read = kind.from_dict(json.loads(json.dumps(config))).to_dict()
    read["rope_parameters"].pop("type", None)  # the old spelling, kept beside rope_type
    # Without windows transformers never looks at their size, and an unset head_dim is what it divides out.
    if "sliding_attention" not in read.get("layer_types", ()):
        read = {key: value for key, value in read.items() if key not in ("sliding_window", "max_window_layers")}
    return {key: value for key, value in read.items() if key not in NEVER}


def values_for(config: dict[str, Any]) -> tuple[ModelFamily, dict[str, Any]]:
    family = family_for(config)
    return family, family.config_to_values(config)


@pytest.mark.parametrize("name", REAL)
def test_an_export_changes_nothing_but_the_dtype(name: str) -> None:
    family, values = values_for(REAL[name])
    written = family.values_to_config(values, "float32", REAL[name])
    assert {key: value for key, value in written.items() if key not in ("dtype", "torch_dtype")} == {
        key: value for key, value in REAL[name].items() if key != "torch_dtype"
    }
    assert written["dtype"] == written["torch_dtype"] == "float32"


@pytest.mark.parametrize("name", REAL)
def test_a_config_written_from_our_fields_alone_means_the_same(name: str) -> None:
    family, values = values_for(REAL[name])
    written = read_by_transformers(family.values_to_config(values, "bfloat16"))
    expected = read_by_transformers(REAL[name])
    tokens = {"bos_token_id", "eos_token_id", "_name_or_path", "use_mrope"}
    assert {k: v for k, v in written.items() if k not in tokens} == {
        k: v for k, v in expected.items() if k not in tokens
    }


@pytest.mark.parametrize("name", REAL)
def test_fields_are_what_transformers_reads(name: str) -> None:
    config = REAL[name]
    read = read_by_transformers(config)
    _, values = values_for(config)
    rope = read["rope_parameters"]
    assert values["num_query_groups"] == read["num_key_value_heads"]
    assert values["kv_channels"] == read.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    assert values["rotary_base"] == rope["rope_theta"]
    assert (values["rope_scaling_type"] or "default") == rope["rope_type"]
    assert values["rope_scaling_factor"] == rope.get("factor")
    assert values["rope_scaling_original_max_position_embeddings"] == rope.get("original_max_position_embeddings")
    assert values["untie_embeddings_and_output_weights"] == (not read["tie_word_embeddings"])


@pytest.mark.parametrize("name", REAL)
def test_fields_are_those_of_a_run(name: str) -> None:
    """Every field exists in the run's configuration, resolution changes none, and they come back as config.json."""
    family, values = values_for(REAL[name])
    cfg = from_values({**values, "micro_batch_size": 1, "seq_length": 64, "train_iters": 1, "lr": 1e-3})
    resolved = values_of(cfg)
    assert {key: resolved[key] for key in values} == values
    assert family.values_to_config(resolved, "bfloat16", REAL[name])["vocab_size"] == REAL[name]["vocab_size"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": None},
        {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 8192}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 20, "beta_slow": 2}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "original_max_position_embeddings": 16384},
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    ],
)
def test_rotary_frequencies_are_the_same_after_a_round_trip(rope: dict[str, Any]) -> None:
    config = {**{key: value for key, value in LLAMA31.items() if not key.startswith("rope_")}, **rope}
    family, values = values_for(config)

    def frequencies(source: dict[str, Any]) -> tuple[list[float], float]:
        inner = transformers.LlamaConfig.from_dict(json.loads(json.dumps(source)))
        module = LlamaRotaryEmbedding(inner)
        return module.inv_freq.tolist(), module.attention_scaling

    assert frequencies(family.values_to_config(values, "float32")) == frequencies(config)


def test_what_a_run_changed_is_written_and_the_rest_kept() -> None:
    family, values = values_for(LLAMA31)
    changed = {**values, "num_layers": 4, "rotary_base": 1e6, "attention_dropout": 0.1, "init_method_std": 0.5}
    written = family.values_to_config(changed, "float32", LLAMA31)
    assert written["num_hidden_layers"] == 4
    assert written["rope_parameters"]["rope_theta"] == 1e6
    assert "rope_theta" not in written
    assert "rope_scaling" not in written
    assert (written["attention_dropout"], written["initializer_range"]) == (0.0, 0.02)  # training's own affair
    assert written["eos_token_id"] == 128001


def test_a_shallower_qwen_lists_as_many_layer_types() -> None:
    listed = {**QWEN25, "layer_types": ["full_attention"] * 24}
    family, values = values_for(listed)
    written = family.values_to_config({**values, "num_layers": 4}, "float32", listed)
    assert len(read_by_transformers(written)["layer_types"]) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is not supported"),
        ({"attention_bias": True}, "attention_bias=True, mlp_bias=False"),
        ({"mlp_bias": True}, "attention_bias=False, mlp_bias=True"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "unknown rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "has keys that it does not read"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "dequantise"),
        ({"num_key_value_heads": 5}, "no multiple of num_key_value_heads"),
        ({"num_hidden_layers": None}, "lacks 'num_hidden_layers'"),
        ({"logit_scale": 0.1, "residual_multiplier": 2.0}, "logit_scale, residual_multiplier"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = {**LLAMA31, **change}
    with pytest.raises(ConversionError, match=message):
        family_for(config).config_to_values(config)


def test_all_problems_of_a_config_stand_together() -> None:
    with pytest.raises(ConversionError) as caught:
        family_for(LLAMA31).config_to_values({**LLAMA31, "hidden_act": "relu", "vocab_size": None, "logit_scale": 1})
    assert all(word in str(caught.value) for word in ("hidden_act", "vocab_size", "logit_scale"))


@pytest.mark.parametrize(
    "windows",
    [
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 24},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 0,
            "layer_types": ["full_attention", "sliding_attention"] * 12,
        },
    ],
)
def test_sliding_windows_are_transformers_own(windows: dict[str, Any]) -> None:
    config = {**QWEN25, **windows}
    read = read_by_transformers(config)
    family, values = values_for(config)
    pattern = values["window_attn_skip_freq"] or (0,) * 24
    assert ["sliding_attention" if windowed else "full_attention" for windowed in pattern] == read["layer_types"]
    if any(pattern):
        # transformers lets a token see itself and sliding_window - 1 before it
        assert values["window_size"] == (windows["sliding_window"] - 1, 0)
    assert read_by_transformers(family.values_to_config(values, "float32"))["layer_types"] == read["layer_types"]


@pytest.mark.parametrize(
    "windows",
    [
        {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 24},
        {"layer_types": ["full_attention"] * 23},
        {"layer_types": ["chunked_attention"] * 24},
    ],
)
def test_layer_types_without_a_meaning_are_refused(windows: dict[str, Any]) -> None:
    with pytest.raises(ConversionError, match="layer_types"):
        family_for(QWEN25).config_to_values({**QWEN25, **windows})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("normalization", "LayerNorm"),
        ("gated_linear_unit", False),
        ("activation_func", "gelu"),
        ("qk_layernorm", True),
        ("rotary_percent", 0.5),
        ("add_qkv_bias", True),
        ("window_size", (8, 0)),
    ],
)
def test_a_run_that_is_no_llama_is_not_written_as_one(field: str, value: object) -> None:
    family, values = values_for(LLAMA31)
    with pytest.raises(ConversionError):
        family.values_to_config({**values, field: value}, "float32", LLAMA31)


def test_the_registry_names_what_it_has() -> None:
    assert {"llama", "qwen2"} <= set(families())
    with pytest.raises(ConversionError, match=r"(?s)MambaForCausalLM.*LlamaForCausalLM.*Qwen2ForCausalLM"):
        family_for({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    with pytest.raises(ConversionError, match="Qwen2ForSequenceClassification"):
        family_for({"architectures": ["Qwen2ForSequenceClassification"], "model_type": "qwen2"})
    with pytest.raises(ConversionError, match="linear attention"):
        family_for({"architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01"})
    assert family_for({"model_type": "qwen2"}).name == "qwen2"
    with pytest.raises(ConversionError, match=r"llama, .*qwen2"):
        family_by_name("gpt5")


# The architecture that transformers gives to the weights which MindSpeed-LLM calls so.
@pytest.mark.parametrize(
    ("theirs", "architecture"),
    [
        ("llama2", "LlamaForCausalLM"),
        ("qwen25", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("seed-oss", "SeedOssForCausalLM"),
        ("magistral", "MistralForCausalLM"),
        ("phi3.5", "Phi3ForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM"),
        ("glm4", "Glm4ForCausalLM"),
    ],
)
def test_a_family_is_found_by_the_name_that_upstream_gives_it(theirs: str, architecture: str) -> None:
    assert architecture in family_by_name(theirs).hf_architectures


@pytest.mark.parametrize("name", families())
def test_each_key_of_config_json_has_one_rule(name: str) -> None:
    family = family_by_name(name)
    keys = [key for rule in family.config for key in rule.hf_keys]
    assert len(keys) == len(set(keys))
    if name not in ORACLES:
        kind = getattr(transformers, family.hf_architectures[0]).config_class
        assert set(kind(pad_token_id=None).to_dict()) - set(keys) == set()


@pytest.mark.parametrize("name", families())
def test_config_json_comes_back_with_the_same_meaning(name: str) -> None:
    """Written anew, without the configuration it came from; and as transformers reads and writes it."""
    family = family_by_name(name)
    meant = family.config_to_values(family.tiny)
    written = family.values_to_config(meant, "float32")
    again = family.config_to_values(written)
    rounded = {name: value for name, value in meant.items() if isinstance(value, float)}
    assert {name: again[name] for name in rounded} == pytest.approx(rounded)
    assert {**again, **rounded} == meant
    if name not in ORACLES:
        kind = getattr(transformers, family.hf_architectures[0]).config_class
        for config in (written, family.tiny):
            read = family.config_to_values(kind(**{**config, "pad_token_id": None}).to_dict())
            assert {**read, "max_position_embeddings": meant["max_position_embeddings"]} == meant
