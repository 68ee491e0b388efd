"""Sides of a comparison in the ranks of the pool, some with a fault planted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_llm import api, ops
from mindspeed_llm.core.groups import tensor_group
from mindspeed_llm.ops.rms_norm.reference import rms_norm
from mindspeed_llm.tools.compare import run_hf, run_ours
from mindspeed_llm.tools.compare.sides import parse_side


def capture(side: str, tokens: torch.Tensor, folder: Path, fault: str | None = None) -> None:
    parsed = parse_side(side)
    with FAULTS[fault]():
        if parsed.kind == "hf":
            run_hf.capture(parsed, tokens, folder)
        else:
            run_ours.capture(parsed, tokens, folder, dist.get_rank())


@contextlib.contextmanager
def planted_op(fn: Any) -> Iterator[None]:
    """``op=rms_norm=planted`` is ``fn``."""
    impl = ops.Impl("rms_norm", "planted", ("cpu",), (torch.float32,), fn, lambda: None, ())
    ops.registry.cache_clear()
    ops.registry().add_impl(impl)
    try:
        yield
    finally:
        ops.registry.cache_clear()


def other_epsilon(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x, weight, 2 * eps)


class ForgetsTheMean(torch.autograd.Function):
    """A norm whose backward lacks the term that comes through the mean square."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        return gradients[0] * weight * scale, (gradients[0] * x * scale).flatten(0, -2).sum(0), None


@contextlib.contextmanager
def wrong_shard() -> Iterator[None]:
    """The second tensor-parallel rank holds the rows of one weight in another order."""
    load = api.load_hf

    def load_wrongly(*args: Any, **kwargs: Any) -> Any:
        run = load(*args, **kwargs)
        if tensor_group().rank() == 1:
            weight = dict(run.chunks[0].named_parameters())["module.decoder.layers.1.mlp.linear_fc1.weight"]
            weight.data.copy_(weight.data.roll(1, 0))
        return run

    with mock.patch.object(api, "load_hf", load_wrongly):
        yield


FAULTS = {
    None: contextlib.nullcontext,
    "epsilon": lambda: planted_op(other_epsilon),
    "backward": lambda: planted_op(ForgetsTheMean.apply),
    "shard": wrong_shard,
}
