"""RMS norm: ``rms_norm(x: [..., h], weight: [h], eps: float) -> [..., h]``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_llm.ops.dispatch import Impl, OpRegistry, OpSpec
from mindspeed_llm.ops.rms_norm import cpu
from mindspeed_llm.ops.rms_norm.reference import rms_norm


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """``x: shape``, of another size in every row, ``weight: [shape[-1]]`` around one, and eps."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(-1, 1, math.prod(shape[:-1]), dtype=x.dtype).view(*shape[:-1], 1)
    weight = 1 + 0.2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    return x.to(dtype), weight.to(dtype), 1e-6


SPEC = OpSpec(
    name="rms_norm",
    reference=rms_norm,
    # Four units of rounding: the normalised value, the product with the weight, its sum, the result.
    tolerances={
        torch.float64: 1e-14,
        torch.float32: 1e-6,
        torch.float16: 4 * 2**-11,
        torch.bfloat16: 4 * 2**-8,
    },
    make_inputs=make_inputs,
)


def register(registry: OpRegistry) -> None:
    """Add the op and its implementations, the preferred first."""
    registry.add(
        SPEC,
        Impl(
            op="rms_norm",
            name="cpp",
            devices=("cpu",),
            dtypes=(torch.float32, torch.bfloat16, torch.float16),
            fn=cpu.rms_norm,
            available=cpu.unavailable,
            tested_on=("cpu",),
        ),
    )
