"""Adam against torch's own, and the layout of its state that megatron-core's wrappers count on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_llm.core.optimizer.adam import Adam

SHAPES = ((7,), (3, 5), (2, 3, 4), (1,), (257,))
STEPS = 20
GROUPS = (
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-5},
)


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]


def gradients(step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def groups(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:3], **GROUPS[0]}, {"params": params[3:], **GROUPS[1]}]


def run(optimizer: torch.optim.Optimizer, params: list[Tensor], steps: range) -> None:
    for step in steps:
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad
        for group in optimizer.param_groups:
            group["lr"] *= 0.95
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_twenty_steps_equal_torch(decoupled: bool) -> None:
    ours, theirs = parameters(), parameters()
    run(Adam(groups(ours), adam_w_mode=decoupled), ours, range(STEPS))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    run(kind(groups(theirs), foreach=False, fused=False), theirs, range(STEPS))
    for got, expected, start in zip(ours, theirs, parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        assert (got - start).abs().max() > 0.01


def test_defaults_are_torchs() -> None:
    ours, theirs = parameters(), parameters()
    run(Adam(ours, weight_decay=0.01), ours, range(3))
    run(torch.optim.AdamW(theirs), theirs, range(3))
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_the_two_modes_differ() -> None:
    ours, theirs = parameters(), parameters()
    run(Adam(ours, weight_decay=0.5), ours, range(3))
    run(Adam(theirs, weight_decay=0.5, adam_w_mode=False), theirs, range(3))
    assert not torch.allclose(ours[0], theirs[0], atol=1e-4)


def test_the_step_count_is_an_integer_of_the_group() -> None:
    params = parameters()
    optimizer = Adam(groups(params))
    run(optimizer, params, range(3))
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert all(type(group["step"]) is int for group in optimizer.param_groups)
    assert {tuple(sorted(state)) for state in optimizer.state.values()} == {("exp_avg", "exp_avg_sq")}
    assert all(state["exp_avg"].shape == param.shape for param, state in optimizer.state.items())


def test_state_dict_round_trip() -> None:
    straight = parameters()
    run(Adam(groups(straight)), straight, range(STEPS))

    half = parameters()
    first = Adam(groups(half))
    run(first, half, range(STEPS // 2))
    saved = copy.deepcopy(first.state_dict())
    resumed = [param.detach().clone().requires_grad_() for param in half]
    second = Adam([{"params": resumed[:3]}, {"params": resumed[3:]}])
    second.load_state_dict(saved)
    assert [group["step"] for group in second.param_groups] == [STEPS // 2] * 2
    run(second, resumed, range(STEPS // 2, STEPS))
    for got, expected in zip(resumed, straight, strict=True):
        assert torch.equal(got, expected)


def test_parameters_without_a_gradient_are_skipped() -> None:
    params = parameters()
    optimizer = Adam(groups(params))
    kept = params[1].detach().clone()
    params[0].grad = torch.ones(SHAPES[0])
    optimizer.step()
    assert torch.equal(params[1], kept)
    assert params[1] not in optimizer.state
    assert params[0] in optimizer.state
    # A group without any gradient counts its steps all the same, as Apex's does.
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_a_closure_is_refused() -> None:
    with pytest.raises(TypeError, match="closure"):
        Adam(parameters()).step(lambda: 0.0)
