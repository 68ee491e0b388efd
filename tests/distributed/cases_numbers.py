"""What the ranks run to see where bad numbers are said to come from: whole runs with a fault put into a gradient."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mindspeed_llm.checkpoint.engine import live_tensors
from mindspeed_llm.training import pretrain
from tests.distributed.cases_pretrain import command

from megatron.core import parallel_state


def bad_gradient(argv: list[str], parameter: str, per_step: int, data: int, once: bool) -> dict[str, Any]:
    """Run the command line; micro-batch 1 of ``parameter`` has a bad gradient from the second step on.

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
                step, micro_batch = divmod(next(passes), per_step)
                here = micro_batch == 1 and (step == 1 or (step > 1 and not once))
                return gradient * torch.nan if here else gradient

            target.register_hook(spoil)
        return run

    pretrain.setup = faulty
    try:
        return command(argv)
    finally:
        pretrain.setup = setup
