"""Attention in plain torch: the definition that every other implementation is compared with.

Scores, softmax and products are float32 (float64 for float64 operands); results take the operands' dtype. Memory is
``O(b n sq sk)`` during a call, nothing of that size is kept between forward and backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_llm.core.transformer.attention_scores import ScoreRule, accumulate_dtype, band_hidden, distance_bias


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sinks: Tensor | None, keep: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention.

    Args:
        q: ``[b, n, sq, d]``.
        k: ``[b, n_kv, sk, d]``, ``n`` a multiple of ``n_kv``.
        v: ``[b, n_kv, sk, d_v]``.
        rule: scores and masks.
        sinks: ``[n]``, one extra term ``exp(sink)`` in each head's denominator.
        keep: boolean ``[b, n, sq, sk]``, the probabilities that dropout leaves, or None.
        dropout_p: their survivors are divided by ``1 - dropout_p``.

    Returns:
        ``out [b, n, sq, d_v]`` and ``lse [b, n, sq]``, the natural logarithm of the denominator (sinks included);
        0 and minus infinity for a query that sees nothing.
    """
    scores, _ = _scores(q, k, rule)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    weights = _dropped(_probabilities(scores, lse), keep, dropout_p)
    out = _group(weights, k.shape[1]) @ v.to(weights.dtype)
    return _ungroup(out, q).to(q.dtype), lse


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
    """``dq, dk, dv`` from a given ``out`` and ``lse``, which may come from more keys than ``k`` (a merged ring).

    With ``p = exp(score - lse)``: ``d score = p * (d_out . v - d_out . out)`` (Dao et al. 2022, appendix B.2).
    """
    groups = k.shape[1]
    scores, slope = _scores(q, k, rule)
    probabilities = _probabilities(scores, lse)
    wide = d_out.to(scores.dtype)
    wide_grouped = _group(wide, groups)
    dv = _group(_dropped(probabilities, keep, dropout_p), groups).transpose(-1, -2) @ wide_grouped
    d_weights = _ungroup(wide_grouped @ v.to(scores.dtype).transpose(-1, -2), q)
    delta = (wide * out.to(scores.dtype)).sum(-1, keepdim=True)
    d_scores = probabilities * (_dropped(d_weights, keep, dropout_p) - delta)
    if slope is not None:
        d_scores = d_scores * slope
    d_products = _group(d_scores * rule.scale, groups)
    dq = _ungroup(d_products @ k.to(scores.dtype), q)
    dk = d_products.transpose(-1, -2) @ _group(q.to(scores.dtype), groups)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor | None]:
    """Masked scores ``[b, n, sq, sk]`` and, with soft-capping, their slope by the scaled product."""
    dtype = accumulate_dtype(q.dtype)
    scores = _ungroup(_group(q.to(dtype), k.shape[1]) @ k.to(dtype).transpose(-1, -2), q) * rule.scale
    slope = None
    if rule.softcap is not None:
        capped = torch.tanh(scores / rule.softcap)
        slope = 1 - capped.square()
        scores = capped * rule.softcap
    if rule.mask is not None:
        if rule.mask.dtype == torch.bool:
            scores = scores.masked_fill(rule.mask, float("-inf"))
        else:
            scores = scores + rule.mask.to(dtype)
    sq, sk = q.shape[2], k.shape[2]
    if rule.slopes is not None:
        scores = scores + distance_bias(rule.slopes.to(dtype), slice(0, sq), sq, sk)
    hidden = band_hidden(*rule.bounds(sq, sk), sq, sk, q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, slope


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    # A query that sees nothing has lse -inf; -inf - (+inf) gives the zeros wanted, -inf - (-inf) would give NaN.
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), float("inf")).unsqueeze(-1))


def _dropped(weights: Tensor, keep: Tensor | None, dropout_p: float) -> Tensor:
    return weights if keep is None else weights * keep / (1 - dropout_p)


def _group(x: Tensor, groups: int) -> Tensor:
    """``[b, n, s, e] -> [b, groups, n/groups * s, e]``: the query heads of one KV head in a row, so no KV copies."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2], x.shape[3])


def _ungroup(x: Tensor, q: Tensor) -> Tensor:
    """``[b, groups, n/groups * sq, e] -> [b, n, sq, e]``."""
    return x.reshape(q.shape[0], q.shape[1], q.shape[2], x.shape[-1])
