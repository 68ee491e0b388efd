"""RMS norm: every implementation and instruction set against float64, and against transformers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mindspeed_llm.ops import cpu_kernels
from mindspeed_llm.ops.rms_norm import SPEC, cpu, reference

EPS = 1e-6
built = pytest.mark.skipif(cpu_kernels.unavailable() is not None, reason=str(cpu_kernels.unavailable()))
LEVELS = () if cpu_kernels.unavailable() else range(cpu_kernels.best_level() + 1)
SHAPES = [(64, 256), (3, 1), (5, 7), (4, 33), (2, 3, 100), (300, 515), (0, 16), (2, 0, 5), (40,)]

Gradients = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def by_autograd(norm: Callable[[Tensor, Tensor, float], Tensor]) -> Gradients:
    """``(x, weight, dy)`` to ``(y, dx, dw)``."""

    def run(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = norm(x, weight, EPS)
        dx, dw = torch.autograd.grad(y, (x, weight), dy)
        return y.detach(), dx, dw

    return run


def by_level(level: int) -> Gradients:
    def run(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, rstd = cpu.forward(x, weight, EPS, level)
        return (y, *cpu.backward(dy, x, weight, rstd, level))

    return run


IMPLEMENTATIONS = [
    pytest.param(by_autograd(reference.rms_norm), id="reference"),
    pytest.param(by_autograd(cpu.rms_norm), id="cpp", marks=built),
    *(pytest.param(by_level(level), id=cpu_kernels.LEVELS[level]) for level in LEVELS),
]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, weight, _ = SPEC.make_inputs(shape, dtype, generator)
    return x, weight, torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_near_float64(run: Gradients, x: Tensor, weight: Tensor, dy: Tensor) -> None:
    """Closed form in float64; errors relative to the magnitude of the terms each result is a sum of."""
    got = run(x, weight, dy)
    a, w, g = x.double(), weight.double(), dy.double() * weight.double()
    rstd = (a.pow(2).sum(-1, keepdim=True) / a.shape[-1] + EPS) ** -0.5
    xhat = a * rstd
    rows = tuple(range(a.dim() - 1))
    exact = (xhat * w, rstd * (g - xhat * (g * xhat).sum(-1, keepdim=True) / a.shape[-1]), dy.double() * xhat)
    exact = (*exact[:2], exact[2].sum(rows) if rows else exact[2])
    largest = (g.abs() * (1 + xhat.abs())).amax(-1, keepdim=True)
    terms = (exact[0].abs(), rstd * largest, (dy.double() * xhat).abs().sum(rows) if rows else exact[2].abs())
    for name, result, value, scale in zip(("y", "dx", "dw"), got, exact, terms, strict=True):
        assert result.dtype == x.dtype, name
        assert result.shape == value.shape, name
        error = (result.double() - value).abs() / scale.clamp_min(torch.finfo(x.dtype).tiny)
        assert error.numel() == 0 or error.max().item() <= SPEC.tolerances[x.dtype], name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_values_and_gradients_are_those_of_float64(run: Gradients, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_near_float64(run, *inputs(shape, dtype))


def test_the_reference_is_exact_in_float64() -> None:
    assert_near_float64(by_autograd(reference.rms_norm), *inputs((6, 33), torch.float64))


def sliced_heads(x: Tensor) -> Tensor:
    """The same values as the query heads of a fused projection ``[s, b, n, 3, h]``."""
    fused = torch.full((*x.shape[:-1], 3, x.shape[-1]), torch.nan, dtype=x.dtype)
    fused[..., 1, :] = x
    return fused[..., 1, :]


STRIDED = {
    "sequence and batch swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "heads of a fused projection": sliced_heads,
    "both": lambda x: sliced_heads(x.transpose(0, 1)).transpose(0, 1),
    "columns apart": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every other row": lambda x: torch.stack([x, x + 1], dim=1).flatten(0, 1)[::2],
    "one row repeated": lambda x: x[:1, :1].expand_as(x),
}


@built
@pytest.mark.parametrize("arrange", STRIDED.values(), ids=STRIDED.keys())
@pytest.mark.parametrize("shape", [(4, 3, 36), (4, 3, 5, 36)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_change_no_bit(dtype: torch.dtype, shape: tuple[int, ...], arrange: Callable[[Tensor], Tensor]) -> None:
    x, weight, dy = inputs(shape, dtype)
    strided = arrange(x)
    assert not strided.is_contiguous()
    run = by_autograd(cpu.rms_norm)
    expected = run(strided.contiguous(), weight, dy)
    for got, value in zip(run(strided, weight, dy), expected, strict=True):
        assert torch.equal(got, value)


@built
def test_strided_weight_and_gradient() -> None:
    x, weight, dy = inputs((4, 5, 36), torch.float32)
    spaced = torch.stack([weight, weight + 1], dim=1)[:, 0]
    run = by_autograd(cpu.rms_norm)
    for got, value in zip(run(x, spaced, STRIDED["columns apart"](dy)), run(x, weight, dy), strict=True):
        assert torch.equal(got, value)


@built
@pytest.mark.parametrize("shape", [(5, 7), (4, 33), (300, 515), (17, 1024)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight, dy = inputs(shape, dtype)
    expected = by_level(0)(x, weight, dy)
    for level in LEVELS:
        for got, value in zip(by_level(level)(x, weight, dy), expected, strict=True):
            assert torch.equal(got, value), cpu_kernels.LEVELS[level]


@built
def test_the_number_of_threads_and_repetition_change_no_bit() -> None:
    x, weight, dy = inputs((700, 515), torch.float32)
    run = by_autograd(cpu.rms_norm)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2, 7):
            torch.set_num_threads(threads)
            results.append(run(x, weight, dy))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for got, value in zip(other, results[0], strict=True):
            assert torch.equal(got, value)


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_sixteen_bit_conversions_are_those_of_torch(level: int, dtype: torch.dtype) -> None:
    """Each number a storage type has, alone in its row: in, normalised, rounded, multiplied, rounded, out."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 1)
    weight = torch.tensor([1.25], dtype=dtype)
    # A huge eps leaves x nearly as it is scaled, down to subnormal numbers.
    y, rstd = cpu.forward(x, weight, 1e4, level)
    normalised = (x.float() * rstd.view(-1, 1)).to(dtype)
    expected = (normalised.float() * weight.float()).to(dtype)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())
    assert ((y != 0) & (y.abs() < torch.finfo(dtype).tiny)).any()


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_transformers_rounds(run: Gradients, dtype: torch.dtype) -> None:
    x, weight, dy = inputs((200, 896), dtype)
    theirs = LlamaRMSNorm(896, EPS).to(dtype)
    theirs.weight.data = weight
    expected = theirs(x).detach()
    # A last bit of rstd may differ and carry over, rarely.
    assert (run(x, weight, dy)[0] != expected).double().mean() < 1e-4
    # torch's own norm rounds once, not twice: the comparison can tell.
    assert (torch.nn.functional.rms_norm(x, (896,), weight, EPS) != expected).double().mean() > 0.1


