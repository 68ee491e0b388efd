"""The loop: steps, and between them reports, evaluations, saves and the reasons to stop."""

from __future__ import annotations

import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.device import current
from mindspeed_llm.training.failure import phase
from mindspeed_llm.training.numbers import Generators, TrainingData, explain, weights_are_lost
from mindspeed_llm.training.objective import Batch, Objective
from mindspeed_llm.training.report import Reporter
from mindspeed_llm.training.save_load import Saver
from mindspeed_llm.training.state import Run
from mindspeed_llm.training.step import StepResult, evaluate, train_step

from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)

logger = logging.getLogger(__name__)

Streams = Sequence[Iterator[Batch]]
"""One stream of micro-batches per model chunk."""


@dataclass(frozen=True)
class Hooks:
    """What the loop calls and does not know: where batches come from and how a run is kept.

    Attributes:
        train: the training stream, from the run's consumed samples on.
        held_out: split name -> opens a stream from the split's first sample, so that every evaluation of a run, resumed
            or not, is over the same samples and its losses compare.
        saver: keeps the run.
        export: writes a Hugging Face folder; told whether the run ends here.
        data: reads the samples of ``train`` again, for the cause of numbers that are not finite.
    """

    train: Streams
    held_out: Mapping[str, Callable[[], Streams]]
    saver: Saver
    export: Callable[[bool], None]
    data: TrainingData | None = None


