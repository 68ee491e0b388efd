"""This rank's process groups, with types: ``parallel_state`` keeps them in globals that start as None."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist

from megatron.core import parallel_state


def tensor_group() -> dist.ProcessGroup:
    """Ranks that hold parts of the same tensors."""
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """Ranks at the same place of all pipeline stages, first stage first."""
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def data_group() -> dist.ProcessGroup:
    """Replicas of this rank: data and context parallel."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))


def expert_group() -> dist.ProcessGroup:
    """Ranks of one stage that hold the experts of its layers between them, and the parts of each: those of the first
    experts come first."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_tensor_and_model_parallel_group())


def expert_tensor_group() -> dist.ProcessGroup:
    """Ranks that hold parts of the same experts."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_tensor_parallel_group())


def expert_data_group() -> dist.ProcessGroup:
    """Replicas of this rank's experts."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_data_parallel_group())
