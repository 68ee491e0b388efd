"""Per-rank trees: where tensors and layers lie, in and out in every layout, and what is not one tree."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.convert.legacy_folders import find_tree
from mindspeed_llm.checkpoint.convert.legacy_layout import Place, layer_places, rank_folder
from mindspeed_llm.checkpoint.convert.legacy_reader import LegacySource, LegacyTree
from mindspeed_llm.checkpoint.convert.legacy_writer import LegacySink
from mindspeed_llm.checkpoint.convert.record import described_model
from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.checkpoint.convert.views import Megatron
from mindspeed_llm.checkpoint.names import NameTable, compile_names
from mindspeed_llm.errors import CheckpointError, ConversionError, SuiteError
from tests.fixtures import hf_folder
from tests.per_rank import load_rank

FILE = "model_optim_rng.pt"


class Model:
    """A Hugging Face folder as whole megatron-core tensors."""

    def __init__(self, name: str, **changes: Any) -> None:
        folder = hf_folder(name, 323, **changes)
        family, values = described_model(hf_io.read_config(folder), None, folder)
        self.values: dict[str, Any] = {**values, "padded_vocab_size": 384}
        self.table: NameTable = compile_names(family, self.values)
        with ExitStack() as stack:
            source = Megatron(self.table, hf_io.open_tensors(folder, stack), self.values)
            self.infos = dict(source.tensors)
            self.whole: dict[str, Tensor] = {name: source.read(name).clone() for name in source.tensors}

    def write(self, folder: Path, target: Target, rows: int = 10**9, **how: Any) -> Path:
        folder.mkdir()
        sink = LegacySink(folder, self.infos, table=self.table, target=target, values=self.values, iteration=1, **how)
        for name, tensor in self.whole.items():
            for start in range(0, len(tensor), rows):
                sink.write(name, tensor[start : start + rows], start)
        sink.finish()
        return folder

    def read(self, folder: Path) -> LegacySource:
        return LegacySource(LegacyTree(folder), self.table)


def assert_reads(source: LegacySource, expected: Mapping[str, Tensor]) -> None:
    assert source.tensors.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(source.read(name), tensor)] == []


def change(folder: Path, edit: Callable[[dict[str, Any]], object], rank: str | None = None) -> None:
    """Rewrite the file of ``rank``, or of all ranks, as Megatron-LM would write it."""
    for path in folder.glob(f"{rank or '*'}/{FILE}"):
        content = load_rank(path)
        edit(content)
        torch.save(content, path)


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("target", "rank", "name"),
    [
        # get_checkpoint_name in megatron/training/checkpointing.py of Megatron-LM, core_v0.16.1.
        (Target(), (0, 0, 0), "mp_rank_00"),
        (Target(tp=16), (11, 0, 0), "mp_rank_11"),
        (Target(tp=2, pp=2), (1, 0, 0), "mp_rank_01_000"),
        (Target(ep=4), (0, 0, 3), "mp_rank_00_003"),
        (Target(tp=2, pp=2, ep=16), (1, 1, 12), "mp_rank_01_001_012"),
    ],
)
def test_folders_have_megatrons_names(target: Target, rank: tuple[int, int, int], name: str) -> None:
    assert rank_folder(target, *rank) == name


@pytest.mark.parametrize(
    ("target", "layers", "slots"),
    [
        # Examples that MindSpeed-LLM's converters give, as stage -> chunk -> places that hold a layer.
        (Target(pp=2, layers_per_virtual_stage=2), 8, [[[0, 1], [0, 1]], [[0, 1], [0, 1]]]),
        (Target(pp=2, layers_per_virtual_stage=2, noop_layers=(4, 5)), 6, [[[0, 1], []], [[0, 1], [0, 1]]]),
        (Target(pp=2, noop_layers=(1, 4)), 4, [[[0, 2]], [[0, 2]]]),
        (Target(pp=2, layer_list=(3, 1)), 4, [[[0, 1, 2]], [[0]]]),
    ],
)
def test_layers_lie_where_mindspeed_puts_them(target: Target, layers: int, slots: list[list[list[int]]]) -> None:
    found = layer_places(target, layers)
    wanted = {Place(s, c, slot) for s, stage in enumerate(slots) for c, chunk in enumerate(stage) for slot in chunk}
    assert set(found) == wanted
    assert found == sorted(found, key=lambda place: (place.chunk, place.stage, place.slot))


@pytest.mark.parametrize(
    ("target", "layers"),
    [(Target(pp=2), 5), (Target(pp=4, layers_per_virtual_stage=1), 10), (Target(pp=2, layer_list=(2, 3)), 4)],
)
def test_no_layer_is_dropped(target: Target, layers: int) -> None:
    with pytest.raises(ConversionError, match="does not place every layer"):
        layer_places(target, layers)


@pytest.mark.parametrize("model", ["q25", "q25tied", "llamabias"])
@pytest.mark.parametrize(
    "target",
    [
        Target(),
        Target(tp=2, pp=2),
        Target(pp=4),
        Target(tp=4),  # more ranks than KV heads
        Target(pp=2, layers_per_virtual_stage=1),
        Target(pp=2, layer_list=(3, 1)),
        Target(pp=2, noop_layers=(1, 4)),
        Target(pp=3, noop_layers=(0, 5)),
        Target(pp=2, layers_per_virtual_stage=1, noop_layers=(4, 5)),
        Target(pp=3, noop_layers=(4, 5)),  # a stage without a layer
    ],
    ids=str,
)
def test_a_tree_gives_back_the_same_bits_and_its_layout(tmp_path: Path, model: str, target: Target) -> None:
    whole = Model(model)
    source = whole.read(whole.write(tmp_path / "tree", target, rows=50))
    assert_reads(source, whole.whole)
    assert source.target == target
    assert {name: source.values[name] for name in whole.values} == whole.values


def test_parts_are_read_alone(tmp_path: Path) -> None:
    model = Model("q25")
    source = model.read(model.write(tmp_path / "tree", Target(tp=2, pp=2)))
    for name, whole in model.whole.items():
        for rows in ((3, 4), (len(whole) // 2 - 2, len(whole) // 2 + 3), (0, len(whole)), (5, 5)):
            columns = (whole.shape[1] // 2 - 1, whole.shape[1] - 3) if whole.dim() > 1 else None
            expected = whole[slice(*rows)] if columns is None else whole[slice(*rows), slice(*columns)]
            assert torch.equal(source.read(name, rows, columns), expected)


@pytest.mark.parametrize(("impl", "norm"), [("local", "input_layernorm.weight"), ("transformer_engine", None)])
def test_both_spellings_are_written_and_read(tmp_path: Path, impl: str, norm: str | None) -> None:
    model = Model("q25")
    folder = model.write(tmp_path / "tree", Target(), transformer_impl=impl)
    keys = {
        key.removeprefix("decoder.layers.0.")
        for key in load_rank(folder / "mp_rank_00" / FILE)["model"]
        if key.startswith("decoder.layers.0.")
    }
    linear = {
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }
    # TELayerNormColumnParallelLinear keeps the norm's weight as its own.
    fused = {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"}
    assert keys == linear | ({norm, "pre_mlp_layernorm.weight"} if norm else fused)
    change(folder, lambda content: content["model"].update({"decoder.layers.0.mlp.linear_fc1._extra_state": None}))
    assert_reads(model.read(folder), model.whole)


def test_stages_that_run_backwards_are_numbered_as_they_compute(tmp_path: Path) -> None:
    """DualPipeV (MindSpeed-LLM): with eight layers on two stages the first holds 0, 1, 6, 7; here one layer a chunk."""
    model = Model("q25")
    folder = model.write(tmp_path / "tree", Target(pp=2, layers_per_virtual_stage=1))
    first, last = (load_rank(folder / f"mp_rank_00_00{i}" / FILE) for i in (0, 1))
    first["model1"], last["model1"] = last["model1"], first["model1"]
    for number, content in enumerate((first, last)):
        torch.save(content, folder / f"mp_rank_00_00{number}" / FILE)
    assert_reads(model.read(folder), model.whole)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_second_number_may_be_that_of_an_expert_parallel_rank(tmp_path: Path, recorded: bool) -> None:
    model = Model("q25")
    folder = model.write(tmp_path / "tree", Target(tp=2))
    change(folder, lambda content: setattr(content["args"], "expert_model_parallel_size", 2))
    if not recorded:
        change(folder, lambda content: content.pop("args"))
    for tp in range(2):
        for ep in range(2):
            shutil.copytree(folder / f"mp_rank_0{tp}", folder / f"mp_rank_0{tp}_00{ep}")
        shutil.rmtree(folder / f"mp_rank_0{tp}")
    source = model.read(folder)
    assert source.target == Target(tp=2, ep=2)
    assert_reads(source, model.whole)


def test_the_fields_of_megatrons_command_line_are_read(tmp_path: Path) -> None:
    """Megatron-LM 0.16.1's own names and defaults (megatron/training/arguments.py), for Qwen2.5."""
    model = Model("q25")
    folder = model.write(tmp_path / "tree", Target())
    args = argparse.Namespace(
        num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2,
        group_query_attention=True, kv_channels=16, max_position_embeddings=512, position_embedding_type="rope",
        rotary_base=1000000, rotary_percent=1.0, rotary_interleaved=False, add_bias_linear=False, add_qkv_bias=True,
        swiglu=True, squared_relu=False, quick_geglu=False, untie_embeddings_and_output_weights=True,
        apply_layernorm_1p=False, normalization="RMSNorm", norm_epsilon=1e-5, qk_layernorm=False, num_experts=None,
        padded_vocab_size=384, make_vocab_size_divisible_by=128, use_rope_scaling=False, rope_scaling_factor=8.0,
        window_size=None, moe_layer_freq=1, mtp_num_layers=None, multi_latent_attention=False, vocab_size=None,
        original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, softmax_type="vanilla",
    )  # fmt: skip
    change(folder, lambda content: (content.pop("config"), content.update(args=args)))
    found = LegacyTree(folder).values
    assert {name: model.values[name] for name in found} == found
    assert {"activation_func", "layernorm_epsilon", "gated_linear_unit", "num_layers", "rotary_base"} <= found.keys()
    # Without groups, the default of their number says nothing.
    args.group_query_attention, args.num_query_groups = False, 1
    change(folder, lambda content: content.update(args=args))
    assert LegacyTree(folder).values["num_query_groups"] == 4


