"""The parity matrix: every layout of the dense families equals transformers and torch's AdamW."""

from __future__ import annotations

import functools

import pytest

from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.case import parse_layout
from tests.parity.reference import Reference, compare, train

SEED = 7
#: Where tied embeddings matter (their gradients meet, from two places or two stages), both are here.
QWEN2 = """
    one one+mbs4 one+full tp2 tp2+full tp2+sp tp4 tp4+sp pp2+mbs2 pp4 pp2+vpp2+nop2p pp2+vpp2+p2p dp2+dist
    dp2+dist+reduce+gather dp4+reduce tp2+sp+pp2 pp2+dp2+vpp2+dist+reduce+gather tp2+pp2+dp2+dist+reduce+gather
"""
TIED = """
    one+selective tp2 tp2+sp+selective+mbs2 tp4+sp pp2 pp4 pp2+vpp2+p2p dp2+dist+reduce+gather tp2+sp+pp2
    pp2+vpp2+dp2+dist+reduce pp2+dp2+dist+mbs2+block tp2+sp+pp2+dp2+dist+reduce+gather
"""
LLAMA = """
    one one+mbs8 tp2+sp+full tp4 pp2+vpp2 dp2 dp2+reduce dp2+dist+reduce tp2+pp2 tp2+sp+pp2+dp2+dist+reduce+gather
"""
#: What makes other code run in few layouts: name -> model, changes of its config, layouts.
SPECIAL = {
    "one KV head": ("q25", {"num_key_value_heads": 1}, "tp2 tp4+sp+mbs2"),
    "no GQA": ("llama31", {"num_key_value_heads": 4}, "tp2+sp"),
    "sliding window": ("q25window", {}, "one tp2+sp+pp2"),
    "wide heads, tied": ("llama32tied", {}, "tp2+sp pp2"),
    "linear rope": ("llamalin", {}, "tp2"),
    "yarn rope": ("llamayarn", {}, "tp2+pp2"),
    "dynamic rope": ("llamadyn", {}, "tp2+sp"),
    "biases": ("llamabias", {}, "tp2+sp+pp2"),
    "padded vocabulary": ("q25", {"vocab_size": 323}, "one+divisor128 tp2+sp+divisor128 tp2+pp2+divisor128"),
    "padded vocabulary, tied": ("q25tied", {"vocab_size": 323}, "tp4+divisor128 tp2+sp+pp2+divisor128"),
    "eight layers": ("q25tied", {"num_hidden_layers": 8}, "pp4+vpp2"),
    "twelve layers": ("llama31", {"num_hidden_layers": 12}, "pp2+vpp3+full"),
}
MODELS = {"qwen2": ("q25", {}, QWEN2), "qwen2 tied": ("q25tied", {}, TIED), "llama": ("llama31", {}, LLAMA), **SPECIAL}
CASES = [(name, layout) for name, (_, _, layouts) in MODELS.items() for layout in layouts.split()]


@functools.cache
def reference(name: str) -> Reference:
    model, changes, _ = MODELS[name]
    folder = hf_folder(model, **changes)
    return train(folder, SEED, folder / "gradients")


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_layout_equals_transformers(pool: Pool, name: str, layout: str) -> None:
    wanted = reference(name)
    world, _ = parse_layout(layout)
    ranks = pool.run("tests.parity.case:train", world, timeout=110, reference=wanted, layout=layout)
    faults = [fault for row in compare(ranks, wanted) for fault in row.faults()]
    assert not faults, "\n".join(faults)
