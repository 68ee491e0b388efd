"""RMSNorm and LayerNorm for every norm slot of a layer spec, also under sequence parallelism.

Both compute in float32 (float64 for float64 input) and return the input's dtype. Their parameters carry megatron-core's
``sequence_parallel`` mark, by which ``finalize_model_grads`` sums their gradients over tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_llm import ops
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019).

    Rounded where transformers rounds: Llama and Qwen cast the normalised value to the input's dtype before the weight;
    Gemma, whose weight is stored as a distance from one, multiplies in float32 and casts last.

    Args:
        x: ``[..., h]``.
        weight: ``[h]``.
        eps: added to the mean square.
        zero_centered: multiply by ``1 + weight``.

    Returns:
        ``[..., h]`` in x's dtype.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normalised * (1 + weight.to(wide.dtype))).to(x.dtype)
    return (normalised.to(x.dtype) * weight).to(x.dtype)


class RMSNorm(torch.nn.Module):
    """Root mean square norm; the constructor is that of megatron-core's norm slots.

    Args:
        config: reads ``layernorm_zero_centered_gamma``, ``sequence_parallel`` and ``params_dtype``.
        hidden_size: length of the last dimension.
        eps: see :func:`rms_norm`.
    """

    def __init__(self, config: SuiteTransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = _norm_parameter(config, hidden_size, 0.0 if self.zero_centered else 1.0)
        self.op = ops.active()["rms_norm"]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same."""
        if self.zero_centered or self.weight.dtype != x.dtype:
            return rms_norm(x, self.weight, self.eps, self.zero_centered)
        return self.op(x, self.weight, self.eps)


class LayerNorm(torch.nn.Module):
    """Layer norm with weight and bias; the constructor is that of megatron-core's norm slots.

    Args:
        config: reads ``layernorm_zero_centered_gamma``, ``sequence_parallel`` and ``params_dtype``.
        hidden_size: length of the last dimension.
        eps: added to the variance.
    """

    def __init__(self, config: SuiteTransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = _norm_parameter(config, hidden_size, 0.0 if self.zero_centered else 1.0)
        self.bias = _norm_parameter(config, hidden_size, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if weight.dtype == x.dtype:
            return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), self.bias.to(wide), self.eps).to(x.dtype)


def _norm_parameter(config: SuiteTransformerConfig, hidden_size: int, value: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.full((hidden_size,), value, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return parameter
