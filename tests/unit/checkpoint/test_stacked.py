"""Tensors that hold all experts of a layer, taken apart and put together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mindspeed_llm.checkpoint.hf_io import TensorInfo
from mindspeed_llm.checkpoint.names import NameTable, compile_names
from mindspeed_llm.checkpoint.stacked import as_planned, as_stored, join, stored_name
from mindspeed_llm.models.registry import family_by_name

EXPERTS, HIDDEN, WIDTH = 8, 64, 96
PLACE = "model.layers.0.mlp.experts."


@dataclass
class Stored:
    """Tensors in memory."""

    loaded: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.loaded.items()}

    def read(self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor:
        found = self.loaded[name] if rows is None else self.loaded[name][slice(*rows)]
        return found if columns is None else found[:, slice(*columns)]


@pytest.fixture
def table() -> NameTable:
    family = family_by_name("gpt_oss")
    return compile_names(family, family.config_to_values({**family.tiny, "num_hidden_layers": 1}))


@pytest.fixture
def stored() -> Stored:
    shapes = {
        "gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH),
        "gate_up_proj_bias": (EXPERTS, 2 * WIDTH),
        "down_proj": (EXPERTS, WIDTH, HIDDEN),
        "down_proj_bias": (EXPERTS, HIDDEN),
    }
    return Stored({PLACE + name: torch.randn(shape) for name, shape in shapes.items()})


def test_an_expert_is_its_slice_turned(table: NameTable, stored: Stored) -> None:
    planned = as_planned(stored, table)
    whole = stored.loaded[PLACE + "gate_up_proj"]
    gate, up = f"{PLACE}gate_up_proj[3][0::2]", f"{PLACE}gate_up_proj[3][1::2]"
    assert planned.tensors[gate].shape == (WIDTH, HIDDEN)
    torch.testing.assert_close(planned.read(gate), whole[3, :, 0::2].T, rtol=0, atol=0)
    torch.testing.assert_close(planned.read(up, (2, 5), (7, 9)), whole[3, 7:9, 1::2].T[2:5], rtol=0, atol=0)
    bias = stored.loaded[PLACE + "gate_up_proj_bias"]
    torch.testing.assert_close(planned.read(f"{PLACE}gate_up_proj_bias[5][1::2]", (4, 8)), bias[5, 1::2][4:8])


def test_what_is_taken_apart_comes_together_bit_for_bit(table: NameTable, stored: Stored) -> None:
    again = as_stored(as_planned(stored, table), table)
    assert again.tensors == stored.tensors
    for name, tensor in stored.loaded.items():
        assert torch.equal(again.read(name), tensor)
        assert torch.equal(again.read(name, (2, 5)), tensor[2:5])
    assert torch.equal(again.read(PLACE + "down_proj", (1, 2), (3, 9)), stored.loaded[PLACE + "down_proj"][1:2, 3:9])


def test_parts_that_arrive_one_by_one_appear_with_the_last(table: NameTable, stored: Stored) -> None:
    planned = as_planned(stored, table)
    turned = set(table.turned())
    names = [name for name in table.hf_names() if stored_name(name) in stored.loaded]
    assert len(names) == 6 * EXPERTS
    parts = ((name, planned.read(name).T if name in turned else planned.read(name)) for name in names)
    found = dict(join(parts, table))
    assert found.keys() == stored.loaded.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.loaded.items())


def test_an_expert_that_is_not_there_is_missing(table: NameTable, stored: Stored) -> None:
    stored.loaded[PLACE + "down_proj"] = stored.loaded[PLACE + "down_proj"][:7]
    planned = as_planned(stored, table).tensors
    names = {name for name in table.hf_names() if stored_name(name) in stored.loaded}
    assert names - set(planned) == {PLACE + "down_proj[7]"}
    assert PLACE + "down_proj" not in planned