# ------------------------------------------------------------------------------------------------- what is not one tree


def refused(folder: Path, model: Model, kind: type[SuiteError] = CheckpointError) -> str:
    def read_all() -> None:
        source = model.read(folder)
        for name in source.tensors:
            source.read(name)

    with pytest.raises(kind) as caught:
        read_all()
    return str(caught.value)


def test_ranks_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    model = Model("q25")
    folder = model.write(tmp_path / "tree", Target(tp=2, pp=2))
    shutil.move(folder / "mp_rank_01_001", tmp_path)
    assert "missing: mp_rank_01_001" in refused(folder, model)
    shutil.rmtree(folder / "mp_rank_00_001")
    assert "missing: mp_rank_00_001, mp_rank_01_001" in refused(folder, model)
    other = model.write(tmp_path / "other", Target(tp=2))
    shutil.copytree(other / "mp_rank_01", other / "mp_rank_02")
    assert "allowed: TP 2 x PP 1 x EP 1" in refused(other, model)
    (other / "mp_rank_02" / FILE).unlink()
    assert "without their file" in refused(other, model)
    shutil.copytree(tmp_path / "mp_rank_01_001", other / "mp_rank_01_001")
    (other / "mp_rank_02" / FILE).touch()
    assert "several layouts" in refused(other, model)


