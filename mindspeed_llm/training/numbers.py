"""Where a number that is not finite came from, found after the fact: no step is slower for it.

When the loss or the gradient of a step is not finite, the step is repeated under observation, from the same samples and
the same random numbers. Every rank notes the first module whose output, or parameter whose gradient, is not finite;
together they tell which of these was first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from mindspeed_llm.checkpoint.engine import global_name, unwrap
from mindspeed_llm.core.groups import pipeline_group, tensor_group
from mindspeed_llm.device import current
from mindspeed_llm.errors import SuiteError
from mindspeed_llm.training.objective import Batch, Objective
from mindspeed_llm.training.state import Run
from mindspeed_llm.training.step import StepResult, clear_gradients, forward_backward

from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

SHOWN = 8
"""Ranks whose own findings an error lists."""


@dataclass(frozen=True)
class TrainingData:
    """How a run reads its samples, the first time and again.

    Attributes:
        open: opens the training stream from a number of consumed samples on.
        sample_numbers: numbers in the dataset of the samples that this rank reads from there on, for each of so many
            micro-batches; nothing on a rank that reads none.
    """

    open: Callable[[int], Sequence[Iterator[Batch]]]
    sample_numbers: Callable[[int, int], list[list[int]]]


@dataclass(frozen=True)
class Generators:
    """States of the random generators that a step draws from."""

    default: torch.Tensor
    tracked: dict[str, torch.Tensor]

    @classmethod
    def now(cls) -> Generators:
        """As they are, for the price of a copy of a few kilobytes."""
        return cls(torch.get_rng_state(), dict(_tracker().get_states()))

    def restore(self) -> None:
        """Draw again what was drawn since."""
        torch.set_rng_state(self.default)
        _tracker().set_states(dict(self.tracked))


def _tracker() -> CudaRNGStatesTracker:
    return cast(CudaRNGStatesTracker, tensor_parallel.get_cuda_rng_tracker())


@dataclass(frozen=True)
class Event:
    """The first thing on a rank that was not finite.

    Attributes:
        what: ``output``; ``input``, if what came from outside the modules of this rank was bad already; ``gradient``.
        module: its name in the whole model; empty for the model itself, whose output is the loss.
        parameter: whose gradient it is.
        micro_batch: counted from 0; None if it showed after all of them.
        depth: chunks and stages that the data had passed before.
    """

    what: str
    module: str
    parameter: str | None = None
    micro_batch: int | None = None
    depth: int = 0

    def __str__(self) -> str:
        place = f" in micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        if self.what == "gradient":
            return f"first bad gradient: {self.parameter}{place}"
        return f"first bad {self.what}: {self.module or 'the loss itself'}{place}"


@dataclass(frozen=True)
class Finding:
    """What one rank found.

    Attributes:
        rank: of the world.
        stage, tensor, data: its pipeline, tensor- and data-parallel rank.
        weights: names of its parameters that hold values which are not finite.
        event: the first thing that was not finite in this step.
        repeated: the event was seen when the step was repeated.
        samples: numbers of the samples of each micro-batch of its data-parallel rank; empty if it reads none.
    """

    rank: int
    stage: int
    tensor: int
    data: int
    weights: tuple[str, ...]
    event: Event | None
    repeated: bool
    samples: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        where = f"rank {self.rank} (pipeline {self.stage}, tensor {self.tensor}, data {self.data})"
        weights = f"{len(self.weights)} weights are bad, first {self.weights[0]}" if self.weights else "weights finite"
        return f"{where}: {self.event or 'nothing bad seen'}; {weights}"


def explain(
    run: Run, objective: Objective, data: TrainingData | None, generators: Generators, result: StepResult
) -> SuiteError:
    """The error that ends a run whose step gave ``result``, the same on every rank. Collective.

    Args:
        run: as it was before the step.
        objective: what the step computed.
        data: how to read its samples again; without, the step cannot be repeated.
        generators: as they were before the step.
        result: of the step; ``bad`` is set.
    """
    gradient = result.bad == "gradient"
    count = get_num_microbatches()
    samples: list[list[int]] = []
    event = _scan(run) if gradient else None
    repeated = False
    if data is not None:
        samples = data.sample_numbers(run.progress.consumed_samples, count)
        generators.restore()
        seen = _repeat(run, objective, data.open(run.progress.consumed_samples), count, backward=gradient)
        repeated = seen is not None
        event = seen or event
    own = Finding(
        dist.get_rank(),
        pipeline_group().rank(),
        tensor_group().rank(),
        parallel_state.get_data_parallel_rank(),
        tuple(_bad_weights(run)),
        event,
        repeated,
        tuple(map(tuple, samples)),
    )
    findings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, own)
    return _error(run.progress.iteration + 1, result, cast(list[Finding], findings))


def weights_are_lost(run: Run) -> bool:
    """Whether any rank holds a weight that is not finite, which no loss scale can mend. Collective."""
    flag = torch.tensor([float(bool(_bad_weights(run)))], device=current().torch_device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


# ------------------------------------------------------------------------------------------------------------ on a rank


def _any_bad(values: Any) -> bool:
    """Whether a tensor, or one of several, holds a value that is not finite."""
    if isinstance(values, Mapping):
        return any(map(_any_bad, values.values()))
    if isinstance(values, (list, tuple)):
        return any(map(_any_bad, values))
    return isinstance(values, torch.Tensor) and values.is_floating_point() and not values.isfinite().all()


def _is_bad_gradient(gradient: torch.Tensor) -> bool:
    """Whether the norm is not finite, which it also is where finite values are too large for it."""
    return not torch.linalg.vector_norm(gradient, dtype=torch.float32).isfinite()


def _bad_weights(run: Run) -> list[str]:
    models = map(unwrap, run.chunks)
    return [
        global_name(model, name) for model in models for name, p in model.named_parameters() if not p.isfinite().all()
    ]


def _scan(run: Run) -> Event | None:
    """The last parameter of the model whose summed gradient is bad: backward came there first, about."""
    for depth, model in reversed(_placed(run)):
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.requires_grad and _is_bad_gradient(cast(Any, parameter).main_grad):
                full = global_name(model, name)
                return Event("gradient", full.rpartition(".")[0], full, None, depth)
    return None


def _placed(run: Run) -> list[tuple[int, torch.nn.Module]]:
    """Bare chunks of this rank, each with the number of chunks that data passes before it."""
    stages, stage = pipeline_group().size(), pipeline_group().rank()
    return [(index * stages + stage, unwrap(chunk)) for index, chunk in enumerate(run.chunks)]


def _repeat(
    run: Run, objective: Objective, batches: Sequence[Iterator[Batch]], count: int, *, backward: bool
) -> Event | None:
    """The step again; what was bad first. Collective."""
    seen: list[Event] = []
    watches = [_Watch(model, depth, seen) for depth, model in _placed(run)]
    clear_gradients(run)
    for watch in watches:
        watch.modules()
        if backward:
            watch.gradients()
    forward_backward(run, objective, batches, count, train=backward)
    for watch in watches:
        watch.end()
    return seen[0] if seen else None


class _Watch:
    """Notes the first thing that is bad in one chunk, in the order of computation: inner modules end before outer ones.

    Args:
        model: the bare chunk.
        depth: chunks and stages before it.
        seen: of all chunks of this rank; an event is noted only if it is the first.
    """

    def __init__(self, model: torch.nn.Module, depth: int, seen: list[Event]) -> None:
        self.model, self.depth, self.seen = model, depth, seen
        self.micro_batch = -1
        self.handles: list[Any] = []

    def modules(self) -> None:
        """Watch what goes into and comes out of each module."""
        for name, module in self.model.named_modules():
            full = global_name(self.model, name)
            self.handles += [
                module.register_forward_pre_hook(partial(self._before, full), with_kwargs=True),
                module.register_forward_hook(partial(self._after, full)),
            ]

    def gradients(self) -> None:
        """Watch the gradient of each parameter, of each micro-batch before they are summed."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                full = global_name(self.model, name)
                self.handles.append(parameter.register_hook(partial(self._on_gradient, full, itertools.count())))

    def end(self) -> None:
        """Watch no more."""
        for handle in self.handles:
            handle.remove()

    def _before(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        self.micro_batch += module is self.model
        if not self.seen and (_any_bad(args) or _any_bad(kwargs)):
            self.seen.append(Event("input", name, None, self.micro_batch, self.depth))

    def _after(self, name: str, _module: Any, _args: Any, output: Any) -> None:
        if not self.seen and _any_bad(output):
            self.seen.append(Event("output", name, None, self.micro_batch, self.depth))

    def _on_gradient(self, name: str, passes: Iterator[int], gradient: torch.Tensor) -> None:
        micro_batch = next(passes)
        if not self.seen and _is_bad_gradient(gradient):
            self.seen.append(Event("gradient", name.rpartition(".")[0], name, micro_batch, self.depth))


# -------------------------------------------------------------------------------------------------------- of all ranks


def _first(findings: Sequence[Finding]) -> Finding | None:
    """The rank where it began: forward the earliest stage, backward the latest, before those that were handed it."""

    def order(finding: Finding) -> tuple[float, ...]:
        event = finding.event
        if event is None:
            return (2,)
        micro_batch = math.inf if event.micro_batch is None else event.micro_batch
        depth = -event.depth if event.what == "gradient" else event.depth
        return event.what == "input", not finding.repeated, micro_batch, depth, not finding.weights, finding.rank

    found = [finding for finding in findings if finding.event is not None or finding.weights]
    return min(found, key=order) if found else None


def _suspects(first: Finding, findings: Sequence[Finding]) -> tuple[list[int], list[int]]:
    """Ranks where it began and numbers of the samples it may have begun with.

    Unless it was seen again, micro-batches and data-parallel ranks cannot be told apart: their gradients are summed.
    """
    if not first.repeated:
        ranks = [finding.rank for finding in findings if finding.event == first.event]
        return ranks, sorted({number for finding in findings for part in finding.samples for number in part})
    # A stage that reads nothing works on the samples of its data-parallel rank.
    parts = next((other.samples for other in findings if other.data == first.data and other.samples), ())
    number = None if first.event is None else first.event.micro_batch
    chosen = parts if number is None else parts[number : number + 1]
    return [first.rank], [one for part in chosen for one in part]


def _parameter(finding: Finding) -> str | None:
    """The parameter to look at: the one with the bad gradient, or a bad weight, of the module if it has one."""
    event = finding.event
    if event is not None and event.parameter is not None:
        return event.parameter
    prefix = "" if event is None or not event.module else event.module + "."
    return next((name for name in finding.weights if name.startswith(prefix)), next(iter(finding.weights), None))


def _error(iteration: int, result: StepResult, findings: Sequence[Finding]) -> SuiteError:
    value = result.loss if result.bad == "loss" else result.grad_norm
    what = f"the {result.bad} of iteration {iteration} is not a number"
    first = _first(findings)
    lines = [str(value)]
    if first is None:
        lines.append(
            "all weights are finite, and it did not happen again when the step was repeated: "
            "the hardware, or an op whose results vary"
        )
        everything = sorted({number for finding in findings for part in finding.samples for number in part})
        what += f": no module or parameter found, samples {_numbers(everything)}"
    else:
        event = first.event
        ranks, numbers = _suspects(first, findings)
        what += f": {'rank' if len(ranks) == 1 else 'ranks'} {_numbers(ranks)}"
        what += f", module {(event and event.module) or 'unknown'}"
        what += f", parameter {_parameter(first) or 'none (all weights are finite)'}, samples {_numbers(numbers)}"
        telling = [finding for finding in findings if finding.event is not None or finding.weights]
        lines += [str(finding) for finding in telling[:SHOWN]]
        if len(telling) > SHOWN:
            lines.append(f"and {len(telling) - SHOWN} more ranks")
        if first.event is not None and not first.repeated:
            lines.append("it did not happen again when the step was repeated")
    return SuiteError(
        what,
        got="\n    ".join(lines),
        fix="resume from the last save with a lower --lr, or look at the samples with "
        "python -m mindspeed_llm.tools.samples; --no-check-for-nan-in-loss-and-grad goes on regardless",
    )


def _numbers(numbers: Sequence[int]) -> str:
    shown = " ".join(map(str, numbers[:64])) or "unknown"
    return shown + (f" and {len(numbers) - 64} more" if len(numbers) > 64 else "")
