"""Runs inside the ranks of the pool: logits and gradients of one large batch in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mindspeed_llm import api
from mindspeed_llm.core.groups import tensor_group
from mindspeed_llm.training.gradients import iter_gradients
from mindspeed_llm.training.objective import pretraining
from mindspeed_llm.training.step import train_step
from tests.parity.case import micro_batches
from tests.parity.layouts import training_values

from megatron.core.tensor_parallel.mappings import _gather_along_last_dim


def logits_and_gradients(folder: Path, layout: str, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """``logits [b, s, v]`` and each gradient by name, float32, of ``tokens [1, b, s + 1]``; the first rank's."""
    values = training_values(layout, tokens)
    run = api.load_hf(folder, bf16=True, **values)
    inputs = tokens[0, :, :-1]
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    with torch.no_grad():
        parts = run.chunks[0](inputs, positions, None)
    found = {"logits": _gather_along_last_dim(parts, tensor_group()).float()}

    def only_look() -> Any:
        found.update((name, gradient.float().clone()) for name, gradient in iter_gradients(run))
        return True, None, None

    run.optimizer.step = only_look  # type: ignore[method-assign]
    train_step(run, pretraining, [micro_batches(tokens, values["micro_batch_size"])])
    return found
