"""Rotary frequencies of every scaling scheme against transformers', from a Hugging Face configuration on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import mindspeed_llm.core  # noqa: F401  the seam comes first
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.core.build import transformer_config
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.core.transformer.rotary import ScaledRotaryEmbedding, inverse_frequencies
from mindspeed_llm.models.registry import family_for

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config

HEAD = 64
LENGTH = 4096
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SCHEMES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear 2.5": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3 odd": {**LLAMA3, "factor": 3.0, "low_freq_factor": 1.5, "high_freq_factor": 7.0},
    "yarn": YARN,
    "yarn betas": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn equal mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    "yarn mscale alone": {**YARN, "mscale": 0.7},
    "yarn mscale zero": {**YARN, "mscale": 0.0, "mscale_all_dim": 0.7},
    "yarn given factor": {**YARN, "attention_factor": 1.3},
    "yarn factor 1 given": {**YARN, "factor": 1.0, "attention_factor": 0.9},
    "yarn factor 1": {**YARN, "factor": 1.0},
}


def hugging_face(scheme: str, theta: float = 1e4) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=LENGTH,
        rope_parameters={**SCHEMES[scheme], "rope_theta": theta},
        architectures=["LlamaForCausalLM"],
    )


def ours(hf: LlamaConfig) -> tuple[SuiteTransformerConfig, float]:
    """The configuration that layers see, and theta."""
    values = hf.to_dict()
    run = {"seq_length": 32, "micro_batch_size": 1, "train_iters": 1, "lr": 1e-3}
    cfg = from_values({**family_for(values).config_to_values(values), **run}, world_size=1)
    return transformer_config(cfg), cfg.model.rotary_base


def theirs(hf: LlamaConfig, length: int) -> tuple[torch.Tensor, float]:
    """Frequencies and the factor of cos and sin."""
    scheme: str = hf.rope_parameters["rope_type"]  # pyright: ignore
    if scheme == "default":
        embedding = LlamaRotaryEmbedding(hf)
        return embedding.inv_freq, embedding.attention_scaling
    return ROPE_INIT_FUNCTIONS[scheme](hf, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("length", [LENGTH // 2, LENGTH, LENGTH + 1, 3 * LENGTH])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_frequencies(scheme: str, length: int, theta: float) -> None:
    hf = hugging_face(scheme, theta)
    config, base = ours(hf)
    got = inverse_frequencies(config, HEAD, base, length)
    wanted, _ = theirs(hf, length)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=2e-7, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_factor_of_cos_and_sin(scheme: str) -> None:
    hf = hugging_face(scheme)
    config, _ = ours(hf)
    _, wanted = theirs(hf, LENGTH)
    assert _yarn_get_concentration_factor_from_config(config) == pytest.approx(wanted, rel=1e-12)


def test_the_schemes_differ() -> None:
    """Otherwise the comparison above would prove nothing."""
    lines = {scheme: theirs(hugging_face(scheme), 3 * LENGTH)[0] for scheme in ("default", "linear", "dynamic", "yarn")}
    assert all((lines["default"] - line).abs().max() > 1e-3 for name, line in lines.items() if name != "default")
    assert torch.equal(theirs(hugging_face("dynamic"), LENGTH)[0], lines["default"])


def embedding(scheme: str, fraction: float = 1.0) -> tuple[ScaledRotaryEmbedding, LlamaConfig]:
    hf = hugging_face(scheme)
    config, base = ours(hf)
    return ScaledRotaryEmbedding(config, fraction, base, cp_group=None), hf


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("length", [16, LENGTH + 8])
def test_angles_of_a_sequence(scheme: str, length: int) -> None:
    rope, hf = embedding(scheme)
    angles = rope(length)
    assert angles.shape == (length, 1, 1, HEAD)
    wanted = torch.outer(torch.arange(length, dtype=torch.float32), theirs(hf, length)[0])
    torch.testing.assert_close(angles[:, 0, 0], torch.cat([wanted, wanted], -1), rtol=5e-7, atol=0)


def test_a_longer_sequence_does_not_change_a_shorter_one() -> None:
    rope, _ = embedding("dynamic")
    short = rope(16).clone()
    long = rope(2 * LENGTH)
    assert not torch.equal(long[:16], short)
    assert torch.equal(rope(16), short)
    assert torch.equal(embedding("dynamic")[0](16), short)


def test_angles_are_kept_on_the_instance() -> None:
    rope, _ = embedding("default")
    other, _ = embedding("linear")
    assert rope(16) is rope(16)
    assert rope(16) is not rope(17)
    assert not torch.equal(rope(16), other(16))


def test_part_of_a_head_is_rotated() -> None:
    rope, _ = embedding("default", fraction=0.5)
    config, base = ours(hugging_face("default"))
    angles = rope(8)
    assert angles.shape == (8, 1, 1, HEAD // 2)
    torch.testing.assert_close(angles[1, 0, 0, : HEAD // 4], inverse_frequencies(config, HEAD // 2, base, 8))
