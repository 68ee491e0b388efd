"""What a training step computes: the next-token loss of pretraining."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from megatron.core.packed_seq_params import PackedSeqParams

Batch = dict[str, Any]
"""One micro-batch: ``tokens``, ``labels`` ``[b, s]`` int64, ``loss_mask`` ``[b, s]`` float32, ``position_ids``
``[b, s]``, ``attention_mask`` or None, ``cu_seqlens`` or None."""

LossParts = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class Objective(Protocol):
    """What a kind of training makes of a micro-batch; the loop knows no more of it."""

    def __call__(
        self, batches: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossParts]]:
        """Run ``model`` on the next batch; the second value makes loss, token count and report of the output."""
        ...


def pretraining(
    batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossParts]]:
    """Forward of the next micro-batch through this chunk; its loss if the chunk is the last."""
    batch = next(batches)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        packed_seq_params=_documents(batch),
    )
    return output, partial(_masked_sum, batch["loss_mask"])


def _documents(batch: Batch) -> PackedSeqParams | None:
    """Where documents begin, for the attention, unless a mask says it already."""
    bounds: torch.Tensor | None = batch.get("cu_seqlens")
    if bounds is None or batch.get("attention_mask") is not None:
        return None
    longest = int(bounds.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _masked_sum(loss_mask: torch.Tensor, losses: torch.Tensor) -> LossParts:
    """Sum of the unmasked tokens' losses, how many they are, and both for the report.

    megatron-core divides by the count: of the micro-batch, or of the global batch with ``calculate_per_token_loss``.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    count = mask.sum()
    report = torch.stack([total.detach().double(), count.double()])
    return total, count.to(torch.int), {"lm loss": report}
