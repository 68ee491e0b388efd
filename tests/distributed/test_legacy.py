"""Per-rank trees against those that megatron-core's own models leave, in layouts that megatron-core chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.convert.legacy_reader import LegacySource, LegacyTree
from mindspeed_llm.checkpoint.convert.legacy_writer import LegacySink
from mindspeed_llm.checkpoint.convert.record import described_model
from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.checkpoint.names import compile_names
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.per_rank import load_rank
from tests.unit.checkpoint.test_convert import assert_same, to_megatron, weights

CASE = "tests.distributed.cases_legacy:save_tree"
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
COUNT_ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


def model_of(path: Path, key: str = "model", *, mmap: bool = False) -> dict[str, Tensor]:
    """The tensors of one chunk, as Megatron-LM loads them."""
    content = load_rank(path / "model_optim_rng.pt", mmap=mmap)
    return {name: value for name, value in content[key].items() if value is not None}


@pytest.mark.parametrize(
    ("model", "ranks", "flags", "target"),
    [
        ("q25", 4, {TP: 2, PP: 2, VPP: 2}, Target(tp=2, pp=2, layers_per_virtual_stage=1)),
        ("q25tied", 4, {TP: 2, PP: 2}, Target(tp=2, pp=2)),
        ("q25tied", 2, {PP: 2, VPP: 2}, Target(pp=2, layers_per_virtual_stage=1)),
        ("q25", 4, {TP: 4}, Target(tp=4)),  # 2 KV heads
        ("q25", 2, {PP: 2, "num_layers_in_first_pipeline_stage": 3}, Target(pp=2, layer_list=(3, 1))),
        ("q25", 3, {PP: 3, **COUNT_ENDS}, Target(pp=3, layer_list=(1, 2, 1))),
    ],
)
def test_trees_of_megatron_core_are_read_and_written(
    pool: Pool, tmp_path: Path, model: str, ranks: int, flags: dict[str, Any], target: Target
) -> None:
    folder, rows = hf_folder(model, 323), 512
    pool.run(CASE, 1, folder=folder, out=tmp_path / "whole", make_vocab_size_divisible_by=rows)
    pool.run(
        CASE, ranks, folder=folder, out=tmp_path / "theirs", make_vocab_size_divisible_by=rows // target.tp, **flags
    )
    family, values = described_model(hf_io.read_config(folder), None, folder)
    values["padded_vocab_size"] = rows
    table = compile_names(family, values)
    source = LegacySource(LegacyTree(tmp_path / "theirs"), table)
    whole = model_of(tmp_path / "whole" / "mp_rank_00")
    assert source.tensors.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(source.read(name), whole[name])] == []
    assert source.target == target
    assert {name: values[name] for name in source.values} == source.values

    (tmp_path / "ours").mkdir()
    sink = LegacySink(tmp_path / "ours", source.tensors, table=table, target=target, values=values, iteration=7)
    for name in source.tensors:
        sink.write(name, source.read(name))
    sink.finish()
    names = [path.name for path in sorted((tmp_path / "theirs").iterdir())]
    assert [path.name for path in sorted((tmp_path / "ours").iterdir())] == names
    for name in names:
        for key in ("model0", "model1") if VPP in flags else ("model",):
            expected = model_of(tmp_path / "theirs" / name, key)
            for found in (model_of(tmp_path / "ours" / name, key, mmap=mmap) for mmap in (False, True)):
                assert found.keys() == expected.keys()
                assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


RUN = "tests.distributed.cases_pretrain:command"
TREE = ("--save-format", "legacy", "--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")


@pytest.mark.parametrize(
    ("model", "flags", "ranks"),
    [
        ("q25tied", (), 1),
        ("q25tied", ("--tensor-model-parallel-size", 1, "--pipeline-model-parallel-size", 4), 4),
        ("q25tied", ("--tensor-model-parallel-size", 2, "--bf16", "--params-dtype", "fp32"), 2),
        ("mixtral", ("--expert-model-parallel-size", 2), 2),
    ],
)
def test_a_run_starts_from_a_tree_of_another_layout(
    pool: Pool, tmp_path: Path, model: str, flags: tuple[object, ...], ranks: int
) -> None:
    """The layout of the run, its padding of the vocabulary and its number format are its own."""
    folder = hf_folder(model, 323)
    tree = to_megatron(folder, tmp_path / "tree", *TREE)
    argv = ["--load", tree, "--hf-config", folder, "--train-iters", 0, "--save-hf", tmp_path / "out", *flags]
    for rank in pool.run(RUN, ranks, argv=[str(word) for word in argv]):
        assert rank["code"] == 0, rank["err"]
        assert "the run begins at iteration 0 with a fresh optimizer" in rank["err"] or ranks > 1
    expected = weights(folder)
    if "--bf16" in flags:
        expected = {name: tensor.bfloat16().float() for name, tensor in expected.items()}
    assert_same(weights(tmp_path / "out"), expected)


@pytest.mark.parametrize(
    ("model", "flags", "says"),
    [
        ("q25", (), "untie_embeddings_and_output_weights True"),
        ("q25tied", ("--rotary-base", "5000"), "rotary_base 5000.0"),
        ("q25tied", ("--save", "tree"), "holds the checkpoint of Megatron-LM that --load reads"),
    ],
)
def test_a_tree_of_another_model_does_not_start_a_run(
    pool: Pool, tmp_path: Path, model: str, flags: tuple[str, ...], says: str
) -> None:
    tree = to_megatron(hf_folder("q25tied", 323), tmp_path / "tree", *TREE)
    argv = ["--load", str(tree), "--hf-config", str(hf_folder(model, 323)), "--train-iters", "0"]
    argv += [str(tree) if word == "tree" else word for word in flags]
    (found,) = pool.run(RUN, 1, argv=argv)
    assert found["code"] != 0
    assert says in found["err"]
