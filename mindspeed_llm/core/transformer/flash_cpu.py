"""Attention through torch's CPU flash kernel, which carries the log-sum-exp forward and takes it in backward.

The kernel (``aten::_scaled_dot_product_flash_attention_for_cpu``) is native for grouped KV heads and strided views.
What it lacks is made up for here. It aligns causal masks at the start: a causal call with ``sq != sk`` goes through an
additive mask. It wants that mask in q's dtype or, for half precision, float32 (it misreads float32 beside float64). It
wants equal head sizes: zero-padding changes nothing. It computes what an additive mask hides: a sliding window is cut
into tiles. It knows no ALiBi: that is a mask of each head, made for a tile of queries at a time. It reports 0, not
minus infinity, as the log-sum-exp of a fully masked row. It divides by zero on empty operands, and takes the elements
of a head for neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_llm.core.transformer.attention_scores import (
    ScoreRule,
    accumulate_dtype,
    add_sinks,
    band_hidden,
    distance_bias,
    sequence_first,
)

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_NEVER = float("-inf")
# Queries per tile of a sliding window: fewer hide less work in masks, more keep both cores busy.
_TILE_ROWS = 256


class _KernelMask(NamedTuple):
    """What one kernel call hides.

    ``bias`` is additive, ``[sq, sk]`` or 4-D. ``blind [..., sq]`` marks the rows that see no key; None
    says that every row sees one.
    """

    is_causal: bool
    bias: Tensor | None
    blind: Tensor | None


class _Tile(NamedTuple):
    """One kernel call: some queries, the keys they may see, and what is hidden among those."""

    rows: slice
    columns: slice
    mask: _KernelMask


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sinks: Tensor | None, keep: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """As :func:`attention_reference.forward`, without dropout and soft-capping (the caller's table sees to that)."""
    del keep, dropout_p
    if len(spans := _spans(rule, q.shape[2], k.shape[2])) == 1:
        (tile,) = _tiles(rule, spans, q, k.shape[2])
        out, lse = _forward_tile(q, k, v, tile.mask, rule.scale)
    else:
        out = sequence_first(q, v.shape[3])
        lse = torch.empty(q.shape[:3], dtype=accumulate_dtype(q.dtype), device=q.device)
        for tile in _tiles(rule, spans, q, k.shape[2]):
            rows, columns = tile.rows, tile.columns
            out[:, :, rows], lse[:, :, rows] = _forward_tile(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], tile.mask, rule.scale
            )
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
    if len(spans := _spans(rule, q.shape[2], k.shape[2])) == 1:
        (tile,) = _tiles(rule, spans, q, k.shape[2])
        return _backward_tile(d_out, q, k, v, out, lse, tile.mask, rule.scale)
    dq = sequence_first(q, q.shape[3])
    # Neighbouring tiles share keys: their parts are added before rounding.
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for tile in _tiles(rule, spans, q, k.shape[2]):
        rows, columns = tile.rows, tile.columns
        dq[:, :, rows], dk_part, dv_part = _backward_tile(
            d_out[:, :, rows],
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            out[:, :, rows],
            lse[:, :, rows],
            tile.mask,
            rule.scale,
        )
        dk[:, :, columns].add_(dk_part)
        dv[:, :, columns].add_(dv_part)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _forward_tile(q: Tensor, k: Tensor, v: Tensor, mask: _KernelMask, scale: float) -> tuple[Tensor, Tensor]:
    if q.shape[2] == 0 or k.shape[2] == 0:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        return out, torch.full(q.shape[:3], _NEVER, dtype=accumulate_dtype(q.dtype), device=q.device)
    width = max(q.shape[3], v.shape[3])
    out, lse = _forward_kernel(
        *(_widen(x, width) for x in (q, k, v)), 0.0, mask.is_causal, attn_mask=mask.bias, scale=scale
    )
    if mask.blind is not None:
        lse = lse.masked_fill(mask.blind, _NEVER)
    return out[..., : v.shape[3]], lse


