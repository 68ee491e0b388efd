"""What the ranks run to see where bad numbers are said to come from: whole runs with a fault put into a gradient."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mindspeed_llm.checkpoint.engine import live_tensors
from mindspeed_llm.training import numbers, pretrain, step
from tests.distributed.cases_pretrain import command

from megatron.core import parallel_state


def bad_gradient(argv: list[str], parameter: str, per_step: int, data: int, once: bool) -> dict[str, Any]:
    """Run the command line; micro-batch 1 of ``parameter`` has a bad gradient from the second step on.

    Returns what ``command`` does, and under ``reports`` the reported sums of each step's micro-batches.

    Args:
        argv: the command line.
        parameter: its name in the whole model.
        per_step: micro-batches of a step.
        data: the data-parallel rank that has the fault.
        once: only in the second step itself, not when it is repeated.
    """
    setup = pretrain.setup

    def faulty(*args: Any, **kwargs: Any) -> Any:
        run = setup(*args, **kwargs)
        target = live_tensors(run.chunks).get(parameter)
        if target is not None and parallel_state.get_data_parallel_rank() == data:
            passes = itertools.count()

            def spoil(gradient: torch.Tensor) -> torch.Tensor:
                number, micro_batch = divmod(next(passes), per_step)
                here = micro_batch == 1 and (number == 1 or (number > 1 and not once))
                return gradient * torch.nan if here else gradient

            target.register_hook(spoil)
        return run

    reports: list[list[list[float]]] = []
    forward_backward = step.forward_backward

    def recording(*args: Any, **kwargs: Any) -> list[dict[str, torch.Tensor]]:
        made = forward_backward(*args, **kwargs)
        reports.append([report["lm loss"].tolist() for report in made])
        return made

    pretrain.setup, step.forward_backward, numbers.forward_backward = faulty, recording, recording
    try:
        return command(argv) | {"reports": reports}
    finally:
        pretrain.setup, step.forward_backward, numbers.forward_backward = setup, forward_backward, forward_backward


def bad_output(argv: list[str], at: int) -> dict[str, Any]:
    """Run the command line; the model's output is bad in forward pass ``at`` of this rank, and in no other."""
    setup = pretrain.setup

    def faulty(*args: Any, **kwargs: Any) -> Any:
        run = setup(*args, **kwargs)
        passes = itertools.count()
        run.chunks[-1].register_forward_hook(
            lambda _m, _i, output: output * torch.nan if next(passes) == at else output
        )
        return run

    pretrain.setup = faulty
    try:
        return command(argv)
    finally:
        pretrain.setup = setup
