"""megatron-core's way to load a ``torch_dist`` save, with the readers of ``checkpoint.trusted``.

Its own strategies unpickle ``.metadata`` and every object inside the ``.distcp`` files without any restriction.
"""

# pyright: basic, reportMissingTypeStubs=false, reportPrivateUsage=false
# Everything here is megatron-core's or private to torch.

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load_state_dict
from torch.futures import Future

import mindspeed_llm.core  # noqa: F401  the device seam comes before megatron-core
from mindspeed_llm.checkpoint.trusted import only_names, read_common, read_metadata, read_object, reading

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner, TorchDistLoadShardedStrategy


class TrustedCommonStrategy(TorchCommonLoadStrategy):
    """``common.pt``."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Its content."""
        return read_common(Path(checkpoint_dir) / COMMON_STATE_FNAME)


class TrustedShardedStrategy(TorchDistLoadShardedStrategy):
    """Everything else. One serves one save: the index is read once."""

    def __init__(self) -> None:
        super().__init__()
        self._reader: _Reader | None = None

    def _reader_of(self, folder: str | Path) -> _Reader:
        if self._reader is None or Path(self._reader.path) != Path(folder):
            self._reader = _Reader(folder)
        return self._reader

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        """As megatron-core's, of whose steps it consists."""
        reader = self._reader_of(checkpoint_dir)
        # Before torch does, who would go on without it.
        self.cached_global_metadata = reader.read_metadata()
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        flat, flat_mapping, renamed = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = torch_strategy.mcore_to_pyt_state_dict(flat, True)
        planner = _Planner(
            reader,
            shapes_validation_sharded_tensors=[tensor for tensor in tensors if not tensor.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        load_state_dict(state, reader, planner=planner)
        found: dict[str, Any] = {key: torch_strategy._unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded = torch_strategy._replace_sharded_keys_with_state_dict_keys(found, flat_mapping, renamed)
        torch_strategy._restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Metadata | None = None) -> dict[str, Any]:
        """The tensors of the save, without data."""
        known = metadata or self._reader_of(checkpoint_dir).read_metadata()
        return super().load_tensors_metadata(Path(checkpoint_dir), known)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """The tensors and objects of the save, without data."""
        metadata = self._reader_of(checkpoint_dir).read_metadata()
        stored = metadata.state_dict_metadata.items()
        names = [name for name, value in stored if isinstance(value, BytesStorageMetadata)]
        objects = [ShardedObject.empty_from_unique_key(name) for name in names]
        return {o.unique_key: o for o in objects} | self.load_tensors_metadata(checkpoint_dir, metadata)


class _Reader(FileSystemReader):
    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None
        self._file = ""

    # Without torch's argument for the index of one rank, which is not a thing of megatron-core's saves.
    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path) / ".metadata")
        return self._metadata

    @property
    def file(self) -> Path:
        """The one that is being read."""
        return Path(self.path) / self._file

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        self._file = sinfo.relative_path
        return super()._slice_file(file, sinfo)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # torch reads tensors with weights_only, and says nothing of the file.
        try:
            with only_names({}):
                return super().read_data(plan, planner)
        except Exception:
            # Damaged bytes fail in any way.
            with reading(self.file):
                raise


class _Planner(MCoreLoadPlanner):
    def __init__(self, reader: _Reader, **options: Any) -> None:
        super().__init__(**options)
        self._reader = reader

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        found = read_object(value, f"{self._reader.file}, its object {name},")
        set_element(self.original_state_dict, self.mappings[name], found)