def test_ranks_of_different_saves_are_refused(tmp_path: Path) -> None:
    model = Model("q25")
    folder = model.write(tmp_path / "tree", Target(tp=2))
    change(folder, lambda content: content.update(iteration=2), "mp_rank_01")
    text = refused(folder, model)
    assert "iteration 2" in text
    assert "mp_rank_01" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("output_layer.weight", "output_layer.weight is tied"),
        ("decoder.final_layernorm.weight", "different copies of decoder.final_layernorm.weight"),
    ],
)
def test_copies_that_differ_are_refused(tmp_path: Path, name: str, says: str) -> None:
    model = Model("q25tied")
    folder = model.write(tmp_path / "tree", Target(tp=2, pp=2))
    change(folder, lambda content: content["model"][name].add_(1e-3), "mp_rank_01_001")
    assert says in refused(folder, model)


def test_the_copy_of_a_tied_embedding_may_be_absent(tmp_path: Path) -> None:
    model = Model("q25tied")
    folder = model.write(tmp_path / "tree", Target(tp=2, pp=2))
    change(folder, lambda content: content["model"].pop("output_layer.weight"), "mp_rank_0?_001")
    assert_reads(model.read(folder), model.whole)


def test_layers_that_are_not_those_that_the_files_say_are_refused(tmp_path: Path) -> None:
    model = Model("q25")
    folder = model.write(tmp_path / "tree", Target(pp=2))
    change(folder, lambda content: setattr(content["args"], "num_layers", 5))
    assert "4 layers on 2 chunks: 2, 2" in refused(folder, model)
    change(folder, lambda content: vars(content["args"]).update(num_layers=6, noop_layers="2,4"))
    text = refused(folder, model)
    assert "where they do not belong" in text
    assert "stage 1, chunk 0: decoder.layers.2" in text

    def move(content: dict[str, Any]) -> None:
        vars(content["args"]).update(num_layers=4, noop_layers=None)
        content["model"] = {key.replace("layers.1.", "layers.2."): value for key, value in content["model"].items()}

    change(folder, move)
    assert "stage 0, chunk 0: decoder.layers.1" in refused(folder, model)


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    model = Model("q25")
    folder = model.write(tmp_path / "tree", Target(tp=2))
    shutil.copytree(folder, tmp_path / "one")
    change(folder, lambda content: content["model"].update({"decoder.layers.0.self_attention.extra": torch.ones(2)}))
    assert "decoder.layers.0.self_attention.extra: not a tensor of this model" in refused(
        folder, model, ConversionError
    )
    other = {"mlp.weight": torch.ones(2)}
    for key, value, says in (
        ("language_model", other, "before megatron-core"),
        ("decoder.layers.0.mlp.linear_fc1.lora_A.default.weight", torch.ones(2), "LoRA"),
        ("decoder.layers.0.mlp.experts.weight1", torch.ones(2), "experts in one matrix"),
    ):
        change(folder, lambda content, k=key, v=value: content.update(model={k: v}))
        assert says in refused(folder, model, ConversionError)
    key = "decoder.layers.0.mlp.linear_fc2.weight"
    change(tmp_path / "one", lambda content: content["model"].update({key: torch.ones(2, 3)}), "mp_rank_00")
    assert f"{key}: on different ranks" in refused(tmp_path / "one", model, ConversionError)


