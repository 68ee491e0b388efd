"""Runs inside the ranks of the pool: three training steps of a Hugging Face folder in some layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from mindspeed_llm import api
from mindspeed_llm.checkpoint.engine import iter_hf_weights, live_tensors
from mindspeed_llm.core.groups import data_group
from mindspeed_llm.training.objective import Batch, pretraining
from mindspeed_llm.training.step import train_step
from mindspeed_llm.training.weights import family_of, parallel_groups
from tests.parity.layouts import training_values
from tests.parity.reference import Reference, Trace

from megatron.core import parallel_state


def micro_batches(tokens: torch.Tensor, size: int) -> Iterator[Batch]:
    """This data-parallel rank's micro-batches of ``tokens [steps, batch, s + 1]``, dealt out as Megatron does."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for batch in tokens:
        for start in range(rank * size, batch.shape[0], ranks * size):
            part = batch[start : start + size]
            inputs = part[:, :-1].contiguous()
            yield {
                "tokens": inputs,
                "labels": part[:, 1:].contiguous(),
                "loss_mask": torch.ones(inputs.shape),
                "position_ids": torch.arange(inputs.shape[1]).expand_as(inputs),
            }


def _gather_sharded_gradients(run: api.Run) -> None:
    """With the distributed optimizer each replica has reduced only its share of a bucket."""
    group = data_group()
    for chunk in run.chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def iter_gradients(run: api.Run) -> Iterator[tuple[str, torch.Tensor]]:
    """The reduced gradients under Hugging Face names: exported as if they were the weights. Run it to its end."""
    if run.cfg.value("use_distributed_optimizer"):
        _gather_sharded_gradients(run)
    parameters = [tensor for tensor in live_tensors(run.chunks).values() if tensor.requires_grad]
    weights = [p.data for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad  # type: ignore[attr-defined]
    # Not through the API, which would first bring parameters up to date, and to the next forward pass they would be so.
    yield from iter_hf_weights(run.chunks, family_of(run.cfg), run.cfg, groups=parallel_groups())
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight


def gradient_errors(run: api.Run, file: str) -> dict[str, float]:
    """max|d| / max|reference| of each gradient that this rank gets, against those in ``file``."""
    errors: dict[str, float] = {}
    with safe_open(file, framework="pt") as references:
        for name, gradient in iter_gradients(run):
            reference = references.get_tensor(name)
            errors[name] = ((gradient - reference).abs().max() / reference.abs().max()).item()
    return errors


def train(reference: Reference, layout: str) -> Trace:
    """Losses, gradient norms, and what this rank knows of the first step's gradients."""
    values = training_values(layout, reference.tokens)
    run = api.load_hf(reference.folder, **values)
    trace = Trace()
    step = run.optimizer.step

    def compare_then_step() -> Any:
        if not trace.losses:
            trace.errors.update(gradient_errors(run, str(reference.gradients)))
        return step()

    run.optimizer.step = compare_then_step  # type: ignore[method-assign]
    batches = [micro_batches(reference.tokens, values["micro_batch_size"]) for _ in run.chunks]
    for _ in reference.tokens:
        result = train_step(run, pretraining, batches)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
    return trace
