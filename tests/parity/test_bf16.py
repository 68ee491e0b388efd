"""In bf16 we stay as near to fp32 as transformers with the same policy: bf16 weights, gradients summed in fp32."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.layouts import THOROUGH, parse_layout
from tests.parity.reference import load_model, mean_loss, token_batches

#: The error of a bias is a few rounding events: its RMS over one batch varies by a third.
BATCHES, SEQUENCES, MICRO_BATCH = 3, 64, 16
LIMIT = 1.5
VOCAB = 328

Named = dict[str, torch.Tensor]


@functools.cache
def tokens() -> torch.Tensor:
    return token_batches(7, VOCAB, steps=BATCHES, batch=SEQUENCES)


@functools.cache
def transformers_says(folder: Path, dtype: torch.dtype) -> list[Named]:
    """For each batch, as :func:`tests.parity.case_bf16.logits_and_gradients`."""
    model = load_model(folder, dtype)
    named = dict(model.named_parameters())
    results = []
    for batch in tokens():
        found = {name: torch.zeros(p.shape) for name, p in named.items()}
        for part in batch.split(MICRO_BATCH):
            model.zero_grad()
            (mean_loss(model, part) * MICRO_BATCH / SEQUENCES).backward()
            for name, parameter in named.items():
                found[name] += parameter.grad.float()
        with torch.no_grad():
            found["logits"] = model(batch[:, :-1]).logits.float()
        results.append(found)
    return results


def distances(found: list[Named], exact: list[Named]) -> dict[str, float]:
    """RMS, up to the number of elements, of each tensor's error over all batches."""
    assert found[0].keys() == exact[0].keys()
    return {
        name: math.hypot(*((f[name] - e[name]).norm().item() for f, e in zip(found, exact, strict=True)))
        for name in exact[0]
    }


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen2", "one"), ("qwen2", "tp2"), ("qwen2 tied", "tp2+sp"), ("llama", "one"), ("llama", "tp2+sp")],
)
def test_error_is_at_most_that_of_transformers(pool: Pool, name: str, layout: str) -> None:
    folder = hf_folder(THOROUGH[name].name, VOCAB)
    world, _ = parse_layout(f"{layout}+mbs{MICRO_BATCH}")
    ours = [
        pool.run(
            "tests.parity.case_bf16:logits_and_gradients",
            world,
            timeout=100,
            folder=folder,
            layout=f"{layout}+mbs{MICRO_BATCH}",
            tokens=batch[None],
        )[0]
        for batch in tokens()
    ]
    exact = transformers_says(folder, torch.float32)
    mine, theirs = distances(ours, exact), distances(transformers_says(folder, torch.bfloat16), exact)
    ratios = sorted(((mine[tensor] / theirs[tensor], tensor) for tensor in mine), reverse=True)
    assert ratios[0][0] <= LIMIT, ratios[:8]
