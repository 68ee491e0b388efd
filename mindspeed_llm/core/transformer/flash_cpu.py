"""Attention through torch's CPU flash kernel, which carries the log-sum-exp forward and takes it in backward.

The kernel (``aten::_scaled_dot_product_flash_attention_for_cpu``) is native for grouped KV heads and strided views. It
aligns causal masks at the start, so a causal call with ``sq != sk`` goes through an additive mask; it wants that mask in
q's dtype and equal head sizes (zero-padded here, which changes nothing); it reports 0, not minus infinity, as the
log-sum-exp of a fully masked row; it divides by zero on empty operands.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_llm.core.transformer.attention_scores import ScoreRule, accumulate_dtype, add_sinks, band_hidden

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_NEVER = float("-inf")


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sinks: Tensor | None, keep: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """As :func:`attention_reference.forward`, without dropout and soft-capping (the caller's table sees to that)."""
    del keep, dropout_p
    sq, sk = q.shape[2], k.shape[2]
    if sq == 0 or sk == 0:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = torch.full(q.shape[:3], _NEVER, dtype=accumulate_dtype(q.dtype), device=q.device)
    else:
        is_causal, bias = _kernel_mask(rule, sq, sk, q)
        width = max(q.shape[3], v.shape[3])
        out, lse = _forward_kernel(
            _widen(q, width), _widen(k, width), _widen(v, width), 0.0, is_causal, attn_mask=bias, scale=rule.scale
        )
        out = out[..., : v.shape[3]]
        if bias is not None:
            lse = lse.masked_fill(_blind_rows(bias, is_causal), _NEVER)
    if sinks is not None:
        lse = add_sinks(out, lse, sinks)
    return out, lse


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: ScoreRule,
    keep: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`attention_reference.backward`, from a given (possibly merged) ``out`` and ``lse``."""
    del keep, dropout_p
    sq, sk = q.shape[2], k.shape[2]
    if sq == 0 or sk == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    is_causal, bias = _kernel_mask(rule, sq, sk, q)
    if bias is not None:
        # exp(-inf - lse) of a row that sees nothing must be 0: with lse = -inf it is NaN.
        lse = lse.masked_fill(lse == _NEVER, float("inf"))
    width = max(q.shape[3], v.shape[3])
    dq, dk, dv = _backward_kernel(
        _widen(d_out, width),
        _widen(q, width),
        _widen(k, width),
        _widen(v, width),
        _widen(out, width),
        lse,
        0.0,
        is_causal,
        attn_mask=bias,
        scale=rule.scale,
    )
    return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]


def _kernel_mask(rule: ScoreRule, sq: int, sk: int, q: Tensor) -> tuple[bool, Tensor | None]:
    """The kernel's ``is_causal`` flag and its additive mask in q's dtype (``[sq, sk]`` or 4-D), or None."""
    lower, upper = rule.bounds(sq, sk)
    is_causal = sq == sk and upper == 0
    hidden = band_hidden(lower, None if is_causal else upper, sq, sk, q.device)
    bias = rule.mask
    if bias is None and hidden is None:
        return is_causal, None
    if bias is None:
        bias = torch.zeros(sq, sk, dtype=q.dtype, device=q.device)
    elif bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=q.dtype, device=q.device).masked_fill_(bias, _NEVER)
    else:
        bias = bias.to(q.dtype)
    if hidden is not None:
        bias = bias.masked_fill(hidden, _NEVER)
    if bias.dim() != 2:
        bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    return is_causal, bias.expand(*bias.shape[:-2], sq, sk)


def _blind_rows(bias: Tensor, is_causal: bool) -> Tensor:
    """Boolean ``[..., sq]``: the rows in which no key is visible."""
    visible = bias != _NEVER
    if is_causal:
        visible = visible.tril()
    return ~visible.any(-1)


def _widen(x: Tensor, width: int) -> Tensor:
    """``[b, n, s, e] -> [b, n, s, width]``, padded with zeros; the kernel needs neighbouring elements in a row."""
    if x.shape[3] != width:
        return F.pad(x, (0, width - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()
