"""RMS norm in C++ against torch's, transformers' and a copy of the same tensor."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import Tensor

from mindspeed_llm import ops
from tests.bench.harness import Figures, Machine, alternate, benchmark, seconds

EPS = 1e-6
SHAPES = [(4096, 896), (2048, 4096)]

Norm = Callable[[Tensor, Tensor], Tensor]


@benchmark
def rms_norm(machine: Machine) -> Figures:
    """Forward, then forward with backward, in bfloat16 and float32; a copy reads and writes as much as the forward."""
    del machine
    figures: Figures = []
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            figures += _one(dtype, *shape)
    return figures


def _one(dtype: torch.dtype, rows: int, width: int) -> Figures:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, dy, out = (torch.randn(rows, width).to(dtype) for _ in range(3))
    theirs = LlamaRMSNorm(width, EPS).to(dtype)
    chosen = ops.choose(ops.registry(), device="cpu", dtype=dtype, choices={"rms_norm": "cpp"})["rms_norm"]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return chosen(x, weight, EPS)

    others: dict[str, Norm] = {
        f"torch {version('torch')} F.rms_norm": lambda x, weight: torch.nn.functional.rms_norm(
            x, (width,), weight, EPS
        ),
        f"transformers {version('transformers')} LlamaRMSNorm": lambda x, _: theirs(x),
    }
    name = f"{str(dtype).removeprefix('torch.')} [{rows}, {width}]"
    forward, both = f"cpp forward {name}", f"cpp forward+backward {name}"

    def run(norm: Norm) -> Callable[[], float]:
        def work() -> None:
            with torch.no_grad():
                norm(x, theirs.weight)

        return seconds(work)

    def train(norm: Norm) -> Callable[[], float]:
        leaf = x.detach().requires_grad_()
        return seconds(lambda: torch.autograd.grad(norm(leaf, theirs.weight), (leaf, theirs.weight), dy))

    return [
        alternate(forward, "copy of the tensor", run(ours), seconds(lambda: out.copy_(x)), unit="s"),
        *(alternate(forward, other, run(ours), run(norm), unit="s") for other, norm in others.items()),
        *(alternate(both, other, train(ours), train(norm), unit="s") for other, norm in others.items()),
    ]
