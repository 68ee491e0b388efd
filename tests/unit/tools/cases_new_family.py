"""A drafted family, known by its entry point, in the ranks of the pool."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_llm.tools.compare import run_hf, run_ours
from mindspeed_llm.tools.compare.sides import parse_side
from mindspeed_llm.tools.new_family import package, proof
from tests.parity import case
from tests.parity.reference import Reference, Trace


def measure(folder: Path, module: str, tiny: Path) -> float:
    return package.measured(folder, module, tiny)


def capture(folder: Path, module: str, side: str, tokens: torch.Tensor, captured: Path) -> None:
    with proof.registered(folder, module):
        parsed = parse_side(side)
        if parsed.kind == "hf":
            run_hf.capture(parsed, tokens, captured)
        else:
            run_ours.capture(parsed, tokens, captured, dist.get_rank())


def train(folder: Path, module: str, reference: Reference, layout: str) -> Trace:
    with proof.registered(folder, module):
        return case.train(reference, layout)
