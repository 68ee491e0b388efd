"""What the ranks run to show that the public functions work."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from mindspeed_llm import api
from mindspeed_llm.training.objective import pretraining
from mindspeed_llm.training.step import train_step
from tests.parity.case import micro_batches
from tests.parity.layouts import training_values
from tests.parity.reference import token_batches

Weights = dict[str, torch.Tensor]


def weights(run: api.Run) -> Weights:
    return {name: tensor.clone() for name, tensor in api.iter_hf_weights(run)}


def stream(folder: Path, layout: str, out: Path) -> tuple[Weights, Weights]:
    """The weights as loaded and, with reads between the steps, after two steps; exported then."""
    tokens = token_batches(5, 328, steps=2)
    run = api.load_hf(folder, **training_values(layout, tokens))
    before = weights(run)
    batches = [micro_batches(tokens, 1) for _ in run.chunks]
    for _ in tokens:
        train_step(run, pretraining, batches)
        after = weights(run)
    api.save_hf(run, out)
    return before, after


def train(folder: Path, out: Path) -> None:
    """Two steps on made-up data over two tensor-parallel ranks, from flags as in a YAML file."""
    api.train(
        {
            "load": str(folder),
            "save-hf": str(out),
            "tensor_model_parallel_size": 2,
            "mock-data": True,
            "tokenizer-type": "NullTokenizer",
            "seq-length": 16,
            "micro-batch-size": 1,
            "train-iters": 2,
            "eval-iters": 0,
            "lr": 1e-3,
        }
    )


def threads_after_runs(folder: Path, layout: str, runs: int) -> list[int]:
    """Threads of this process after each of several runs, whose variable the next one reuses."""
    counts = []
    for _ in range(runs):
        tokens = token_batches(5, 328, steps=1)
        run = api.load_hf(folder, **training_values(layout, tokens))
        train_step(run, pretraining, [micro_batches(tokens, 1) for _ in run.chunks])
        del run
        api.close()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts
