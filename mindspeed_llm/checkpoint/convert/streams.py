"""What a conversion reads from and writes to, whatever the storage.

Both sides of megatron-core speak of *whole* tensors by their global name: tensor-parallel parts put together, layers
counted over the whole model from 0 (``decoder.layers.17.mlp.linear_fc1.weight``), as in the families' weight tables. A
tied output layer is not there. Rows of the vocabulary are padded, as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mindspeed_llm.checkpoint.hf_io import TensorSource


@dataclass(frozen=True)
class Target:
    """The layout that per-rank files are cut for. ``torch_dist`` folders have none.

    Args:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks.
        layers_per_virtual_stage: ``--num-layers-per-virtual-pipeline-stage``.
        layer_list: layers of each stage, where they are not alike (``--num-layer-list``).
        noop_layers: places, counted from 0 with these among them, that hold no layer (``--noop-layers``).
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    layers_per_virtual_stage: int | None = None
    layer_list: tuple[int, ...] | None = None
    noop_layers: tuple[int, ...] = ()


class MegatronSource(TensorSource, Protocol):
    """Whole megatron-core tensors and what the checkpoint says of the model; parts of tensors are read alone."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Fields of the run configuration (``num_layers``, ...) that are recorded; empty where none are."""
        ...

    @property
    def target(self) -> Target | None:
        """The layout of its files; None where tensors are not cut by one."""
        ...


class TensorSink(Protocol):
    """Takes whole tensors, planned at its construction (name -> ``TensorInfo``), into a draft folder.

    The conversion makes the folder beforehand, and makes it visible afterwards. Those of megatron-core have global
    names. ``hf_io.ShardWriter`` is one too.
    """

    def write(self, name: str, tensor: Tensor, start: int = 0) -> None:
        """Rows ``start`` and on (dim 0) of tensor ``name``, cast to the planned dtype.

        Tensors come in the planned order, large ones in several calls from top to bottom.

        Raises:
            CheckpointError: a tensor out of plan.
            OSError: the disk does not take it.
        """
        ...

    def finish(self) -> None:
        """Brings all files to disk, and proves that everything planned was written.

        Raises:
            CheckpointError: rows are missing.
        """
        ...

    def abandon(self) -> None:
        """Closes what is open after a failure, whatever the disk says."""
        ...