@built
def test_passes_torch_opcheck() -> None:
    ops = torch.ops.mindspeed_llm
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, dy = inputs((3, 4, 33), dtype)
        torch.library.opcheck(ops.rms_norm.default, (x.requires_grad_(), weight.requires_grad_(), EPS))
        torch.library.opcheck(ops.rms_norm_backward.default, (dy, x.detach(), weight.detach(), torch.rand(12)))


@built
def test_refuses_what_it_would_read_wrongly() -> None:
    x, weight, dy = inputs((4, 8), torch.float32)
    with pytest.raises(TypeError, match="bfloat16"):
        cpu.rms_norm(x, weight.bfloat16(), EPS)
    with pytest.raises(TypeError, match="float64"):
        cpu.rms_norm(x.double(), weight.double(), EPS)
    with pytest.raises(ValueError, match=r"\(7,\)"):
        cpu.rms_norm(x, weight[:7], EPS)
    rstd = torch.ones(4)
    for wrong in ((dy[:3], rstd), (dy.bfloat16(), rstd), (dy, rstd[:3]), (dy, rstd.double())):
        with pytest.raises(ValueError, match="rms_norm_backward"):
            cpu.backward(wrong[0], x, weight, wrong[1])


@built
def test_a_level_that_the_processor_lacks_is_refused() -> None:
    x, weight, _ = inputs((4, 8), torch.float32)
    for level in (-1, len(cpu_kernels.LEVELS)):
        with pytest.raises(ValueError, match="instruction set"):
            cpu.forward(x, weight, EPS, level)


@built
def test_shares_the_openmp_runtime_of_torch() -> None:
    cpu.rms_norm(*inputs((4, 8), torch.float32)[:2], EPS)
    with open("/proc/self/maps") as maps:
        # Other packages bring their own in a folder NAME.libs; whether they are imported is not ours to say.
        runtimes = {line.split()[-1] for line in maps if re.search(r"(?<!\.libs)/lib[gi]?omp", line)}
    assert len(runtimes) == 1


def test_the_kernels_are_built_where_there_is_a_compiler() -> None:
    assert shutil.which("g++") is None or cpu_kernels.unavailable() is None
