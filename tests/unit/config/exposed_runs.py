"""Tiny runs in one process, and everything of them in which a flag can show.

Several ranks are pretended: torch's ``fake`` backend answers collectives at once, so that groups, shapes and the path
through megatron-core are those of rank 0 of a real run, while values that would have travelled are not.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindspeed_llm.cli.flags import parse_pretrain
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.config.schema import field_table
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.errors import SuiteError
from mindspeed_llm.training.initialize import finalize, initialize
from mindspeed_llm.training.loop import Hooks, train
from mindspeed_llm.training.objective import Batch, pretraining
from mindspeed_llm.training.save_load import Saver
from mindspeed_llm.training.setup import setup
from mindspeed_llm.training.state import Run

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

Values = Mapping[str, Any]

BASE: Values = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "make_vocab_size_divisible_by": 1,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 3,
    "lr": 1e-2,
    "mock_data": True,
}


@dataclass
class Seen:
    """What one run was made of and what it did.

    Attributes:
        made: structures: modules, shapes, groups, buffers.
        done: what was computed, the same in two equal runs.
        read: fields that running code read from megatron-core's configuration objects.
    """

    made: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)


def command_line(values: Values) -> list[str]:
    """Field values as somebody would write them."""
    argv: list[str] = []
    for name, value in values.items():
        spec = field_table()[name]
        if spec.is_bool:
            argv.append(next(flag for flag, means in spec.spellings().items() if means == value))
        else:
            argv += [spec.flag, *(str(part) for part in (value if isinstance(value, tuple) else (value,)))]
    return argv


def observe(world: int, values: Values) -> Seen:
    """Train a tiny model as rank 0 of ``world``; see :class:`Seen`."""
    return _observe(world, tuple(sorted({**BASE, **values}.items())))


@functools.cache
def _observe(world: int, values: tuple[tuple[str, Any], ...]) -> Seen:
    cfg = parse_pretrain(command_line(dict(values)), environ={"WORLD_SIZE": str(world)})
    seen = Seen()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with _reads_recorded(seen.read):
            initialize(cfg)
            seen.made["groups"] = sorted(
                (group.group_desc, tuple(dist.get_process_group_ranks(group)))
                for group in dist.distributed_c10d._world.pg_map
            )
            run = setup(cfg)
            seen.made |= _structure(run)
            _train(cfg, run, seen)
    finally:
        finalize()
        torch.set_num_threads(threads)
    return seen


def _structure(run: Run) -> dict[str, Any]:
    return {
        "modules": [str(chunk) for chunk in run.chunks],
        "parameters": [
            (name, tuple(p.shape), p.dtype, p.main_grad.dtype) for c in run.chunks for name, p in c.named_parameters()
        ],
        "buffers": [(b.numel, b.grad_data.dtype, len(b.buckets)) for c in run.chunks for b in c.buffers],
        "optimizer": type(run.optimizer).__name__,
        "parts": [type(part).__name__ for part in getattr(run.optimizer, "chained_optimizers", ())],
    }


def _train(cfg: RunConfig, run: Run, seen: Seen) -> None:
    calls: Counter[str] = Counter()
    for chunk in run.chunks:
        for module in chunk.modules():
            module.register_forward_pre_hook(lambda module, _: calls.update([type(module).__name__]))
    results: list[Any] = []
    groups: list[Any] = []

    class Reporter:
        def step(self, progress: Any, result: Any, batch: int, micro_batches: int) -> None:
            results.append((repr(result), batch, micro_batches))
            kept = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
            groups.append(repr(kept))

        def resume_clock(self) -> None:
            pass

    streams = [_batches(cfg) for _ in run.chunks]
    hooks = Hooks(streams, {}, Saver(run), lambda last: None)
    try:
        train(run, pretraining, hooks, Reporter(), started=time.monotonic())  # pyright: ignore[reportArgumentType]
        seen.done["end"] = "trained"
    except SuiteError as error:
        seen.done["end"] = str(error)
    weights = {name: p.detach().double().sum().item() for c in run.chunks for name, p in c.named_parameters()}
    seen.done |= {"calls": dict(calls), "steps": results, "groups": groups, "weights": repr(weights)}


def _batches(cfg: RunConfig) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(5)
    length: int = cfg.training.seq_length  # pyright: ignore[reportAssignmentType]
    while True:
        tokens = torch.randint(64, (1, length + 1), generator=generator)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": (torch.rand(1, length, generator=generator) < 0.7).float(),
            "position_ids": torch.arange(length)[None],
        }


@contextmanager
def _reads_recorded(read: set[str]) -> Iterator[None]:
    """Record which fields of the configuration objects are read, but for their own checks and copies."""
    kinds = (SuiteTransformerConfig, OptimizerConfig, DistributedDataParallelConfig)

    def recording(self: object, name: str) -> Any:
        code = sys._getframe(1).f_code
        if code.co_name not in ("__post_init__", "__repr__", "__eq__", "_fill", "_asdict_inner"):
            read.add(name)
        return object.__getattribute__(self, name)

    for kind in kinds:
        kind.__getattribute__ = recording  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind in kinds:
            del kind.__getattribute__
