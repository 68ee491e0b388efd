"""Losses that balance experts, their gradients and the experts' bias: closed forms, in one process and in layouts."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.layouts import parse_layout
from tests.parity.reference import load_model, mean_loss, relative, token_batches

KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
WEIGHTS = (0.3, 0.2, 0.5)
Z_WEIGHT = 0.05
FLAGS: dict[str, Any] = {
    "moe_router_load_balancing_type": KINDS,
    "moe_aux_loss_coeff": WEIGHTS,
    "moe_z_loss_coeff": Z_WEIGHT,
    "moe_per_layer_logging": True,
}
TOPK = 2


@functools.cache
def tokens() -> torch.Tensor:
    return token_batches(3, 328, steps=1, batch=4)[0]


def balance(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """``E sum_i f_i P_i`` [Fedus et al. 2021, equations 4 to 6] of scores ``[tokens, E]`` and the experts' shares."""
    return scores.shape[1] * (shares * scores.mean(0)).sum()


def load(scores: torch.Tensor) -> torch.Tensor:
    """Each expert's share of the choices."""
    chosen = scores.topk(TOPK).indices.flatten()
    return chosen.bincount(minlength=scores.shape[1]) / chosen.numel()


def layer_losses(logits: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """The losses of a layer's router.

    Args:
        logits: ``[sequences, s, experts]``.
        size: sequences of a micro-batch.
    """
    scores = logits.softmax(-1)
    parts, flat = scores.split(size), scores.flatten(0, 1)
    return {
        "load_balancing_loss": torch.stack([balance(p.flatten(0, 1), load(p.flatten(0, 1))) for p in parts]).mean(),
        "seq_load_balancing_loss": torch.stack([balance(one, load(one)) for one in scores]).mean(),
        # All micro-batches are in flight at once here: what is shared is the load of the whole batch.
        "global_load_balancing_loss": balance(flat, load(flat)),
        # Zoph et al. 2022, equation 5.
        "z_loss": logits.logsumexp(-1).square().mean(),
    }


@functools.cache
def wanted(folder: Path, size: int) -> tuple[float, dict[str, tuple[float, ...]], dict[str, torch.Tensor]]:
    """transformers' loss, each layer's losses by the formulas, and autograd's gradients of the routers."""
    model = load_model(folder)
    gates = {name: module for name, module in model.named_modules() if name.endswith(".gate")}
    inputs: dict[str, torch.Tensor] = {}
    hooks = [
        gate.register_forward_pre_hook(lambda _m, given, name=name: inputs.__setitem__(name, given[0]))
        for name, gate in gates.items()
    ]
    loss = total = mean_loss(model, tokens())
    by_layer: list[dict[str, torch.Tensor]] = []
    for name, gate in gates.items():
        logits = F.linear(inputs[name], gate.weight).view(*tokens()[:, 1:].shape, -1)
        by_layer.append(layer_losses(logits, size))
    for weight, name in zip((*WEIGHTS, Z_WEIGHT), by_layer[0], strict=True):
        total = total + weight * sum(layer[name] for layer in by_layer)
    total.backward()
    for hook in hooks:
        hook.remove()
    names = {name: name.replace(".mlp.", ".block_sparse_moe.") for name in gates}
    gradients = {f"{names[name]}.weight": gate.weight.grad for name, gate in gates.items()}
    losses = {name: tuple(float(layer[name].detach()) for layer in by_layer) for name in by_layer[0]}
    return float(loss.detach()), losses, gradients


# The global loss follows the load so far: only with one micro-batch of all replicas has it one value.
@pytest.mark.parametrize(
    "layout",
    ["one+mbs4", "dp2+mbs2", "dp2+ep2+mbs2+alltoall+dist", "dp4+ep4+reduce", "tp2+sp+mbs4", "tp2+sp+dp2+ep2+etp1+mbs2",
     "pp2+mbs4"],
)  # fmt: skip
def test_losses_and_gradients(pool: Pool, layout: str) -> None:
    folder = hf_folder("mixtral")
    world, values = parse_layout(layout)
    loss, losses, gradients = wanted(folder, values.get("micro_batch_size", 1))
    given = {"folder": folder, "layout": layout, "tokens": tokens(), "flags": FLAGS}
    ranks = pool.run("tests.distributed.cases_routing:one_step", world, timeout=60, **given)
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        found |= rank["gradients"]
        assert relative(rank["loss"], loss) <= 1e-5
        routing = rank["routing"]
        assert routing.layers == (0, 1, 2, 3)
        assert routing.losses.keys() == losses.keys()
        for name, layers in losses.items():
            assert routing.losses[name] == pytest.approx(layers, rel=1e-5), name
        assert [sum(row) for row in routing.tokens] == [TOPK * tokens()[:, 1:].numel()] * 4
        assert routing.dropped == (0,) * 4
        shares = torch.tensor(routing.tokens, dtype=torch.float64) / sum(routing.tokens[0])
        assert routing.entropy == pytest.approx((-shares * shares.log()).sum(1).tolist(), rel=1e-12)
    assert found.keys() == gradients.keys()
    errors = {name: float((found[name] - one).abs().max() / one.abs().max()) for name, one in gradients.items()}
    assert max(errors.values()) <= 1e-4, errors


@pytest.mark.parametrize("padded", [False, True])
def test_what_is_beyond_the_capacity_is_dropped(pool: Pool, padded: bool) -> None:
    folder = hf_folder("mixtral")
    model, seen = load_model(folder), []
    gate = next(module for name, module in model.named_modules() if name.endswith(".gate"))
    gate.register_forward_pre_hook(lambda _m, given: seen.append(given[0] @ gate.weight.t()))
    mean_loss(model, tokens())
    choices = TOPK * tokens()[:, 1:].numel()
    capacity = math.ceil(choices / 4 * 0.75)
    kept = [min(round(float(share) * choices), capacity) for share in load(seen[0].flatten(0, -2))]
    flags = {"moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": padded, **FLAGS}
    given = {"folder": folder, "layout": "one+mbs4", "tokens": tokens(), "flags": flags}
    (rank,) = pool.run("tests.distributed.cases_routing:one_step", 1, timeout=60, **given)
    assert rank["routing"].tokens[0] == tuple(kept)
    assert rank["routing"].dropped[0] == pytest.approx(1 - sum(kept) / choices)
    assert rank["routing"].dropped[0] > 0


@pytest.mark.parametrize("layout", ["one", "dp2+ep2+alltoall", "tp2+sp+dp2+ep2+dist"])
def test_the_bias_follows_the_load(pool: Pool, layout: str) -> None:
    """16 tokens choose among 16 experts, so that some get none: their gradients are zero, and nothing waits."""
    world, _ = parse_layout(layout)
    batches = torch.randint(0, 64, (3, 2, 9), generator=torch.Generator().manual_seed(1))
    given = {"layout": layout, "tokens": batches, "experts": 16, "topk": 1}
    ranks = pool.run("tests.distributed.cases_routing:biased", world, timeout=60, **given)
    for rank in ranks:
        for step in range(3):
            assert torch.equal(rank["biases"][step], rank["wanted"][step])
            assert torch.equal(rank["biases"][step], ranks[0]["biases"][step])
            assert rank["tokens"][step] == tuple(map(tuple, rank["counts"][step].tolist()))
            assert set(rank["unused"][step].values()) <= {0.0}
    assert any(rank["unused"][step] for rank in ranks for step in range(3))
