"""How an attention score is made from ``q . k``, and which scores a query may use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoreRule:
    """``score(i, j) = softcap(scale * q_i . k_j) + mask(i, j)``, minus infinity where query ``i`` may not see ``j``.

    Positions are aligned at the end, as in megatron-core and FlashAttention: with ``offset = sk - sq``, query ``i``
    stands at key position ``i + offset``.

    Attributes:
        scale: factor on ``q . k``.
        softcap: ``softcap * tanh(x / softcap)`` is applied to the scaled score, before any mask (Gemma 2).
        causal: query ``i`` sees keys ``j <= i + offset``.
        window: ``(left, right)``, megatron-core's ``window_size``: query ``i`` sees keys ``i + offset - left`` to
            ``i + offset + right``, both included; -1 means no bound on that side.
        mask: broadcastable to ``[b, n, sq, sk]``. Boolean: True hides (Megatron's convention). Floating: added.
        slopes: ``[n]``, ALiBi (Press et al. 2021): ``slope_h * (j - i - offset)`` is added, which is 0 for the query's
            own key and falls with the distance to those before it.
    """

    scale: float
    softcap: float | None = None
    causal: bool = False
    window: tuple[int, int] | None = None
    mask: Tensor | None = None
    slopes: Tensor | None = None

    def bounds(self, sq: int, sk: int) -> tuple[int | None, int | None]:
        """``(lower, upper)`` such that query ``i`` sees only ``i + lower <= j <= i + upper``; None is unbounded."""
        offset = sk - sq
        left, right = self.window if self.window is not None else (-1, -1)
        lower = offset - left if left >= 0 else None
        upper = offset + right if right >= 0 else None
        if self.causal:
            upper = offset if upper is None else min(upper, offset)
        # A bound that hides nothing costs a mask for nothing.
        if lower is not None and lower <= 1 - sq:
            lower = None
        if upper is not None and upper >= sk - 1:
            upper = None
        return lower, upper


def alibi_slopes(heads: int) -> Tensor:
    """``[heads]`` float32: the geometric series of Press et al. 2021; where ``heads`` is no power of two, that of the
    power below it, then every other one of the series of the power above."""

    def series(count: int) -> Tensor:
        return torch.pow(torch.tensor(2.0 ** (-8.0 / count)), torch.arange(1, count + 1))

    below = 2 ** (heads.bit_length() - 1)
    return torch.cat([series(below), series(2 * below)[0::2][: heads - below]])


def distance_bias(slopes: Tensor, rows: slice, sq: int, sk: int) -> Tensor:
    """``[n, rows, sk]`` in the dtype of ``slopes``: what ALiBi adds to the scores of queries ``rows`` of ``sq``."""
    queries = torch.arange(rows.start, rows.stop, device=slopes.device) + (sk - sq)
    distance = torch.arange(sk, device=slopes.device)[None, :] - queries[:, None]
    return slopes[:, None, None] * distance.to(slopes.dtype)


def band_hidden(lower: int | None, upper: int | None, sq: int, sk: int, device: torch.device) -> Tensor | None:
    """Boolean ``[sq, sk]``, True outside ``i + lower <= j <= i + upper``; None when both bounds are None."""
    if lower is None and upper is None:
        return None
    distance = torch.arange(sk, device=device)[None, :] - torch.arange(sq, device=device)[:, None]
    hidden = torch.zeros(sq, sk, dtype=torch.bool, device=device)
    if lower is not None:
        hidden |= distance < lower
    if upper is not None:
        hidden |= distance > upper
    return hidden


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and log-sum-exp: float32, or float64 for float64 operands."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Put one more term ``exp(sink)`` in the softmax denominator: scales ``out`` in place, returns the new ``lse``.

    Args:
        out: ``[b, n, sq, d]``.
        lse: ``[b, n, sq]`` of the scores alone.
        sinks: ``[n]``.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    return total


def sink_gradient(d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``d sinks [n]``: the sink is a key whose value is zero, so its score's gradient is ``-p_sink * (d_out . out)``.

    ``lse [b, n, sq]`` includes the sink, and ``out [b, n, sq, d]`` is divided by it.
    """
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    probability = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)


def sequence_first(like: Tensor, width: int) -> Tensor:
    """Uninitialised ``[b, n, s, width]`` for ``like``'s b, n, s, laid out as megatron-core's ``[s, b, n, width]``."""
    b, n, s = like.shape[:3]
    return torch.empty(s, b, n, width, dtype=like.dtype, device=like.device).permute(1, 2, 0, 3)
