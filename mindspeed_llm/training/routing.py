"""How a step's tokens were shared between experts: the losses that balance them, and what each expert got."""

# pyright: basic
# megatron-core's tracker and a module's attributes have no types.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_llm.config.layers import layers_of_experts
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.transformer.experts import Router
from mindspeed_llm.device import current

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
LOSSES = (*_NAMES.values(), "z_loss")
"""megatron-core's names of the losses that balance experts."""


@dataclass(frozen=True)
class Routing:
    """What a step tells of its experts, the same on every rank; each sequence has an entry for each layer of experts.

    Attributes:
        layers: numbers of these layers in the model, from 0.
        losses: mean over the micro-batches of each loss, without its weight, by megatron-core's names.
        tokens: tokens that each expert computed; only with ``--moe-per-layer-logging``, as what follows.
        entropy: of the shares of the experts in a layer's tokens, in nats; at most the log of their number.
        dropped: share of the choices of experts that went beyond their capacity.
    """

    layers: tuple[int, ...] = ()
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tokens: tuple[tuple[int, ...], ...] = ()
    entropy: tuple[float, ...] = ()
    dropped: tuple[float, ...] = ()


class Counts:
    """Tokens of each layer's experts, and the choices there were, since :meth:`clear`."""

    def __init__(self, cfg: RunConfig) -> None:
        layers, experts = cfg.transformer.num_layers, cfg.transformer.num_moe_experts or 0
        self.numbers = torch.zeros(layers, experts + 1, dtype=torch.float64, device=current().torch_device)

    def clear(self) -> None:
        """Count from nothing."""
        self.numbers.zero_()

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Count what the routers of ``chunks`` decide in training."""
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    module.register_forward_hook(self._count)

    def _count(self, router: Any, _given: Any, made: tuple[torch.Tensor, torch.Tensor]) -> None:
        probs, chosen = made
        # A layer that is computed again for its gradient counts once.
        if not router.training or not torch.is_grad_enabled():
            return
        row = self.numbers[router.layer_number - 1]
        # Padding up to the capacity has no weight.
        row[:-1] += (chosen & (probs.detach() != 0)).sum(0)
        row[-1] += probs.shape[0] * router.topk


def loss_names(cfg: RunConfig) -> list[str]:
    """Losses that the run's routers have, as megatron-core names them."""
    t = cfg.transformer
    if t.num_moe_experts is None:
        return []
    kinds, weights = t.moe_router_load_balancing_type, t.moe_aux_loss_coeff
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    weights = (weights,) if isinstance(weights, (int, float)) else weights
    found = [_NAMES[kind] for kind, weight in zip(kinds, weights, strict=True) if kind in _NAMES and weight]
    return found + (["z_loss"] if t.moe_z_loss_coeff is not None else [])


def begin(counts: Counts | None) -> None:
    """Forget the last step. It also holds process groups, which must not outlive their run."""
    get_moe_layer_wise_logging_tracker().clear()
    if counts is not None:
        counts.clear()


def finish(cfg: RunConfig, counts: Counts | None, micro_batches: int) -> Routing | None:
    """What the step that :func:`begin` began tells, None without losses and counts. Collective.

    Args:
        cfg: of the run.
        counts: of its routers, with ``--moe-per-layer-logging``.
        micro_batches: of the step, on each data-parallel rank.
    """
    names = loss_names(cfg)
    if not names and counts is None:
        return None
    tracker, layers = get_moe_layer_wise_logging_tracker(), cfg.transformer.num_layers
    # Every rank has a part: stages their layers, tensor- and data-parallel ranks their tokens.
    parts = torch.zeros(layers, len(names), dtype=torch.float64, device=current().torch_device)
    for index, name in enumerate(names):
        if name in tracker:
            parts[:, index] = tracker[name]["values"]
    tracker.clear()
    total = parts if counts is None else torch.cat([parts, counts.numbers], 1)
    dist.all_reduce(total)
    rows = [layer for layer, experts in enumerate(layers_of_experts(vars(cfg.transformer))) if experts]
    total = total[rows].cpu()
    losses = {
        name: tuple((total[:, index] / (micro_batches * _copies(name))).tolist()) for index, name in enumerate(names)
    }
    if counts is None:
        return Routing(tuple(rows), losses)
    tokens, choices = total[:, len(names) : -1], total[:, -1]
    given = tokens.sum(1)
    shares = tokens / given.clamp(min=1)[:, None]
    return Routing(
        tuple(rows),
        losses,
        tokens=tuple(tuple(int(number) for number in row) for row in tokens.tolist()),
        entropy=tuple(torch.special.entr(shares).sum(1).tolist()),
        dropped=tuple((1 - given / choices.clamp(min=1)).tolist()),
    )


def _copies(name: str) -> int:
    """How many whole losses the parts of all ranks of a stage make.

    Parts of a load-balancing loss are sums over a rank's tokens, by the number of tokens of a replica, or of all of
    them; that of the z-loss is a mean over a rank's own.
    """
    if name == "global_load_balancing_loss":
        return 1
    replicas = parallel_state.get_data_parallel_world_size()
    return replicas * parallel_state.get_tensor_and_context_parallel_world_size() if name == "z_loss" else replicas


def mean_losses(routings: Sequence[Routing]) -> dict[str, tuple[float, ...]]:
    """The mean of each layer's losses over steps."""
    if not routings:
        return {}
    count = len(routings)
    return {
        name: tuple(math.fsum(layer) / count for layer in zip(*(one.losses[name] for one in routings), strict=True))
        for name in routings[0].losses
    }
