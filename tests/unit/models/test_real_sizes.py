"""The real sizes without their weights: what is planned for them against what transformers would write."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_llm.checkpoint.convert.record import described_model
from mindspeed_llm.checkpoint.convert.shapes import planned_shapes
from mindspeed_llm.checkpoint.convert.views import HuggingFace, Megatron
from mindspeed_llm.checkpoint.engine import check_heads, plan_load
from mindspeed_llm.checkpoint.hf_io import TensorInfo
from mindspeed_llm.checkpoint.layout import global_shape, local_columns, local_rows
from mindspeed_llm.checkpoint.names import NameTable, compile_names
from mindspeed_llm.checkpoint.stacked import as_planned, as_stored
from mindspeed_llm.models.family import Column, Replicated, Row, Vocab
from mindspeed_llm.models.registry import family_for
from mindspeed_llm.tools.recipes import RECIPES
from tests.oracles import ORACLES
from tests.unit.models.published import PUBLISHED, hf_config, shallow, stored_shapes

LAYOUTS = sorted({(recipe.config, recipe.tp) for recipe in RECIPES})
WITHOUT_PLAN = {"gpt2", "bloom", *ORACLES}
"""Families that transformers has no plan of tensor parallelism for."""
Rows = tuple[int, int]


@dataclass(frozen=True)
class Shapes:
    """A source that has names and shapes and gives no tensor."""

    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, rows: object = None, columns: object = None) -> Tensor:
        raise AssertionError(f"{name} is read while planning")


def shapes_of(tensors: Mapping[str, tuple[int, ...]]) -> Shapes:
    return Shapes({name: TensorInfo(shape, torch.bfloat16) for name, shape in tensors.items()})


def plain(source: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(info.shape) for name, info in source.tensors.items()}


def model(name: str) -> tuple[NameTable, dict[str, Any]]:
    family, values = described_model(hf_config(name), None, Path(name))
    return compile_names(family, values), {**values, "padded_vocab_size": values["vocab_size"]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_has_the_names_and_shapes_of_save_pretrained(name: str) -> None:
    table, values = model(name)
    whole = shapes_of(planned_shapes(table, values))
    written = as_stored(HuggingFace(table, whole, values), table)
    assert plain(written) == stored_shapes(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_save_pretrained_writes_is_read_whole(name: str) -> None:
    table, values = model(name)
    stored = as_planned(shapes_of(stored_shapes(name)), table)
    planned = planned_shapes(table, values)
    assert {entry.mcore for entry in plan_load(table, planned, stored.tensors, values, 1)} == set(planned)
    exported = {entry.mcore for entry in table.entries.values() if entry.exported}
    assert plain(Megatron(table, stored, values)) == {name: planned[name] for name in exported}


@pytest.mark.parametrize("name", [name for name, facts in PUBLISHED.items() if facts.index])
def test_the_published_index_lists_as_many_tensors_and_bytes(name: str) -> None:
    table, _ = model(name)
    count, size = PUBLISHED[name].index or (0, 0)
    assert len(table.hf_names()) == count
    assert 2 * sum(math.prod(shape) for shape in stored_shapes(name).values()) == size


def covered(spans: Sequence[Rows]) -> Rows:
    """Where spans begin and end that follow one another without a gap."""
    spans = sorted(spans)
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(spans))
    return spans[0][0], spans[-1][1]


@pytest.mark.parametrize(("name", "tp"), LAYOUTS)
def test_ranks_of_a_recipe_share_every_tensor_out(name: str, tp: int) -> None:
    table, values = model(name)
    check_heads(values, tp)
    for mcore, shape in planned_shapes(table, values).items():
        rule = table.entries[mcore].shard
        rows = [local_rows(rule, shape[0], rank, tp) for rank in range(tp)]
        columns = [local_columns(rule, shape[-1], rank, tp) or (0, shape[-1]) for rank in range(tp)]
        held = [sum(stop - start for start, stop in rows[0]), *(stop - start for start, stop in columns[:1])]
        assert tuple(global_shape(rule, held[: len(shape)], tp)) == shape
        if not isinstance(rule, Replicated):
            by_row = isinstance(rule, Row)
            assert covered(columns if by_row else list(itertools.chain(*rows))) == (0, shape[1 if by_row else 0])


@pytest.mark.parametrize("name", [name for name in PUBLISHED if family_for(hf_config(name)).name not in WITHOUT_PLAN])
def test_what_is_cut_by_rows_and_by_columns_is_what_transformers_cuts(name: str) -> None:
    plan = shallow(name).config.base_model_tp_plan
    kinds = {"colwise": Column, "rowwise": Row, "replicated": Replicated}
    kinds |= {"mla": Replicated, "embedding": Vocab}
    # The plan of a family also names what a model of it may lack, and experts as transformers keeps them.
    stored = {re.sub(r"\.\d+\.", ".*.", key) for key in stored_shapes(name)}
    theirs = {
        f"model.{module}.weight": kinds[how.partition("_")[0]]
        for module, how in plan.items()
        if f"model.{module}.weight" in stored
    }
    table, _ = model(name)
    ours = {re.sub(r"\.\d+\.", ".*.", key): type(entry.shard) for entry in table.entries.values() for key in entry.hf}
    assert {key: ours[key] for key in theirs} == theirs
