"""Token log-probabilities and losses, the one place for them: right for split and for padded vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 2**19
"""Float32 logits that exist at once: 2 MiB, so that the passes over them stay in cache (2.6x of one pass over all)."""


def _spans(rows: int, width: int) -> Iterator[slice]:
    step = max(1, BLOCK // width)
    return (slice(first, first + step) for first in range(0, rows, step))


def _shifted(logits: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """``logits - highest`` per row, in float32, in memory of its own."""
    return logits.to(torch.float32, copy=True).sub_(highest[:, None])


class _VocabParallelNll(torch.autograd.Function):
    """-log softmax at the target."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, true_vocab_size: int, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        size = group.size() if group is not None else 1
        rank = group.rank() if group is not None else 0
        width = logits.shape[-1]
        start = rank * width
        real = max(0, min(width, true_vocab_size - start))
        flat = logits.reshape(-1, width)
        local = target.reshape(-1) - start
        mine = (local >= 0) & (local < width)
        index = local.clamp(0, width - 1)

        rows = flat.shape[0]
        highest = torch.empty(rows, dtype=torch.float32, device=logits.device)
        for span in _spans(rows, width):
            highest[span] = flat[span, :real].amax(-1).float() if real else -torch.inf
        if size > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        total = torch.empty_like(highest)
        for span in _spans(rows, width):
            total[span] = _shifted(flat[span, :real], highest[span]).exp_().sum(-1)
        at_target = flat.gather(1, index[:, None])[:, 0].float().masked_fill_(~mine, 0.0)
        if size > 1:
            both = torch.stack([total, at_target])
            dist.all_reduce(both, group=group)
            total, at_target = both
        ctx.save_for_backward(flat, index, mine, highest, total)
        ctx.real = real
        ctx.shape = logits.shape
        # Both terms stay small where logits are large; log(total) + highest would round away what a token's loss is.
        return (total.log() - (at_target - highest)).view(target.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        flat, index, mine, highest, total = ctx.saved_tensors
        weight = grads[0].reshape(-1).float()
        scale = weight / total
        out = torch.empty_like(flat)
        out[:, ctx.real :] = 0
        for span in _spans(*flat.shape):
            share = _shifted(flat[span, : ctx.real], highest[span]).exp_().mul_(scale[span, None])
            here = mine[span].nonzero()[:, 0]
            share[here, index[span][here]] -= weight[span][here]
            out[span, : ctx.real] = share
        return out.view(ctx.shape), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, true_vocab_size: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Negative log-probability of each target token, in nats.

    Args:
        logits: ``[..., v]``, this rank's columns of the (padded) vocabulary; any floating dtype, reduced in float32.
        target: ``[...]`` token ids below ``true_vocab_size``.
        true_vocab_size: columns beyond it are padding and take no probability.
        group: the ranks that hold the other columns, in rank order; ``None`` when ``logits`` has all of them.

    Returns:
        ``[...]`` float32; differentiable with respect to ``logits``.
    """
    return _VocabParallelNll.apply(logits, target, true_vocab_size, group)
