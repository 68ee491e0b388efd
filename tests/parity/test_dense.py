"""The parity matrix: every layout of the dense families equals transformers and torch's AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mindspeed_llm.models.registry import family_by_name
from tests.distributed.pool import Pool
from tests.parity.case import parse_layout
from tests.parity.reference import Trace, relative, token_batches, train, worst_gradient, write_model

LAYOUTS = (
    "one",
    "one mbs2",
    "one mbs8",
    "one full",
    "one selective",
    "tp2",
    "tp2 sp",
    "tp2 sp full",
    "tp2 sp selective mbs2",
    "tp4 sp",
    "pp2",
    "pp4",
    "pp2 vpp2 nop2p",
    "pp2 vpp2 p2p",
    "dp2",
    "dp2 dist",
    "dp2 dist reduce gather",
    "dp2 reduce",
    "tp2 sp pp2",
    "pp2 dist mbs2 block",
    "tp2 sp pp2 dp2 dist reduce gather",
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Trace]]:
    """Folder and reference of each tiny model."""
    found = {}
    for family, tied in (("qwen2", False), ("qwen2", True), ("llama", False)):
        description = family_by_name(family)
        config = {**description.tiny, "tie_word_embeddings": tied}
        name = f"{family}-tied" if tied else family
        folder = write_model(tmp_path_factory.mktemp("models") / name, description.hf_architectures[0], config)
        found[name] = (folder, train(folder, token_batches(seed=7)))
    return found


def compare(ranks: list[Trace], reference: Trace) -> None:
    """Fail unless every rank reports the reference's numbers and the ranks together its gradients."""
    gathered: dict[str, torch.Tensor] = {}
    for trace in ranks:
        gathered |= trace.gradients
        for step, (loss, norm) in enumerate(zip(reference.losses, reference.grad_norms, strict=True)):
            assert relative(trace.losses[step], loss) <= 1e-5, f"loss of step {step}: {trace.losses[step]} {loss}"
            assert relative(trace.grad_norms[step], norm) <= 1e-4, f"grad norm of step {step}: {trace.grad_norms[step]}"
    name, error = worst_gradient(gathered, reference.gradients)
    assert error <= 1e-4, f"gradient of {name} is off by {error}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied", "llama"])
def test_layout_equals_transformers(pool: Pool, models: dict[str, tuple[Path, Trace]], name: str, layout: str) -> None:
    folder, reference = models[name]
    world, _ = parse_layout(layout)
    ranks = pool.run(
        "tests.parity.case:train", world, timeout=120, folder=str(folder), layout=layout, tokens=token_batches(seed=7)
    )
    compare(ranks, reference)