def _backward_tile(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: _KernelMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[2] == 0 or k.shape[2] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if mask.blind is not None:
        # exp(-inf - lse) of a row that sees nothing must be 0: with lse = -inf it is NaN.
        lse = lse.masked_fill(lse == _NEVER, float("inf"))
    width = max(q.shape[3], v.shape[3])
    operands = (_widen(x, width) for x in (d_out, q, k, v, out))
    dq, dk, dv = _backward_kernel(*operands, lse, 0.0, mask.is_causal, attn_mask=mask.bias, scale=scale)
    return dq[..., : q.shape[3]], dk[..., : k.shape[3]], dv[..., : v.shape[3]]


def _spans(rule: ScoreRule, sq: int, sk: int) -> list[tuple[slice, slice]]:
    """Queries and the keys they may see, for each kernel call of one attention: one call, unless a sliding window
    leaves most keys out of most rows, or a bias per head would be large as a whole."""
    lower, upper = rule.bounds(sq, sk)
    windowed = lower is not None and upper is not None and upper - lower + 2 * _TILE_ROWS <= sk
    if sq <= _TILE_ROWS or not (windowed or rule.slopes is not None):
        return [(slice(0, sq), slice(0, sk))]
    spans: list[tuple[slice, slice]] = []
    for start in range(0, sq, _TILE_ROWS):
        stop = min(start + _TILE_ROWS, sq)
        first = 0 if lower is None else min(max(start + lower, 0), sk)
        last = sk if upper is None else min(max(stop + upper, first), sk)
        spans.append((slice(start, stop), slice(first, last)))
    return spans


def _tiles(rule: ScoreRule, spans: list[tuple[slice, slice]], q: Tensor, sk: int) -> Iterator[_Tile]:
    """The kernel calls, each with its mask; a mask that few tiles share lives as long as its tile."""
    sq = q.shape[2]
    lower, upper = rule.bounds(sq, sk)
    mask = None if rule.mask is None else rule.mask.expand(*rule.mask.shape[:-2], sq, sk)
    masks: dict[tuple[int, int, int], _KernelMask] = {}
    for rows, columns in spans:
        # Inner tiles of a window have the same band at the same place.
        shift, height, width = place = (
            rows.start - columns.start,
            rows.stop - rows.start,
            columns.stop - columns.start,
        )
        band = (None if lower is None else lower + shift, None if upper is None else upper + shift)
        if mask is None and rule.slopes is None:
            if place not in masks:
                masks[place] = _kernel_mask(*band, None, height, width, q)
            yield _Tile(rows, columns, masks[place])
            continue
        part = None if mask is None else mask[..., rows, columns]
        if rule.slopes is not None:
            bias = distance_bias(rule.slopes.to(accumulate_dtype(q.dtype)), rows, sq, sk)[..., columns]
            part = _joined(bias, part)
        yield _Tile(rows, columns, _kernel_mask(*band, part, height, width, q))


def _joined(bias: Tensor, mask: Tensor | None) -> Tensor:
    """One additive mask of two."""
    if mask is None:
        return bias
    return bias.masked_fill(mask, _NEVER) if mask.dtype == torch.bool else bias + mask


def _kernel_mask(lower: int | None, upper: int | None, mask: Tensor | None, sq: int, sk: int, q: Tensor) -> _KernelMask:
    is_causal = sq == sk and upper == 0
    hidden = band_hidden(lower, None if is_causal else upper, sq, sk, q.device)
    if mask is None and hidden is None:
        return _KernelMask(is_causal, None, None)
    if mask is None:
        bias = torch.zeros(sq, sk, dtype=q.dtype, device=q.device)
    elif mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask, _NEVER)
    else:
        # Half-precision calls take a float32 mask too, which keeps a bias (ALiBi) exact.
        bias = mask.to(accumulate_dtype(q.dtype))
    if hidden is not None:
        bias = bias.masked_fill(hidden, _NEVER)
    if bias.dim() != 2:
        bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    bias = bias.expand(*bias.shape[:-2], sq, sk)
    if mask is None and (upper is None or upper >= 0):
        # Every query stands in its own window: it is blind only where it stands before the first key.
        return _KernelMask(is_causal, bias, None)
    visible = bias != _NEVER
    return _KernelMask(is_causal, bias, ~(visible.tril() if is_causal else visible).any(-1))


def _widen(x: Tensor, width: int) -> Tensor:
    """``[b, n, s, e] -> [b, n, s, width]``, padded with zeros; the kernel needs neighbouring elements in a row."""
    if x.shape[3] != width:
        return F.pad(x, (0, width - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()
