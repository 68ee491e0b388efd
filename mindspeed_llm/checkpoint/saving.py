"""How a save is written: planned by megatron-core, written by this process, complete or invisible.

megatron-core's own writer forks a process for each file and passes results through queues of a manager process; a
killed one leaves the save waiting for ever. Here each rank writes its files in its own process, in the foreground or in
a thread (``--async-save``), and everything that ends a save is one action of rank 0, whose outcome all ranks learn:

1. rank 0 makes the draft folder ``iter_0000010.tmp``, and all ranks must see it (:func:`begin`);
2. megatron-core plans who writes what; tensors are copied, so that training may go on;
3. each rank writes ``__<rank>_<n>.distcp`` and waits for the disk;
4. rank 0 writes ``.metadata`` and ``metadata.json``, renames the folder, then points the tracker at it
   (:meth:`Save.finish`).
"""

# pyright: basic, reportMissingTypeStubs=false
# Everything here is megatron-core and torch's checkpointing, which have no types.

from __future__ import annotations

import io
import shutil
import socket
from collections.abc import Callable, Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

import mindspeed_llm.core  # noqa: F401  the device seam comes before megatron-core
from mindspeed_llm.checkpoint.durable import sync_file, sync_path
from mindspeed_llm.checkpoint.folders import TRACKER, clear, draft_folder, iteration_folder, retired_folder
from mindspeed_llm.device import current
from mindspeed_llm.errors import CheckpointError

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

BACKEND, VERSION = "torch_dist", 1


class Save:
    """A save under way; made by :func:`begin`."""

    def __init__(self, root: Path, iteration: int, plan: _Plan, common: _Common, live: set[int] | None) -> None:
        self.root = root
        self.iteration = iteration
        self._plan = plan
        self._common = common
        # A future keeps whatever stops the writing. An interpreter that ends normally waits for its thread.
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"save of iteration {iteration}")
        self._files = thread.submit(_write_files, plan.staged(live), plan.writer.transforms)
        thread.shutdown(wait=live is None)

    def written(self) -> bool:
        """Whether this rank's files are on the disk, or failed to get there."""
        return self._files.done()

    def finish(self, after: Callable[[], object] = lambda: None) -> Path:
        """Wait for the files of all ranks and make the save visible. Collective.

        Args:
            after: rank 0 does it when the save is complete.

        Raises:
            CheckpointError: a rank could not write; on all ranks. Earlier saves are untouched.
        """
        failure = self._common.failure or self._files.exception()
        final = iteration_folder(self.root, self.iteration)
        mine = ([], _describe(failure)) if failure else (self._files.result(), None)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, gathered if dist.get_rank() == 0 else None)

        def publish() -> None:
            failures = [failure for _, failure in gathered if failure]
            if failures:
                raise _Told("; ".join(dict.fromkeys(failures)))
            self._plan.writer.finish(self._plan.metadata, [results for results, _ in gathered])
            draft = draft_folder(self.root, self.iteration)
            save_config(CheckpointingConfig(BACKEND, VERSION), str(draft))
            _publish(self.root, draft, final, self.iteration)
            after()

        try:
            together(publish, f"the checkpoint {final} cannot be written")
        except CheckpointError:
            if dist.get_rank() == 0:
                # It is of no use, and the disk may be full.
                shutil.rmtree(draft_folder(self.root, self.iteration), ignore_errors=True)
            raise
        return final


def begin(
    root: Path,
    iteration: int,
    state: dict[str, Any],
    metadata: dict[str, Any],
    *,
    background: bool = False,
    group: Any = None,
    before: Callable[[], None] = lambda: None,
) -> Save:
    """Start the save of ``iteration``. Collective, and so is :meth:`Save.finish`, which must follow.

    Args:
        root: the folder of saves; made if need be.
        iteration: what the save is named for.
        state: a sharded state dict.
        metadata: how the optimizer's state was cut, kept with the save for the load.
        background: copy the tensors and write in a thread, rather than write before this returns.
        group: spread what its ranks hold alike over all of them (``--ckpt-fully-parallel-save``).
        before: rank 0 does it first.

    Raises:
        CheckpointError: that of ``before``; the folder cannot be made, or is not the same for all ranks; on all ranks.
    """
    draft = draft_folder(root, iteration)

    def make() -> None:
        before()
        clear(root, "tmp")
        draft.mkdir(parents=True)

    together(make, f"the checkpoint folder {draft} cannot be made")
    require_shared(draft)
    plan, common = _Plan(), _Common()
    live = _storages(state) if background else None
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, common)
    dist_checkpointing.save(
        state,
        str(draft),
        plan if group is None else FullyParallelSaveStrategyWrapper(plan, group),
        async_sharded_save=True,
        content_metadata=_plain(metadata),
    )
    return Save(root, iteration, plan, common, live)


