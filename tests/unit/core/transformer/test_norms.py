"""The norms against transformers' and torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

import mindspeed_llm.core  # noqa: F401  the seam comes first
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.core.transformer.norms import LayerNorm, RMSNorm

H, EPS = 48, 1e-5


def config(**changes: Any) -> SuiteTransformerConfig:
    return SuiteTransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=4, **changes)


def fill(norm: torch.nn.Module, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    norm.to(dtype)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(5, 2, H, generator=generator, dtype=torch.float64) + 0.5
    return x.to(dtype).requires_grad_(), torch.randn(5, 2, H, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("theirs_type", "zero_centered"), [(Qwen2RMSNorm, False), (Gemma2RMSNorm, True)])
def test_rms_norm_rounds_as_transformers(
    dtype: torch.dtype, theirs_type: type[torch.nn.Module], zero_centered: bool
) -> None:
    ours = RMSNorm(config(layernorm_zero_centered_gamma=zero_centered), H, EPS)
    theirs = theirs_type(H, EPS)
    fill(ours, dtype)
    fill(theirs, dtype)
    x, d_out = inputs(dtype)
    got, expected = ours(x), theirs(x)
    assert got.dtype == dtype
    assert torch.equal(got, expected)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for a, b in zip(
        torch.autograd.grad(got, (x, *ours.parameters()), d_out),
        torch.autograd.grad(expected, (x, *theirs.parameters()), d_out),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_rms_norm_as_torch() -> None:
    ours = RMSNorm(config(params_dtype=torch.float64), H, EPS)
    fill(ours, torch.float64)
    x, _ = inputs(torch.float64)
    torch.testing.assert_close(ours(x), F.rms_norm(x, (H,), ours.weight, EPS), rtol=0, atol=1e-14)
    fill(ours, torch.float32)
    x, _ = inputs(torch.float32)
    torch.testing.assert_close(ours(x), F.rms_norm(x, (H,), ours.weight, EPS), rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_norm_as_torch(dtype: torch.dtype, zero_centered: bool) -> None:
    ours = LayerNorm(config(layernorm_zero_centered_gamma=zero_centered, normalization="LayerNorm"), H, EPS)
    fill(ours, dtype)
    x, d_out = inputs(dtype)
    theirs = torch.nn.LayerNorm(H, EPS, dtype=dtype)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight + zero_centered)
        theirs.bias.copy_(ours.bias)
    got, expected = ours(x), theirs(x)
    assert torch.equal(got, expected)
    for a, b in zip(
        torch.autograd.grad(got, (x, *ours.parameters()), d_out),
        torch.autograd.grad(expected, (x, *theirs.parameters()), d_out),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("norm_type", [RMSNorm, LayerNorm])
def test_output_dtype_is_the_input_s(norm_type: type[RMSNorm] | type[LayerNorm]) -> None:
    """Parameters kept in float32 beside bfloat16 activations, and the other way round."""
    x, _ = inputs(torch.float64)
    for parameters, activations in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        norm = norm_type(config(params_dtype=parameters), H, EPS)
        exact = norm_type(config(params_dtype=torch.float64), H, EPS)(x.to(activations).double())
        got = norm(x.to(activations))
        assert got.dtype == activations
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("norm_type", [RMSNorm, LayerNorm])
def test_parameters_start_as_the_identity_and_carry_the_sequence_parallel_mark(
    norm_type: type[RMSNorm] | type[LayerNorm],
) -> None:
    x, _ = inputs(torch.float32)
    plain, centered = (
        norm_type(config(layernorm_zero_centered_gamma=flag, params_dtype=torch.float32), H, EPS)
        for flag in (False, True)
    )
    assert torch.equal(plain(x), centered(x))
    assert (plain.weight == 1).all()
    assert (centered.weight == 0).all()
    conf = config(params_dtype=torch.bfloat16)
    for parallel in (False, True):
        conf.sequence_parallel = parallel
        for parameter in norm_type(conf, H, EPS).parameters():
            assert parameter.sequence_parallel is parallel  # pyright: ignore[reportAttributeAccessIssue]
            assert parameter.dtype == torch.bfloat16
