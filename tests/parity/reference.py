"""What every layout is compared with: transformers, torch's AdamW and torch's gradient clipping."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from mindspeed_llm.models.registry import family_for
from tests.fixtures import ORACLE
from tests.oracles import ORACLES
from tests.parity.layouts import RECIPE

SEQUENCE = 32
GLOBAL_BATCH = 8
STEPS = 3
LOSS_LIMIT, NORM_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4, 1e-4
"""Relative differences in fp32; of a gradient the largest, over the reference's largest."""


@dataclass(frozen=True)
class Trace:
    """What a few steps gave.

    Attributes:
        losses: of each step, in nats.
        grad_norms: of each step, before clipping.
        errors: of the first step's gradients, as max|d| / max|reference|, by Hugging Face name; what this rank knows.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """A model, what it is fed, and what transformers makes of it.

    Attributes:
        folder: the Hugging Face folder.
        tokens: ``[steps, GLOBAL_BATCH, SEQUENCE + 1]`` ids.
        gradients: a safetensors file of the first step's gradients, before clipping, by parameter.
        names: the parameters in it.
    """

    folder: Path
    tokens: torch.Tensor
    trace: Trace
    gradients: Path
    names: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """One step of a layout beside the reference's; the worst parameter is known for the first step only."""

    step: int
    loss: float
    ref_loss: float
    loss_rel: float
    grad_norm: float
    ref_grad_norm: float
    grad_norm_rel: float
    worst_param: str | None
    worst_param_rel: float | None

    def faults(self) -> list[str]:
        """What is beyond its limit; a NaN is."""
        found = []
        for what, error, limit in (
            ("loss", self.loss_rel, LOSS_LIMIT),
            ("gradient norm", self.grad_norm_rel, NORM_LIMIT),
            (f"gradient of {self.worst_param}", self.worst_param_rel, GRADIENT_LIMIT),
        ):
            if error is not None and not error <= limit:
                found.append(f"step {self.step}: {what} is off by {error:.3g}, limit {limit:g}")
        return found


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model without dropout, every row of its embedding trained as Megatron trains them."""
    import transformers

    if (folder / ORACLE).exists():
        config = json.loads((folder / "config.json").read_text())
        model = ORACLES[family_for(config).name].build(config).to(dtype).eval()
        missing, unexpected = model.load_state_dict(load_file(folder / ORACLE), strict=False)
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        assert (set(missing), unexpected) == (tied, [])
        return model
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    # transformers gives the row of the padding token no gradient; here, the loss mask says what counts.
    model.get_input_embeddings().padding_idx = None  # pyright: ignore[reportArgumentType]
    return model


def token_batches(seed: int, vocab: int, steps: int = STEPS, batch: int = GLOBAL_BATCH) -> torch.Tensor:
    """``[steps, batch, SEQUENCE + 1]`` token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (steps, batch, SEQUENCE + 1), generator=generator)


def family_names(folder: Path, model: Any, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the parameters of ``model``, which :func:`load_model` made, under the names and in the layout of the
    folder."""
    if not (folder / ORACLE).exists():
        # transformers keeps all experts of a layer in one tensor, and writes each by itself.
        return revert_weight_conversion(model, dict(own))
    config = json.loads((folder / "config.json").read_text())
    return ORACLES[family_for(config).name].relay(own, config)


def mean_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of ``batch [b, s + 1]``."""
    logits = model(batch[:, :-1]).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(folder: Path, seed: int, gradients: Path) -> Reference:
    """Three steps of :data:`RECIPE` on whole global batches, in fp32 and one process."""
    model = load_model(folder)
    tokens = token_batches(seed, model.config.vocab_size)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # The biases of all experts of a layer are a matrix in transformers.
    decays = {name: p.ndim > 1 and not name.endswith("bias") for name, p in named.items()}
    groups = [
        {"params": [p for name, p in named.items() if decays[name]], "weight_decay": RECIPE["weight_decay"]},
        {"params": [p for name, p in named.items() if not decays[name]], "weight_decay": 0.0},
    ]
    betas = (RECIPE["adam_beta1"], RECIPE["adam_beta2"])
    optimizer = torch.optim.AdamW(groups, lr=RECIPE["lr"], betas=betas, eps=RECIPE["adam_eps"])
    trace, found = Trace(), {}
    for batch in tokens:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        if not trace.losses:
            found = family_names(folder, model, {name: p.grad for name, p in named.items() if p.grad is not None})
            save_file({name: gradient.contiguous() for name, gradient in found.items()}, gradients)
        norm = torch.nn.utils.clip_grad_norm_(itertools.chain(*(g["params"] for g in groups)), RECIPE["clip_grad"])
        optimizer.step()
        trace.losses.append(loss.item())
        trace.grad_norms.append(norm.item())
    return Reference(folder, tokens, trace, gradients, tuple(found))


def relative(value: float, reference: float) -> float:
    """|value - reference| / |reference|."""
    return abs(value - reference) / abs(reference)


def compare(ranks: Sequence[Trace], reference: Reference) -> list[Comparison]:
    """Each step's worst rank beside the reference; a parameter that no rank knows differs infinitely."""
    known: dict[str, float] = {}
    for rank in ranks:
        known |= rank.errors
    errors = {name: known.pop(name, float("inf")) for name in reference.names}
    worst = max(errors, key=lambda name: _worse(errors[name]))
    rows = []
    for step, (ref_loss, ref_norm) in enumerate(zip(reference.trace.losses, reference.trace.grad_norms, strict=True)):
        loss = max((rank.losses[step] for rank in ranks), key=lambda value: _worse(relative(value, ref_loss)))
        norm = max((rank.grad_norms[step] for rank in ranks), key=lambda value: _worse(relative(value, ref_norm)))
        rows.append(
            Comparison(
                step + 1,
                loss,
                ref_loss,
                relative(loss, ref_loss),
                norm,
                ref_norm,
                relative(norm, ref_norm),
                *((worst, errors[worst]) if step == 0 else (None, None)),
            )
        )
    return rows


def _worse(error: float) -> float:
    return float("inf") if error != error else error


def root_mean_square(errors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Of each tensor."""
    return {name: error.double().square().mean().sqrt().item() for name, error in errors.items()}
