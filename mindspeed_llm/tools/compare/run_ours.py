"""Runs our side of a comparison once, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_llm import api
from mindspeed_llm.checkpoint.engine import global_name, unwrap
from mindspeed_llm.core.groups import pipeline_group, tensor_group
from mindspeed_llm.device import current
from mindspeed_llm.tools.compare.points import points
from mindspeed_llm.tools.compare.recorder import RankFacts, Recorder
from mindspeed_llm.tools.compare.sides import Side
from mindspeed_llm.training.gradients import iter_gradients
from mindspeed_llm.training.objective import Batch, pretraining
from mindspeed_llm.training.step import clear_gradients, forward_backward

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches


def micro_batches(tokens: Tensor, size: int) -> Iterator[Batch]:
    """This data-parallel rank's micro-batches of ``tokens [sequences, s + 1]``, dealt out as Megatron does."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for start in range(rank * size, tokens.shape[0], ranks * size):
        part = tokens[start : start + size].to(current().torch_device)
        inputs = part[:, :-1].contiguous()
        yield {
            "tokens": inputs,
            "labels": part[:, 1:].contiguous(),
            "loss_mask": torch.ones(inputs.shape, device=inputs.device),
            "position_ids": torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs),
        }


def capture(side: Side, tokens: Tensor, folder: Path, rank: int) -> None:
    """Run ``side`` on ``tokens [sequences, s + 1]``. Collective over its ranks, which have their process group.

    Args:
        side: ours.
        tokens: read by all ranks.
        folder: gets what :class:`Recorder` leaves.
        rank: of this process.
    """
    values = side.run_values(tokens.shape[0], tokens.shape[1] - 1)
    run = api.load_hf(side.folder, **{name: value for name, value in values.items() if name != "load"})
    wanted = set(points(side.names))
    stages = pipeline_group()
    clear_gradients(run)
    with Recorder(folder, rank) as recorder:
        for number, chunk in enumerate(run.chunks):
            model = unwrap(chunk)
            named = [(global_name(model, name), module) for name, module in model.named_modules() if name]
            recorder.watch(named, wanted, number * stages.size() + stages.rank())
        batches = [micro_batches(tokens, values["micro_batch_size"]) for _ in run.chunks]
        reports = forward_backward(run, pretraining, batches, get_num_microbatches(), train=True)
    loss_scale = float(run.optimizer.get_loss_scale().item())
    for name, gradient in iter_gradients(run):
        recorder.save_gradient(name, gradient / loss_scale)
    replicas = parallel_state.get_data_parallel_world_size()
    # Each replica's loss is the mean over its own tokens, or with this flag their sum.
    share = tokens[:, 1:].numel() if run.cfg.value("calculate_per_token_loss") else replicas
    facts = RankFacts(
        tp=tensor_group().rank(),
        dp=parallel_state.get_data_parallel_rank(),
        order=recorder.order,
        micro_batches=get_num_microbatches(),
        scale=1.0 / (share * loss_scale),
        loss=tuple(torch.stack([report["lm loss"] for report in reports]).sum(0).tolist()) if reports else None,
    )
    recorder.save(facts)
