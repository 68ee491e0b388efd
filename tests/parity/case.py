"""Runs inside the ranks of the pool: three training steps of a Hugging Face folder in some layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

from mindspeed_llm import api
from mindspeed_llm.tools.compare import run_ours
from mindspeed_llm.training.gradients import iter_gradients
from mindspeed_llm.training.objective import Batch, pretraining
from mindspeed_llm.training.step import train_step
from tests.parity.layouts import training_values
from tests.parity.reference import Reference, Trace


def micro_batches(tokens: torch.Tensor, size: int) -> Iterator[Batch]:
    """This data-parallel rank's micro-batches of ``tokens [steps, batch, s + 1]``."""
    for batch in tokens:
        yield from run_ours.micro_batches(batch, size)


def gradient_errors(run: api.Run, file: str) -> dict[str, float]:
    """max|d| / max|reference| of each gradient that this rank gets, against those in ``file``."""
    errors: dict[str, float] = {}
    with safe_open(file, framework="pt") as references:
        for name, gradient in iter_gradients(run):
            reference = references.get_tensor(name)
            errors[name] = ((gradient - reference).abs().max() / reference.abs().max()).item()
    return errors


def train(reference: Reference, layout: str) -> Trace:
    """Losses, gradient norms, and what this rank knows of the first step's gradients."""
    values = training_values(layout, reference.tokens)
    run = api.load_hf(reference.folder, **values)
    trace = Trace()
    step = run.optimizer.step

    def compare_then_step() -> Any:
        if not trace.losses:
            trace.errors.update(gradient_errors(run, str(reference.gradients)))
        return step()

    run.optimizer.step = compare_then_step  # type: ignore[method-assign]
    batches = [micro_batches(reference.tokens, values["micro_batch_size"]) for _ in run.chunks]
    for _ in reference.tokens:
        result = train_step(run, pretraining, batches)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
    return trace
