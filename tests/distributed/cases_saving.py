"""What the ranks run to show that saves are right, whole, and kept or deleted as promised."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import shutil
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_llm import api
from mindspeed_llm.checkpoint import hf_io, in_use, saving
from mindspeed_llm.checkpoint.folders import complete_iterations, latest_iteration
from mindspeed_llm.checkpoint.origin import Origin
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.errors import CheckpointError
from mindspeed_llm.training import loop, pretrain
from mindspeed_llm.training.objective import pretraining
from mindspeed_llm.training.save_load import Saver
from mindspeed_llm.training.state import Run
from mindspeed_llm.training.step import train_step
from tests.distributed.cases_core import recipe
from tests.distributed.cases_pretrain import SMALLEST, command
from tests.parity.case import micro_batches

ELSEWHERE = {"host": "elsewhere", "system": "x", "pid": 7, "start": "1", "since": "then"}


def run_of(folder: str, layout: str, tokens: torch.Tensor, **checkpoint: Any) -> tuple[Run, Any]:
    """A run and a function that trains its next step."""
    values = recipe(layout, tokens)
    run = api.load_hf(folder, **values)
    run.cfg = replace(run.cfg, checkpoint=replace(run.cfg.checkpoint, **checkpoint))
    batches = [micro_batches(tokens, values["micro_batch_size"]) for _ in run.chunks]

    def step() -> None:
        train_step(run, pretraining, batches)
        run.progress.iteration += 1
        run.progress.consumed_samples += tokens.shape[1]

    return run, step


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def both_ways(folder: str, layout: str, tokens: torch.Tensor, root: str, portable: bool) -> dict[str, Any]:
    """Save step 1 at once and in the background, with every file held back until two more steps are done."""
    common = {"dist_ckpt_optim_fully_reshardable": portable}
    run, step = run_of(folder, layout, tokens, save=f"{root}/sync", **common)
    step()
    Saver(run).save()
    run.cfg = replace(run.cfg, checkpoint=replace(run.cfg.checkpoint, save=f"{root}/async", async_save=True))
    write, gate = saving._write_file, threading.Event()

    def held_back(*args: Any) -> list[Any]:
        gate.wait(60)
        return write(*args)

    saving._write_file = held_back
    try:
        saver = Saver(run)
        saver.save()
        early = Path(f"{root}/async/iter_0000001").exists()
        for _ in range(2):
            step()
            saver.poll()
        waited = saver._pending is not None
        gate.set()
        while saver._pending is not None:
            saver.poll()
            time.sleep(0.01)
    finally:
        saving._write_file = write
    dist.barrier()
    found = {name: digests(Path(root, name, "iter_0000001")) for name in ("sync", "async")}
    return found | {"early": early, "waited": waited, "threads": threading.active_count()}


def failing(folder: str, layout: str, tokens: torch.Tensor, root: str, where: str, background: bool) -> dict[str, Any]:
    """A save that cannot be written on one rank, between two that can."""
    run, step = run_of(folder, layout, tokens, save=root, async_save=background)
    saver = Saver(run)
    step()
    saver.save()
    saver.finish()
    step()
    names = {"shard": "_write_file", "memory": "_write_file", "metadata": "save_config", "publish": "_publish"}
    original = getattr(saving, names[where])

    def full(*args: Any) -> Any:
        last = dist.get_rank() == dist.get_world_size() - 1
        if where == "memory" and last:
            raise MemoryError("No space left on device")
        if where in ("metadata", "publish") or last:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    setattr(saving, names[where], full)
    try:
        saver.save()
        saver.finish()
        message = None
    except CheckpointError as error:
        message = str(error)
    finally:
        setattr(saving, names[where], original)
    dist.barrier()
    after = latest_iteration(Path(root))
    left = sorted(path.name for path in Path(root).iterdir())
    dist.barrier()
    step()
    saver.save()
    saver.finish()
    return {"message": message, "after": after, "left": left, "then": latest_iteration(Path(root))}


def failing_export(argv: list[str], rank: int, where: str) -> dict[str, Any]:
    """A run on whose last stage, or first rank, the disk is full when the Hugging Face folder is written."""
    owner, name = {"shard": (hf_io.ShardWriter, "write"), "config": (hf_io, "write_json")}[where]
    original, writes = getattr(owner, name), itertools.count()

    def full(*args: Any) -> Any:
        if dist.get_rank() == rank and next(writes) == (2 if where == "shard" else 0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    setattr(owner, name, full)
    try:
        found = command(argv)
    finally:
        setattr(owner, name, original)
    return {"code": found["code"], "err": found["err"]}


def disturbed(argv: list[str], save: str, how: str) -> dict[str, Any]:
    """A run whose ``--save`` is deleted, or begun to be written to by another run, before its third step."""
    train_step, root, steps = loop.train_step, Path(save), itertools.count(1)

    def stepping(*args: Any) -> Any:
        if next(steps) == 3 and dist.get_rank() == 0:
            if how == "deleted":
                shutil.rmtree(root)
            else:
                (root / in_use.NAME).write_text(json.dumps(ELSEWHERE))
        return train_step(*args)

    loop.train_step = stepping
    try:
        found = command(argv)
    finally:
        loop.train_step = train_step
    return {"code": found["code"], "err": found["err"]}


def watching(root: str) -> bool:
    """Whether the folder is this run's, after the mark of a process elsewhere was watched for longer than a collective
    may last."""
    minutes, beat = 1 / 60, 0.3
    assert beat * in_use.PATIENCE > 60 * minutes
    dist.init_process_group("gloo", timeout=timedelta(minutes=minutes))
    cfg = from_values({**SMALLEST, "save": root, "distributed_timeout_minutes": minutes}, world_size=2)
    original, pretrain.hold = pretrain.hold, partial(in_use.hold, beat=beat)
    try:
        with pretrain._only_writer(cfg) as mark:
            return mark is None or mark.stands()
    finally:
        pretrain.hold = original


def unwritable(folder: str, layout: str, tokens: torch.Tensor, root: str) -> str:
    """The error of a save into a file's place."""
    run, step = run_of(folder, layout, tokens, save=root)
    step()
    try:
        Saver(run).save()
    except CheckpointError as error:
        return str(error)
    return "saved"


