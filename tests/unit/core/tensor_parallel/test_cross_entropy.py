"""The loss on one rank against float64; tests/distributed/test_core.py splits the vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mindspeed_llm.core  # noqa: F401  the seam comes first
from mindspeed_llm.core.tensor_parallel import cross_entropy
from mindspeed_llm.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

VOCAB, PADDED = 37, 48
ROWS = 8
#: Half a unit in the last place of the dtype, times the largest gradient (1) and a little for float32 arithmetic.
GRADIENT = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[*shape, PADDED]``, targets and weights ``[*shape]``."""
    generator = torch.Generator().manual_seed(4)
    logits = scale * torch.randn(*shape, PADDED, generator=generator)
    target = torch.randint(0, VOCAB, shape, generator=generator)
    return logits.to(dtype), target, torch.rand(shape, generator=generator) + 0.5


def expected(logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradients in float64, over the true vocabulary."""
    wide = logits.detach().double()[..., :VOCAB].requires_grad_()
    loss = F.cross_entropy(wide.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    (gradient,) = torch.autograd.grad(loss, wide, weight.double())
    return loss, F.pad(gradient, (0, PADDED - VOCAB))


def check(logits: Tensor, target: Tensor, weight: Tensor) -> None:
    logits = logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, VOCAB)
    assert loss.dtype == torch.float32
    assert loss.shape == target.shape
    (gradient,) = torch.autograd.grad(loss, logits, weight)
    wanted, wanted_gradient = expected(logits, target, weight)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=2e-6)
    assert gradient.dtype == logits.dtype
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=0, atol=1.5 * GRADIENT[logits.dtype])
    assert (gradient[..., VOCAB:] == 0).all()


@pytest.mark.parametrize("dtype", GRADIENT, ids=str)
@pytest.mark.parametrize("rows", [1, 7, ROWS, ROWS + 1, 3 * ROWS - 5])
def test_values_and_gradients(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "BLOCK", ROWS * PADDED)
    check(*draw(rows, dtype=dtype))


def test_leading_dimensions_are_kept() -> None:
    check(*draw(5, 3))
    check(*draw(2, 5, 3))


def test_strided_logits() -> None:
    logits, target, weight = draw(5, 67)
    check(logits.transpose(0, 1), target.t(), weight.t())
    check(draw(9)[0].t().contiguous().t(), *draw(9)[1:])
    check(torch.cat([logits, logits], -1)[..., :PADDED], target, weight)


@pytest.mark.parametrize("filler", [0.0, 1e4, -1e4, torch.inf, -torch.inf, torch.nan], ids=str)
def test_padding_takes_no_probability_whatever_stands_there(filler: float) -> None:
    logits, target, weight = draw(300)
    logits[..., VOCAB:] = filler
    check(logits, target, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_logits_stay_finite(dtype: torch.dtype) -> None:
    logits, target, weight = draw(64, dtype=dtype, scale=1e4)
    logits[:16] += 1e4
    logits[0] = 1e4
    logits[1] = -1e4
    check(logits, target, weight)


def test_a_masked_token_does_not_move_its_logits() -> None:
    logits, target, weight = draw(10)
    weight[3] = 0.0
    loss = vocab_parallel_cross_entropy(logits.requires_grad_(), target, VOCAB)
    (gradient,) = torch.autograd.grad(loss, logits, weight)
    assert (gradient[3] == 0).all()
    assert (gradient[4] != 0).any()


def test_logits_are_not_changed() -> None:
    logits, target, weight = draw(300)
    kept = logits.clone()
    loss = vocab_parallel_cross_entropy(logits.requires_grad_(), target, VOCAB)
    torch.autograd.grad(loss, logits, weight)
    assert torch.equal(logits, kept)
