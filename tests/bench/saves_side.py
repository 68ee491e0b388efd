"""What the ranks run for :mod:`tests.bench.saves`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mindspeed_llm.core  # noqa: F401  brings megatron-core in behind its seam
from mindspeed_llm.checkpoint.durable import sync_path
from mindspeed_llm.checkpoint.folders import iteration_folder
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.training.initialize import initialize
from mindspeed_llm.training.save_load import Saver, _metadata, _state
from mindspeed_llm.training.setup import setup
from mindspeed_llm.training.state import Run

from megatron.core import dist_checkpointing

TINY = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 328}
LARGE = {"num_layers": 4, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 32000}
RECIPE: dict[str, Any] = {
    "max_position_embeddings": 64,
    "seq_length": 32,
    "micro_batch_size": 1,
    "train_iters": 10,
    "lr": 1e-3,
    "mock_data": True,
    "use_distributed_optimizer": True,
}


def _run(values: dict[str, Any]) -> Run:
    cfg = from_values({**RECIPE, **values}, world_size=dist.get_world_size())
    initialize(cfg)
    run = setup(cfg)
    # Moments exist from the first step on.
    for chunk in run.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.normal_()
    run.optimizer.step()
    return run


def writers(root: str, turns: int) -> list[dict[str, float]]:
    """Seconds of a periodic save of the tiny model, ours and megatron-core's writer in turns, on TP2 PP2."""
    run = _run({**TINY, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    return [{"ours": _ours(run, f"{root}/ours{turn}"), "theirs": _theirs(run, f"{root}/theirs{turn}")}
            for turn in range(turns)]  # fmt: skip


def _ours(run: Run, root: str) -> float:
    run.cfg = replace(run.cfg, checkpoint=replace(run.cfg.checkpoint, save=root, async_save=False))
    dist.barrier()
    started = time.perf_counter()
    Saver(run).save()
    return time.perf_counter() - started


def _theirs(run: Run, root: str) -> float:
    if dist.get_rank() == 0:
        Path(root).mkdir()
    dist.barrier()
    started = time.perf_counter()
    metadata = _metadata("dp_reshardable")
    plain = {key: value for key, value in metadata.items() if not isinstance(value, dist.ProcessGroup)}
    dist_checkpointing.save(_state(run, metadata), root, content_metadata=plain)
    dist.barrier()
    return time.perf_counter() - started


def stalls(root: str, turns: int) -> list[dict[str, float]]:
    """Seconds for which training waits, saving at once and in the background, then seconds of a copy; and the bytes."""
    run = _run(LARGE)
    _ours(run, f"{root}/kept")
    kept = iteration_folder(Path(root, "kept"), run.progress.iteration)
    size = sum(path.stat().st_size for path in kept.iterdir()) / 1e6
    works: list[Callable[[], dict[str, float]]] = [
        lambda: {"at once": _ours(run, f"{root}/new")},
        lambda: _in_background(run, f"{root}/new"),
        lambda: {"copy": _copy(kept, Path(root, "new"))},
    ]
    found: list[dict[str, float]] = []
    for turn in range(turns):
        times: dict[str, float] = {"MB": size}
        # The disk is slower while it still works off what came before: each goes first in turn.
        for number in range(len(works)):
            os.sync()
            times |= works[(turn + number) % len(works)]()
            shutil.rmtree(Path(root, "new"))
        found.append(times)
    return found


def _in_background(run: Run, root: str) -> dict[str, float]:
    run.cfg = replace(run.cfg, checkpoint=replace(run.cfg.checkpoint, save=root, async_save=True))
    saver = Saver(run)
    started = time.perf_counter()
    saver.save()
    waits = time.perf_counter() - started
    saver.finish()
    return {"background": waits, "written": time.perf_counter() - started}


def _copy(source: Path, target: Path) -> float:
    started = time.perf_counter()
    shutil.copytree(source, target)
    for path in target.iterdir():
        sync_path(path)
    return time.perf_counter() - started