def total_iterations(cfg: RunConfig) -> int:
    """Steps of the whole run; with ``--train-samples`` as many whole batches as these make, each of its own size."""
    if cfg.training.train_iters is not None:
        return cfg.training.train_iters
    samples: int = cfg.training.train_samples  # pyright: ignore[reportAssignmentType]  a rule demands one of the two
    final: int = cfg.training.global_batch_size  # pyright: ignore[reportAssignmentType]  derived by now
    if cfg.training.rampup_batch_size is None:
        return samples // final
    steps = consumed = 0
    start, increment, ramp_samples = cfg.training.rampup_batch_size
    stages = (final - start) // increment
    while True:
        stage = int(consumed // (ramp_samples / stages)) if stages and consumed <= ramp_samples else stages
        consumed += min(start + stage * increment, final)
        if consumed > samples:
            break
        steps += 1
    return steps


class _StopSignal:
    """``--exit-signal`` asks for a save and an orderly end, with ``--exit-signal-handler``."""

    def __init__(self, cfg: RunConfig) -> None:
        self.received = False
        self.listen = cfg.training.exit_signal_handler
        if self.listen:
            signal.signal(signal.Signals[cfg.training.exit_signal], self._receive)

    def _receive(self, *_: Any) -> None:
        self.received = True

    def anywhere(self) -> bool:
        """Whether any rank received it. Collective."""
        if not self.listen:
            return False
        flag = torch.tensor([float(self.received)], device=current().torch_device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())


@phase("train")
def train(
    run: Run, objective: Objective, hooks: Hooks, reporter: Reporter, *, started: float, saved_at: int = -1
) -> None:
    """Train until ``--train-iters`` (or samples), or until a reason to stop; then save and export. Collective.

    Args:
        run: the run.
        objective: what a step computes.
        hooks: where batches come from and how the run is kept.
        reporter: what is told.
        started: when the run began, by ``time.monotonic``; ``--exit-duration-in-mins`` counts from there, since what
            limits a run counts what comes before the first step, too.
        saved_at: the iteration that the run was taken up from, if its save need not be written again.

    Raises:
        SuiteError: the loss or the gradient is not a number, with ``--check-for-nan-in-loss-and-grad``.
    """
    cfg, progress = run.cfg, run.progress
    total = total_iterations(cfg)
    stop = _StopSignal(cfg)
    if cfg.training.manual_gc:
        gc.disable()
        gc.collect()
    evaluated_at = -1
    stopping = cfg.training.skip_train
    while progress.iteration < total and not stopping:
        update_num_microbatches(progress.consumed_samples, consistency_check=True)
        batch, micro_batches = get_current_global_batch_size(), get_num_microbatches()
        with phase("train", step=progress.iteration + 1):
            result = _step(run, objective, hooks)
        _advance(run, result, batch)
        reporter.step(progress, result, batch, micro_batches)
        step = progress.iteration
        hooks.saver.poll()
        if _due(cfg.training.eval_interval, step):
            _evaluate(run, objective, hooks, reporter, "valid")
            evaluated_at = step
        stopping = _must_stop(cfg, step, started, stop)
        last = stopping or step >= total
        if not last and _due(cfg.checkpoint.save_interval, step):
            hooks.saver.save()
            saved_at = step
            reporter.resume_clock()
        elif not last and _due(cfg.checkpoint.non_persistent_save_interval, step):
            hooks.saver.save(persistent=False)
            reporter.resume_clock()
        if _due(cfg.checkpoint.save_hf_interval, step):
            hooks.export(False)
            reporter.resume_clock()
        if cfg.training.manual_gc and _due(cfg.training.manual_gc_interval or None, step):
            gc.collect()
    hooks.saver.finish()
    if not cfg.training.skip_train:
        if saved_at != progress.iteration:
            hooks.saver.save(last=True)
        hooks.export(True)
    if cfg.training.skip_train or progress.iteration >= total > 0:
        if evaluated_at != progress.iteration:
            _evaluate(run, objective, hooks, reporter, "valid")
        _evaluate(run, objective, hooks, reporter, "test")


def _due(interval: int | None, iteration: int) -> bool:
    return bool(interval) and iteration % interval == 0  # pyright: ignore[reportOptionalOperand]


def _step(run: Run, objective: Objective, hooks: Hooks) -> StepResult:
    generators = Generators.now()
    result = train_step(run, objective, hooks.train)
    # A dynamic loss scale skips what overflows; but it would skip every step that is left once weights are bad.
    dynamic = run.cfg.optimizer.loss_scale is None
    if dynamic and result.skipped and not math.isfinite(result.loss) and weights_are_lost(run):
        result = replace(result, bad="loss")
    if result.bad is not None:
        raise explain(run, objective, hooks.data, generators, result)
    return result


def _advance(run: Run, result: StepResult, batch: int) -> None:
    progress = run.progress
    progress.iteration += 1
    progress.consumed_samples += batch
    progress.consumed_tokens += batch * run.cfg.training.seq_length  # pyright: ignore[reportOperatorIssue]
    progress.skipped += result.skipped
    if not math.isfinite(result.loss):
        progress.nan += 1
    elif not result.skipped:
        progress.take_loss(result.loss)


def _must_stop(cfg: RunConfig, iteration: int, started: float, stop: _StopSignal) -> bool:
    """Whether all ranks leave after this iteration, and says why. Collective."""
    limit, reason = cfg.training.exit_duration_in_mins, None
    if _due(cfg.training.exit_interval, iteration):
        reason = f"--exit-interval {cfg.training.exit_interval}"
    elif limit is not None:
        over = torch.tensor([float(time.monotonic() - started > 60 * limit)], device=current().torch_device)
        dist.all_reduce(over, dist.ReduceOp.MAX)
        reason = f"--exit-duration-in-mins {limit}" if over.item() else None
    if reason is None and stop.anywhere():
        reason = f"{cfg.training.exit_signal} was received"
    if reason is not None:
        logger.info("leaving after iteration %d: %s", iteration, reason)
    return reason is not None


@phase("evaluate")
def _evaluate(run: Run, objective: Objective, hooks: Hooks, reporter: Reporter, split: str) -> None:
    iterations = run.cfg.training.eval_iters
    if split in hooks.held_out and iterations > 0:
        reporter.valid(run.progress, evaluate(run, objective, hooks.held_out[split](), iterations), split)
    reporter.resume_clock()
