"""What every layout is compared with: transformers, torch's AdamW and torch's gradient clipping."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

VOCAB = 328  # a multiple of 8, so that no layout pads it at --make-vocab-size-divisible-by 1
SEQUENCE = 32
GLOBAL_BATCH = 8
STEPS = 3

RECIPE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "lr_decay_style": "constant",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Trace:
    """What three steps gave: per step the loss and the gradient norm, and the gradients of the first."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]


def token_batches(seed: int, vocab: int = VOCAB, steps: int = STEPS) -> torch.Tensor:
    """``[steps, GLOBAL_BATCH, SEQUENCE + 1]`` token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (steps, GLOBAL_BATCH, SEQUENCE + 1), generator=generator)


def write_model(folder: Path, architecture: str, config: dict[str, Any], seed: int = 0) -> Path:
    """A Hugging Face folder whose every weight is distinguishable: N(0, 0.05), norms 1 + N(0, 0.05)."""
    import transformers

    kind = architecture.removesuffix("ForCausalLM")
    model = getattr(transformers, architecture)(getattr(transformers, f"{kind}Config")(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(1.0 + drawn if "norm" in name else drawn)
    model.save_pretrained(folder)
    return folder


def train(folder: Path, batches: torch.Tensor) -> Trace:
    """Three steps of :data:`RECIPE` on the whole global batches, in fp32 and one process."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": RECIPE["weight_decay"]},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (RECIPE["adam_beta1"], RECIPE["adam_beta2"])
    optimizer = torch.optim.AdamW(groups, lr=RECIPE["lr"], betas=betas, eps=RECIPE["adam_eps"])
    trace = Trace([], [], {})
    for batch in batches:
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if not trace.losses:
            trace.gradients.update({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        norm = torch.nn.utils.clip_grad_norm_(itertools.chain(*(g["params"] for g in groups)), RECIPE["clip_grad"])
        optimizer.step()
        trace.losses.append(loss.item())
        trace.grad_norms.append(norm.item())
    return trace


def relative(value: float, reference: float) -> float:
    """|value - reference| / |reference|."""
    return abs(value - reference) / abs(reference)


def worst_gradient(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[str, float]:
    """The parameter whose gradient differs most, as max|d| / max|reference|; a missing one differs infinitely."""
    worst = ("", 0.0)
    for name, reference in wanted.items():
        if name in got:
            error = ((got[name].float() - reference).abs().max() / reference.abs().max()).item()
        else:
            error = float("inf")
        if not error <= worst[1]:
            worst = (name, error)
    return worst
