"""The gradients of a step under the names of the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from mindspeed_llm.checkpoint.engine import live_tensors
from mindspeed_llm.checkpoint.export import iter_hf_weights
from mindspeed_llm.checkpoint.names import compile_names
from mindspeed_llm.models.family import values_of
from mindspeed_llm.training.state import Run
from mindspeed_llm.training.weights import family_of, parallel_groups


def iter_gradients(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """The reduced gradients under Hugging Face names, whole, as if they were the weights: ``(name, [...])``.

    Collective, and to be run to its end, between the backward pass and the optimizer's step; the first rank gets them
    all (see :func:`mindspeed_llm.api.iter_hf_weights`), times the loss scale under fp16.
    """
    if run.cfg.value("use_distributed_optimizer"):
        _gather_sharded_gradients(run)
    parameters = [tensor for tensor in live_tensors(run.chunks).values() if tensor.requires_grad]
    weights = [p.data for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad  # type: ignore[attr-defined]
    # Not through the API, which would first bring parameters up to date, and to the next forward pass they would be so.
    family = family_of(run.cfg)
    without = {
        name
        for entry in compile_names(family, values_of(run.cfg)).entries.values()
        for name in entry.hf
        if not entry.trained
    }
    for name, gradient in iter_hf_weights(run.chunks, family, run.cfg, groups=parallel_groups()):
        if name not in without:
            yield name, gradient
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight


def _gather_sharded_gradients(run: Run) -> None:
    """With the distributed optimizer each replica has reduced only its share of a bucket."""
    for chunk in run.chunks:
        # Experts have fewer replicas than the rest.
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
