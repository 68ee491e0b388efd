"""One training step and one evaluation, the same for every kind of training."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from mindspeed_llm.core.groups import data_group, pipeline_group
from mindspeed_llm.device import current
from mindspeed_llm.training import routing
from mindspeed_llm.training.failure import phase
from mindspeed_llm.training.objective import Batch, Objective
from mindspeed_llm.training.state import Run

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_micro_batch_size, get_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What a step reports, the same on every rank.

    Attributes:
        loss: mean over the global batch's unmasked tokens, in nats.
        tokens: unmasked tokens.
        grad_norm: global L2 norm before clipping; NaN when the step was skipped.
        learning_rate: that the step used.
        weight_decay: that the step used.
        loss_scale: that the step used; 1 without fp16.
        skipped: the weights were not updated.
        zeros: zeros in the global gradient, with ``--log-num-zeros-in-grad``.
        bad: what is not a finite number and stops the run; the weights are as they were before the step.
        routing: how its tokens were shared between experts, if that is known.
    """

    loss: float
    tokens: int
    grad_norm: float
    learning_rate: float
    weight_decay: float
    loss_scale: float
    skipped: bool
    zeros: int | None = None
    bad: Literal["loss", "gradient"] | None = None
    routing: routing.Routing | None = None


@dataclass(frozen=True)
class _Update:
    """What became of the gradient of a step."""

    done: bool
    grad_norm: float = math.nan
    zeros: int | None = None
    bad: Literal["loss", "gradient"] | None = None


class _NotFinite(Exception):
    """The gradient's norm, before anything was made of it."""


def forward_backward(
    run: Run, objective: Objective, batches: Sequence[Iterator[Batch]], micro_batches: int, *, train: bool
) -> list[Any]:
    """Micro-batches through megatron-core's schedule of this layout; their reports on the last stage.

    Args:
        run: the run.
        objective: what to compute.
        batches: one iterator of micro-batches per model chunk.
        micro_batches: how many to take.
        train: also backward, into gradients that :func:`clear_gradients` emptied.
    """
    interleaved = len(run.chunks) > 1
    length: int = run.cfg.training.seq_length  # pyright: ignore[reportAssignmentType]  a rule demands it
    return get_forward_backward_func()(
        forward_step_func=objective,
        data_iterator=list(batches) if interleaved else batches[0],  # pyright: ignore[reportArgumentType]
        model=run.chunks if interleaved else run.chunks[0],
        num_microbatches=micro_batches,
        seq_length=length,
        micro_batch_size=get_micro_batch_size(),
        decoder_seq_length=length,
        forward_only=not train,
    )


def _mean_loss(reports: list[dict[str, torch.Tensor]]) -> tuple[float, int]:
    """Loss and token count over all micro-batches and data-parallel ranks; known to the last stage, told to all."""
    total = torch.zeros(2, dtype=torch.float64, device=current().torch_device)
    if reports:
        total += torch.stack([report["lm loss"] for report in reports]).sum(0)
        dist.all_reduce(total, group=data_group())
    stages = pipeline_group()
    if stages.size() > 1:
        dist.broadcast(total, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=stages)
    loss, count = total.tolist()
    return loss / max(count, 1.0), int(count)


def train_step(run: Run, objective: Objective, batches: Sequence[Iterator[Batch]]) -> StepResult:
    """Forward, backward, reduce, clip, update.

    Args:
        run: the run; its optimizer and scheduler move on.
        objective: what to compute.
        batches: one iterator of micro-batches per model chunk.
    """
    clear_gradients(run)
    micro_batches = get_num_microbatches()
    reports = forward_backward(run, objective, batches, micro_batches, train=True)
    loss, tokens = _mean_loss(reports)
    routed = routing.finish(run.cfg, run.counts, micro_batches)
    loss_scale = float(run.optimizer.get_loss_scale().item())
    learning_rate = get_canonical_lr_for_logging(run.optimizer.param_groups) or 0.0
    weight_decay = max((group["weight_decay"] for group in run.optimizer.param_groups), default=0.0)
    update = _update(run, loss)
    if update.done:
        data_parallel = parallel_state.get_data_parallel_world_size()
        run.scheduler.step(increment=micro_batches * get_micro_batch_size() * data_parallel)
    return StepResult(
        loss=loss,
        tokens=tokens,
        grad_norm=update.grad_norm,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        loss_scale=loss_scale,
        skipped=not update.done,
        zeros=update.zeros,
        bad=update.bad,
        routing=routed,
    )


def clear_gradients(run: Run) -> None:
    """Zero gradients, and counts of nothing, from which a step begins."""
    routing.begin(run.counts)
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()


@phase("optimizer")
def _update(run: Run, loss: float) -> _Update:
    """Clip and update, unless the loss or the gradient says that it must not be. Collective."""
    if run.cfg.training.check_for_nan_in_loss and not math.isfinite(loss):
        return _Update(done=False, bad="loss")
    if _is_spike(run, loss):
        return _Update(done=False)
    check = run.cfg.ddp.check_for_nan_in_grad
    optimizer: Any = run.optimizer
    norm_of = optimizer.get_grad_norm

    def checked_norm() -> float:
        norm = norm_of()
        if check and not math.isfinite(norm):
            raise _NotFinite
        return norm

    # megatron-core clips and updates in one call; to stop it in between spares a second norm in every step, and leaves
    # weights in which the cause can be looked for.
    optimizer.get_grad_norm = checked_norm
    try:
        done, norm, zeros = optimizer.step()
    except _NotFinite:
        return _Update(done=False, bad="gradient")
    finally:
        del optimizer.get_grad_norm
    if check and not done:
        # A loss scale that is fixed cannot get out of the way of an overflow.
        return _Update(done=False, bad="gradient")
    return _Update(done, math.nan if norm is None else float(norm), None if zeros is None else int(zeros))


def _is_spike(run: Run, loss: float) -> bool:
    """Whether the step is to be skipped for its loss, under ``--loss-spike-factor``. Collective, if that is set."""
    factor, progress = run.cfg.training.loss_spike_factor, run.progress
    if factor is None:
        return False
    limit = factor * progress.loss_mean
    here = progress.losses > 0 and math.isfinite(loss) and loss > limit
    # All ranks compare the same numbers; but one that rounded another way would part from the others for good.
    flag = torch.tensor([float(here)], device=current().torch_device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    if flag.item() and dist.get_rank() == 0:
        logger.warning(
            "iteration %d is skipped: its loss %.6g is above %.6g, %g times the running mean",
            progress.iteration + 1, loss, limit, factor,
        )  # fmt: skip
    return bool(flag.item())


@torch.no_grad()
def evaluate(run: Run, objective: Objective, batches: Sequence[Iterator[Batch]], iterations: int) -> float:
    """Mean loss over ``iterations`` full global batches, without dropout and without touching the weights.

    A ramp-up of the batch size does not count, so that all evaluations of a run are over the same samples.
    """
    batch: int = run.cfg.training.global_batch_size  # pyright: ignore[reportAssignmentType]  derived by now
    micro_batches = batch // (get_micro_batch_size() * parallel_state.get_data_parallel_world_size())
    for chunk in run.chunks:
        chunk.eval()
    reports: list[dict[str, torch.Tensor]] = []
    for _ in range(iterations):
        reports += forward_backward(run, objective, batches, micro_batches, train=False)
    for chunk in run.chunks:
        chunk.train()
    return _mean_loss(reports)[0]