def together(action: Callable[[], None], what: str) -> None:
    """Rank 0 acts; what goes wrong is an error on every rank rather than a wait for the one that left. Collective.

    Raises:
        CheckpointError: that of the action; or ``what``, with the reason.
    """
    failure: list[CheckpointError | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except CheckpointError as error:
            failure = [error]
        except (OSError, RuntimeError, MemoryError, _Told) as error:
            failure = [str(error) if isinstance(error, _Told) else _describe(error)]
    dist.broadcast_object_list(failure, device=current().torch_device)
    if isinstance(failure[0], CheckpointError):
        raise failure[0]
    if failure[0] is not None:
        raise CheckpointError(what, got=failure[0], fix="earlier saves are as they were; see to the disk, or --save")


def require_shared(folder: Path) -> None:
    """All ranks must see a folder that rank 0 has. Collective.

    Raises:
        CheckpointError: some do not; on all ranks.
    """
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (socket.gethostname(), folder.is_dir()))
    blind = sorted({f"rank {rank} on {host}" for rank, (host, sees) in enumerate(seen) if not sees})
    if blind:
        raise CheckpointError(
            f"{folder.parent} is not the same folder on all nodes",
            got=f"not seen by {', '.join(blind[:8])}",
            allowed="storage that all ranks share: the pieces of a save belong together",
            fix="--save on shared storage",
        )


class _Plan(TorchDistSaveShardedStrategy):
    """megatron-core's plan of a save, without its way of writing."""

    def __init__(self) -> None:
        super().__init__(BACKEND, VERSION, thread_count=1)
        self.writer: Any = None
        self.metadata: Any = None

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        self.writer = writer
        self.metadata = save_state_dict_ret[1]
        return AsyncRequest(None, (), [])

    def staged(self, live: set[int] | None) -> list[tuple[str, str, list[tuple[Any, Any]]]]:
        """Path, key and items of each file of this rank; tensors in host memory.

        megatron-core copies views, and no whole tensor that already is in host memory: of these a save in the
        background would hold what the next steps make of them.

        Args:
            live: addresses of the storages that training goes on to write to; tensors in these are copied.
        """
        buckets = []
        for path, key, (objects, tensors) in self.writer.write_buckets:
            moved = [(item, _in_host_memory(tensor.detach(), live or ())) for item, tensor in tensors]
            buckets.append((path, key, [*objects, *moved]))
        # The plan would keep the originals.
        self.writer.write_buckets = []
        return buckets


class _Common(TorchCommonSaveStrategy):
    """What is not sharded, written by rank 0; a failure is kept for :meth:`Save.finish`, where all ranks hear of it."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        if dist.get_rank() != 0:
            return
        try:
            with open(Path(checkpoint_dir, COMMON_STATE_FNAME), "wb") as file:
                with _disk_errors(file) as noted:
                    torch.save(common_state_dict, noted)
                sync_file(file)
        except (OSError, RuntimeError, MemoryError) as error:
            self.failure = error


def _storages(state: Any) -> set[int]:
    return {
        part.data.untyped_storage().data_ptr()
        for part in nested_values(state)
        if isinstance(part, ShardedTensor | ShardedTensorFactory) and part.data is not None
    }


def _in_host_memory(tensor: torch.Tensor, live: Collection[int]) -> torch.Tensor:
    return tensor.to("cpu", copy=tensor.untyped_storage().data_ptr() in live)


def _write_files(buckets: list[tuple[str, str, list[tuple[Any, Any]]]], transforms: Any) -> list[Any]:
    results = []
    while buckets:
        # What is written needs no memory any more.
        results += _write_file(*buckets.pop(), transforms)
    return results


def _write_file(path: str, key: str, items: list[tuple[Any, Any]], transforms: Any) -> list[Any]:
    results = []
    with open(path, "wb") as file:
        with _disk_errors(file) as noted:
            for item, data in items:
                results.append(_write_item(transforms, noted, data, item, key, SerializationFormat.TORCH_SAVE))
        sync_file(file)
    return results


class _Noted(io.RawIOBase):
    """A file that keeps the error of the disk."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def tell(self) -> int:
        return self.file.tell()


@contextmanager
def _disk_errors(file: BinaryIO) -> Generator[Any]:
    """``file`` for torch to write to: what the disk says is raised, and not what torch makes of it."""
    noted = _Noted(file)
    try:
        yield noted
    except RuntimeError as error:
        raise (noted.failure or error) from error


class _Told(Exception):
    """What ranks have said of themselves."""


def _describe(error: BaseException) -> str:
    what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"rank {dist.get_rank()} on {socket.gethostname()}: {what}"


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if not isinstance(value, dist.ProcessGroup)}


def _publish(root: Path, draft: Path, final: Path, iteration: int) -> None:
    for path in [*draft.iterdir(), draft]:
        sync_path(path)
    if final.exists():
        clear(root, "replaced")
        final.rename(retired_folder(root, iteration))
    draft.rename(final)
    sync_path(root)
    tracker = root / TRACKER
    fresh = tracker.with_name(TRACKER + ".tmp")
    with fresh.open("wb") as file:
        file.write(str(iteration).encode())
        sync_file(file)
    fresh.replace(tracker)
    sync_path(root)
    clear(root, "replaced")
