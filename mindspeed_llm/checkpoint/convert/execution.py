"""Doing what a conversion plans: blocks of rows go through, and the result appears whole or not at all."""

# pyright: basic
# Configurations on disk have no types.

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.convert.conversion import Plan, Settings
from mindspeed_llm.checkpoint.convert.legacy_writer import LegacySink
from mindspeed_llm.checkpoint.convert.record import sections
from mindspeed_llm.checkpoint.convert.streams import Target, TensorSink
from mindspeed_llm.checkpoint.convert.torch_dist import TorchDistSink, homogeneous
from mindspeed_llm.checkpoint.durable import sync_file, sync_path
from mindspeed_llm.checkpoint.folders import CONVERSION, TRACKER, iteration_folder
from mindspeed_llm.checkpoint.hf_io import TensorInfo, TensorSource
from mindspeed_llm.checkpoint.names import compile_names
from mindspeed_llm.errors import CheckpointError, ConversionError

logger = logging.getLogger(__name__)

ITERATION = 1
"""What converted checkpoints are named for, as MindSpeed-LLM's converters have it."""

BLOCK_BYTES = 2**24
"""Larger tensors go through in blocks of rows. The memory of a block below 32 MiB is used again for the next one; a
larger one is asked of the system each time, which clears it: that was a third of a conversion's time."""

SHARD_BYTES = hf_io.DEFAULT_SHARD_BYTES
"""Of Hugging Face files."""

Progress = Callable[[int], None]


def check_destination(settings: Settings) -> None:
    """Refuses a place whose content the conversion would destroy: anything but an earlier conversion.

    Raises:
        CheckpointError: it is the input or holds it, or is a folder of something else.
    """
    out = settings.save
    if settings.hf_config is not None:
        hf_io.check_destination(out, settings.hf_config)
    hf_io.check_destination(out, settings.load)
    saves = sorted(path.name for path in out.glob("iter_*")) if out.is_dir() else []
    ours = [iteration_folder(out, ITERATION).name]
    if saves and (saves != ours or not (out / ours[0] / CONVERSION).is_file()):
        raise CheckpointError(
            "the folder to write to holds checkpoints of a run", got=out, fix="give another folder to --save-dir"
        )


def execute(plan: Plan, progress: Progress = lambda nbytes: None) -> None:
    """Write what was planned.

    Args:
        progress: told the bytes of each block that was written.

    Raises:
        CheckpointError: the input is damaged, the disk takes no more, or another conversion writes there; nothing is
            left behind.
        ConversionError: a weight is too large for the dtype.
    """
    out = plan.settings.save
    check_destination(plan.settings)
    try:
        with _staged(out) as staging:
            if plan.settings.save_kind == "hf":
                _write_hf(plan, staging, progress)
            else:
                _write_megatron(plan, staging, progress)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written", got=error, fix="see to the disk, or --save-dir") from error
    logger.info("wrote %d tensors of %s to %s", len(plan.tensors), plan.family.name, out)


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``out`` at the end of the block, or goes.

    It is locked while it is written to: a second conversion would take it for what a crash left.

    Raises:
        CheckpointError: another conversion writes there.
    """
    left = hf_io.staging_folder(out)
    if left.is_dir():
        os.close(_locked(left))
    staging = hf_io.open_staging(out)
    lock = _locked(staging)
    try:
        yield staging
        hf_io.publish(out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _locked(staging: Path) -> int:
    """An open handle of the folder, which nobody else can lock as long as it is open.

    Raises:
        CheckpointError: somebody has.
    """
    handle = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise CheckpointError("another conversion writes there", got=staging, fix="wait for it") from error
    except OSError as error:
        logger.debug("%s cannot be locked, as on some network file systems: %s", staging, error)
    return handle


def _write_hf(plan: Plan, staging: Path, progress: Progress) -> None:
    shards = [shard for _, shard in hf_io.plan_shards(plan.tensors, dict.fromkeys(plan.tensors, 0), SHARD_BYTES)]
    _stream(plan, hf_io.ShardWriter(staging, shards, plan.tensors), progress)
    hf_io.write_index(staging, shards, plan.tensors)
    dtype = str(plan.dtype).removeprefix("torch.")
    config = plan.family.values_to_config(plan.values, dtype, plan.record.hf_config)
    hf_io.write_json(staging / hf_io.CONFIG, config)
    if plan.record.words is not None:
        hf_io.copy_companions(Path(plan.record.words), staging, (hf_io.GENERATION, *hf_io.TOKENIZER_FILES))


def _write_megatron(plan: Plan, staging: Path, progress: Progress) -> None:
    folder = iteration_folder(staging, ITERATION)
    folder.mkdir()
    _stream(plan, _sink(plan, folder), progress)
    plan.record.write(folder)
    sync_path(folder)
    with (staging / TRACKER).open("wb") as file:
        file.write(str(ITERATION).encode())
        sync_file(file)


def _sink(plan: Plan, folder: Path) -> TensorSink:
    if plan.settings.save_format == "legacy":
        return LegacySink(
            folder,
            plan.tensors,
            table=compile_names(plan.family, plan.values),
            target=plan.settings.target or Target(),
            values=plan.values,
            transformer_impl=plan.settings.transformer_impl,
            iteration=ITERATION,
        )
    return TorchDistSink(
        folder,
        plan.tensors,
        num_layers=plan.values["num_layers"],
        homogeneous=homogeneous(plan.values),
        common={"config": sections(plan.values), "content_metadata": {}},
    )


def _stream(plan: Plan, sink: TensorSink, progress: Progress) -> None:
    try:
        for name, start, block in _blocks(plan.source, plan.tensors, plan.settings.workers):
            sink.write(name, block, start)
            progress(block.nbytes)
        sink.finish()
    except BaseException:
        sink.abandon()
        raise


def _blocks(source: TensorSource, tensors: Mapping[str, TensorInfo], workers: int) -> Iterator[tuple[str, int, Tensor]]:
    """Rows of every tensor in order: name, first row, rows. ``workers`` threads read ahead of the caller."""
    ahead: deque[tuple[str, int, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="reader") as pool:
        try:
            for name, info in tensors.items():
                for start, stop in _rows(info):
                    rows = (start, stop) if info.shape else None
                    ahead.append((name, start, pool.submit(_read, source, name, rows, info.dtype)))
                    if len(ahead) > workers:
                        yield _next(ahead)
            while ahead:
                yield _next(ahead)
        finally:
            for _, _, pending in ahead:
                pending.cancel()


def _next(ahead: deque[tuple[str, int, Future[Tensor]]]) -> tuple[str, int, Tensor]:
    name, start, future = ahead.popleft()
    return name, start, future.result()


def _read(source: TensorSource, name: str, rows: Any, dtype: torch.dtype) -> Tensor:
    found = source.read(name, rows)
    cast = found.to(dtype)
    if found.dtype != dtype and cast.isinf().any() and not found.isinf().any():
        raise ConversionError(
            f"{name} is too large for {str(dtype).removeprefix('torch.')}",
            got=f"{found.abs().max().item():.4g}",
            allowed=f"up to {torch.finfo(dtype).max:.4g}",
            fix="another --params-dtype",
        )
    return cast


def _rows(info: TensorInfo) -> Iterator[tuple[int, int]]:
    if not info.shape or not info.shape[0]:
        yield 0, 0
        return
    row = torch.Size(info.shape[1:]).numel() * info.dtype.itemsize
    step = max(1, BLOCK_BYTES // max(row, 1))
    for start in range(0, info.shape[0], step):
        yield start, min(start + step, info.shape[0])
