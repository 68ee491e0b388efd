"""How the processes of a run find each other and share the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.config.option import option


@dataclass(frozen=True)
class DistributedConfig:
    """Processes and their groups; the parallel sizes themselves are fields of the transformer section."""

    distributed_backend: Literal["nccl", "hccl", "gloo"] | None = None
    """Communication library. nccl means the device's own, as recipes for every device carry it: NCCL on CUDA, HCCL
    on NPU, gloo on CPU. gloo means gloo on every device."""

    distributed_timeout_minutes: float = 10
    """Minutes after which a collective that does not end, or a process that stands still, stops the run; fractions are
    allowed."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers in each of the interleaved stages of a pipeline rank; turns interleaving on."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Interleaved stages of each pipeline rank; another way to turn interleaving on."""

    moe_tp_extend_ep: bool = False
    """Share whole experts between tensor-parallel ranks, too: the expert-parallel size is multiplied by theirs, and no
    expert is cut."""

    world_size: int = option(1, is_flag=False)
    """Processes of the run, from the launcher."""

    data_parallel_size: int = option(1, is_flag=False)
    """Processes that hold the same weights; derived."""