def kept(folder: str, layout: str, tokens: torch.Tensor, root: str, **checkpoint: Any) -> list[list[int]]:
    """The saves after each of six steps."""
    run, step = run_of(folder, layout, tokens, save=root, **checkpoint)
    saver, found = Saver(run), []
    for _ in range(tokens.shape[0]):
        step()
        saver.save()
        dist.barrier()
        found.append(complete_iterations(Path(root)))
        dist.barrier()
    return found


def newest_only(folder: str, layout: str, tokens: torch.Tensor, root: str) -> dict[str, Any]:
    """Persistent at step 2, the others not."""
    run, step = run_of(folder, layout, tokens, save=root)
    saver = Saver(run)
    found: dict[str, Any] = {"persistent": [], "other": []}
    for number in range(1, 5):
        step()
        saver.save(persistent=number == 2)
        dist.barrier()
        found["persistent"].append(complete_iterations(Path(root)))
        found["other"].append(complete_iterations(Path(root, "non_persistent")))
        dist.barrier()
    return found


def agreed(kinds: list[str], iterations: list[int], root: str) -> Any:
    """What a rank takes up that found a save of ``kinds[rank]`` and ``iterations[rank]``; or the error."""
    rank = dist.get_rank()
    found: Any = Origin(kinds[rank], Path(root), iterations[rank])  # pyright: ignore[reportArgumentType]
    try:
        return pretrain._agreed(from_values({**SMALLEST, "load": root}, world_size=dist.get_world_size()), found)
    except CheckpointError as error:
        return str(error)


def not_shared(root: str) -> str:
    """Every rank has a folder of its own under one name."""
    mine = Path(root, str(dist.get_rank()))
    (mine / "iter_0000001.tmp").mkdir(parents=True) if dist.get_rank() == 0 else mine.mkdir(parents=True)
    dist.barrier()
    try:
        saving.require_shared(mine / "iter_0000001.tmp")
    except CheckpointError as error:
        return str(error)
    return "shared"
