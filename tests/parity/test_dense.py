"""The parity matrix: every layout of the dense families equals transformers and torch's AdamW."""

from __future__ import annotations

import functools

import pytest

from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.layouts import FAMILIES, SPECIAL, THOROUGH, parse_layout
from tests.parity.reference import Reference, compare, train

SEED = 7
MODELS = THOROUGH | FAMILIES | SPECIAL
CASES = [(name, layout) for name, model in MODELS.items() for layout in model.layouts.split()]


@functools.cache
def reference(name: str) -> Reference:
    model = MODELS[name]
    folder = hf_folder(model.name, **model.changes)
    return train(folder, SEED, folder / "gradients")


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_layout_equals_transformers(pool: Pool, name: str, layout: str) -> None:
    wanted = reference(name)
    world, _ = parse_layout(layout)
    ranks = pool.run("tests.parity.case:train", world, timeout=110, reference=wanted, layout=layout)
    faults = [fault for row in compare(ranks, wanted) for fault in row.faults()]
    assert not faults, "\n".join(faults)