def test_a_poisoned_rank_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Poison:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch ran",)

    monkeypatch.chdir(tmp_path)
    model = Model("q25")
    folder = model.write(tmp_path / "tree", Target(tp=2))
    path = folder / "mp_rank_01" / FILE
    content = load_rank(path)
    torch.save({**content, "args": Poison()}, path)
    text = refused(folder, model)
    assert "without running code" in text
    assert "mp_rank_01" in text
    assert not (tmp_path / "ran").exists()


# ----------------------------------------------------------------------------------------------------- finding the tree


def test_the_tracker_names_the_save(tmp_path: Path) -> None:
    for name in ("iter_0000010", "release"):
        (tmp_path / name / "mp_rank_00").mkdir(parents=True)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, save in (("10", "iter_0000010"), ("release\n", "release")):
        tracker.write_text(text)
        assert find_tree(tmp_path) == tmp_path / save
    assert find_tree(tmp_path / "release") == tmp_path / "release"
    assert find_tree(tmp_path, step=10) == tmp_path / "iter_0000010"
    for text, says in (("20", "there is no .*iter_0000020"), ("x", "does not name a save")):
        tracker.write_text(text)
        with pytest.raises(CheckpointError, match=says):
            find_tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no .*iter_0000030"):
        find_tree(tmp_path, step=30)
    tracker.unlink()
    with pytest.raises(CheckpointError, match=r"has no latest_checkpointed_iteration\.txt"):
        find_tree(tmp_path)


def test_what_is_no_tree_is_left_to_others(tmp_path: Path) -> None:
    assert find_tree(tmp_path / "missing") is None
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "iter_0000010" / "metadata.json").touch()
    assert find_tree(tmp_path) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert find_tree(tmp_path) is None
