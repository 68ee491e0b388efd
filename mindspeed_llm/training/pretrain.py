"""A whole pretraining run, from configuration to exported model."""

from __future__ import annotations

import logging
import platform
import socket
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_llm
from mindspeed_llm.checkpoint.folders import holds
from mindspeed_llm.checkpoint.in_use import Mark, hold
from mindspeed_llm.checkpoint.origin import Origin, find_origin
from mindspeed_llm.config.resolve import format_non_default
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.data.datasets import prepare_raw
from mindspeed_llm.data.inputs import split_sizes, tokenizer_of
from mindspeed_llm.data.tokenizer import Tokenizer
from mindspeed_llm.device import current
from mindspeed_llm.errors import CheckpointError
from mindspeed_llm.training.failure import phase
from mindspeed_llm.training.initialize import finalize, initialize
from mindspeed_llm.training.loop import Hooks, total_iterations, train
from mindspeed_llm.training.objective import pretraining
from mindspeed_llm.training.report import Reporter
from mindspeed_llm.training.save_load import Saver, load_checkpoint
from mindspeed_llm.training.setup import setup
from mindspeed_llm.training.state import Run
from mindspeed_llm.training.streams import open_streams
from mindspeed_llm.training.weights import (
    check_exports,
    check_outputs,
    export_hf,
    family_of,
    load_from_hf,
    load_from_megatron,
)

logger = logging.getLogger(__name__)


def pretrain(cfg: RunConfig) -> None:
    """Run ``cfg`` from start to end. Collective over the processes of the launcher.

    Raises:
        SuiteError: anything that the user can mend, before time is spent wherever it can be known then.
    """
    _pretrain(cfg)
    # The run is gone by now, so its process groups can go too.
    finalize()


def _pretrain(cfg: RunConfig) -> None:
    started = time.monotonic()
    origin = find_origin(cfg)
    if origin.kind in _OF_MEGATRON:
        family_of(cfg)
    check_exports(cfg)
    check_outputs(cfg)
    total = total_iterations(cfg)
    steps = total > 0 or cfg.training.skip_train
    # A preparation takes its time, and who waits for it watches whoever prepares.
    with phase("data", patient=True):
        tokenizer = tokenizer_of(cfg) if steps else None
        with_data = prepare_raw(cfg, tokenizer, split_sizes(cfg)) if tokenizer else cfg
    initialize(cfg)
    if dist.get_rank() == 0:
        logger.info("configuration, values that are not defaults:\n%s", format_non_default(cfg))
        for notice in cfg.notices:
            logger.info("note: %s", notice)
    origin = _agreed(cfg, origin)
    with _only_writer(cfg) as mark:
        _run(cfg, origin, with_data, tokenizer, mark, started)


@phase("setup")
def _agreed(cfg: RunConfig, origin: Origin) -> Origin:
    """What rank 0 found in ``--load``, if all ranks see it. Collective.

    Each looked for itself, and perhaps at its own disk; and while another run saves there, the newest save is one for
    one rank and the next for another.

    Raises:
        CheckpointError: some found something else; on all ranks.
    """
    first: Origin = _from_first_rank(origin)
    same = replace(origin, iteration=first.iteration) == first
    same = same and (first.kind != "checkpoint" or first.folder is None or holds(first.folder, first.iteration))
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, f"rank {dist.get_rank()} on {socket.gethostname()}: {origin}" if not same else None)
    others = [words for words in seen if words is not None]
    if others:
        raise CheckpointError(
            f"--load {cfg.checkpoint.load} is not the same for all ranks",
            got="; ".join(others[:4]),
            allowed=f"what rank 0 found: {first}",
            fix="--load and --save on storage that all nodes share",
        )
    return first


_WATCHING = "another's mark is being watched"


