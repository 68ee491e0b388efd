"""The definition of RMS norm (Zhang and Sennrich 2019), rounded where transformers' Llama and Qwen round."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``round(x / sqrt(mean(x^2) + eps)) * weight`` over the last dimension.

    Statistics and the normalised value are float32 (float64 for float64 input). The normalised value is rounded to x's
    dtype *before* it meets the weight, as in transformers' LlamaRMSNorm and Qwen2RMSNorm; ``F.rms_norm`` multiplies
    first and rounds once, so that a quarter of its bfloat16 results are one unit in the last place off transformers'.

    Args:
        x: ``[..., h]``, float.
        weight: ``[h]``.
        eps: added to the mean square.

    Returns:
        ``[..., h]`` in x's dtype.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalised.to(x.dtype) * weight).to(x.dtype)