@contextmanager
def _only_writer(cfg: RunConfig) -> Generator[Mark | None]:
    """No other run writes to ``--save`` meanwhile, or every rank says which; the mark is rank 0's. Collective."""
    with ExitStack() as stack:
        mark, refusal = None, None
        if cfg.checkpoint.save is not None and dist.get_rank() == 0:
            try:
                mark = stack.enter_context(hold(Path(cfg.checkpoint.save), pause=partial(_pause, cfg)))
            except CheckpointError as error:
                refusal = error
            except OSError as error:
                got = f"{cfg.checkpoint.save}: {error.strerror}"
                refusal = CheckpointError("--save cannot be written to", got=got, fix="another --save, or more room")
        refusal = _from_first_rank(refusal)
        while refusal == _WATCHING:
            refusal = _from_first_rank(None)
        if refusal is not None:
            raise refusal
        yield mark


def _pause(cfg: RunConfig, seconds: float) -> None:
    """Rank 0 waits, and tells the others so now and then, whose patience is that of a collective."""
    end, patience = time.monotonic() + seconds, 60 * cfg.distributed.distributed_timeout_minutes
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, patience / 4))
        _from_first_rank(_WATCHING)


@phase("setup")
def _from_first_rank(said: Any) -> Any:
    told = [said]
    dist.broadcast_object_list(told, device=current().torch_device)
    return told[0]


def _run(
    cfg: RunConfig,
    origin: Origin,
    with_data: RunConfig,
    tokenizer: Tokenizer | None,
    mark: Mark | None,
    started: float,
) -> None:
    total = total_iterations(cfg)
    data, held_out = open_streams(with_data, tokenizer) if tokenizer else (None, {})
    run = _set_up(cfg, origin)
    streams = []
    if data is not None and run.progress.iteration < total:
        streams = data.open(run.progress.consumed_samples)
    reporter = Reporter(cfg, total)
    reporter.start(_start_row(run, origin, total))
    hooks = Hooks(streams, held_out, Saver(run, mark), _exporter(run), data)
    resumed = origin.kind == "checkpoint" and not origin.weights_only
    kept = resumed and origin.folder == Path(cfg.checkpoint.save or "")
    train(run, pretraining, hooks, reporter, saved_at=origin.iteration if kept else -1, started=started)
    reporter.close()


_OF_MEGATRON = ("per_rank", "megatron")
_FRESH = "these are weights to start from: the run begins at iteration 0 with a fresh optimizer"


def _set_up(cfg: RunConfig, origin: Origin) -> Run:
    folder = origin.folder
    if origin.kind == "hf" and folder is not None:
        return setup(cfg, lambda chunks: load_from_hf(cfg, folder, chunks))
    if origin.kind in _OF_MEGATRON and folder is not None:
        logger.info("%s is a save of Megatron-LM, of which the weights alone are read; %s", folder, _FRESH)
        return setup(cfg, lambda chunks: load_from_megatron(cfg, folder, chunks))
    run = setup(cfg)
    if origin.kind == "checkpoint" and folder is not None:
        load_checkpoint(run, folder, origin.iteration, weights_only=origin.weights_only)
        if origin.weights_only:
            logger.info(_FRESH)
    return run


def _exporter(run: Run):
    @phase("export")
    def export(last: bool) -> None:
        target = run.cfg.checkpoint.save_hf
        if target is not None:
            export_hf(run, Path(target) if last else Path(target) / f"iter_{run.progress.iteration:07d}")

    return export


def _start_row(run: Run, origin: Origin, total: int) -> dict[str, object]:
    parameters = torch.tensor(
        [sum(p.numel() for chunk in run.chunks for p in chunk.parameters())], device=current().torch_device
    )
    dist.all_reduce(parameters)
    return {
        "iteration": run.progress.iteration,
        "train_iters": total,
        "load": origin.kind,
        "world_size": dist.get_world_size(),
        "data_parallel_size": run.cfg.distributed.data_parallel_size,
        "parameters_held_by_all_ranks": int(parameters),
        "device": current().type,
        "versions": {
            "mindspeed_llm": mindspeed_llm.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "megatron-core")},
        },
    }
