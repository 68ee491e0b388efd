"""``convert_ckpt.py`` into per-rank trees and out of them: every model, any layout, and between layouts and formats."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch

from tests.fixtures import MODELS, hf_folder
from tests.per_rank import load_rank
from tests.unit.checkpoint.test_convert import VOCAB, assert_same, assert_same_config, run, to_hf, to_megatron, weights

LAYOUTS = {
    "tp2 pp2": ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"),
    "pp4": ("--target-pipeline-parallel-size", "4"),
    "pp2 vpp": ("--target-pipeline-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
    "pp2 list": ("--target-pipeline-parallel-size", "2", "--num-layer-list", "3,1"),
    "pp3 noop": ("--target-pipeline-parallel-size", "3", "--noop-layers", "0,5"),
    "te": ("--transformer-impl", "transformer_engine", "--target-tensor-parallel-size", "2"),
}


def to_tree(folder: Path, out: Path, *more: str | Path) -> Path:
    padding = ("--make-vocab-size-divisible-by", "128")
    return to_megatron(folder, out, "--save-format", "legacy", *padding, *more)


@pytest.mark.parametrize(("name", "layout"), [*zip(MODELS, cycle(LAYOUTS), strict=False)])
def test_every_model_comes_back_bit_for_bit(tmp_path: Path, name: str, layout: str) -> None:
    folder = hf_folder(name, VOCAB)
    tree = to_tree(folder, tmp_path / "mg", *LAYOUTS[layout])
    back = to_hf(tree, tmp_path / "back")
    assert_same(weights(back), weights(folder))
    assert_same_config(back, folder)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_are_shared_out_and_come_back(tmp_path: Path, name: str) -> None:
    folder = hf_folder(name, VOCAB)
    tree = to_tree(folder, tmp_path / "mg", *LAYOUTS["tp2 pp2"], "--target-expert-parallel-size", "2")
    files = {path.parent.name: load_rank(path)["model"] for path in tree.glob("iter_0000001/*/model_optim_rng.pt")}
    assert sorted(files) == [f"mp_rank_0{tp}_00{pp}_00{ep}" for tp in (0, 1) for pp in (0, 1) for ep in (0, 1)]
    experts = 4 // 2 if name == "mixtral" else 8 // 2
    for model in files.values():
        held = {int(key.split(".")[6]) for key in model if ".local_experts." in key}
        assert held == set(range(experts))
    first, second = files["mp_rank_00_001_000"], files["mp_rank_00_001_001"]
    assert first.keys() == second.keys()
    differs = {key for key in first if not torch.equal(first[key], second[key])}
    assert differs == {key for key in first if ".local_experts." in key}
    assert_same(weights(to_hf(tree, tmp_path / "back")), weights(folder))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trees_become_other_trees_and_saves(tmp_path: Path, layout: str) -> None:
    folder = hf_folder("q25tied", VOCAB)
    tree = to_tree(folder, tmp_path / "tree", *LAYOUTS[layout])
    assert (tree / "latest_checkpointed_iteration.txt").read_text() == "1"
    ranks = [load_rank(path) for path in sorted(tree.glob("iter_0000001/mp_rank_*/model_optim_rng.pt"))]
    assert {rank["iteration"] for rank in ranks} == {1}
    assert {rank["checkpoint_version"] for rank in ranks} == {3.0}
    megatron = ("--load-model-type", "mg", "--load-dir")
    other = tmp_path / "other"
    more = ("--save-format", "legacy", *LAYOUTS["tp2 pp2"], "--make-vocab-size-divisible-by", "1")
    run(*megatron, tree, "--save-dir", other, *more)
    assert len(list(other.glob("iter_0000001/mp_rank_0?_00?"))) == 4
    run(*megatron, other, "--save-dir", tmp_path / "save", "--params-dtype", "bf16")
    back = to_hf(tmp_path / "save", tmp_path / "back", "--params-dtype", "fp32")
    assert_same(weights(back), {name: tensor.bfloat16().float() for name, tensor in weights(folder).items()})


def test_a_tree_of_other_software_needs_the_folder_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf_folder("q25", VOCAB)
    tree = to_tree(folder, tmp_path / "tree", *LAYOUTS["tp2 pp2"]) / "iter_0000001"
    (tree / "conversion.json").unlink()
    for path in tree.glob("*/model_optim_rng.pt"):
        content = load_rank(path)
        del content["config"]
        torch.save(content, path)
    out = tmp_path / "out"
    flags = ("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", tree, "--save-dir", out)
    run(*flags, code=1)
    assert "does not say which model it is of" in capsys.readouterr().err
    run(*flags, "--hf-cfg-dir", hf_folder("q25tied", VOCAB), code=1)
    assert "untie_embeddings_and_output_weights" in capsys.readouterr().err
    assert_same(weights(to_hf(tree, out, "--hf-cfg-dir", folder)), weights(folder))


@pytest.mark.parametrize(
    ("layout", "flags", "says"),
    [
        ("pp3 noop", ("--noop-layers", "1,4"), ("noop_layers (1, 4)", "noop_layers (0, 5)")),
        ("pp2 list", ("--num-layer-list", "2,2"), ("layer_list (2, 2)", "layer_list (3, 1)")),
        ("tp2 pp2", ("--target-tensor-parallel-size", "4"), ("tp 4", "tp 2")),
    ],
)
def test_a_layout_that_contradicts_the_flags_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, flags: tuple[str, ...], says: tuple[str, str]
) -> None:
    tree = to_tree(hf_folder("q25", VOCAB), tmp_path / "tree", *LAYOUTS[layout])
    shared = ("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", tree, "--save-dir", tmp_path / "out")
    run(*shared, *flags, code=2)
    said = capsys.readouterr().err
    assert all(text in said for text in says)
    assert not (tmp_path / "out").exists()
    # The flags of MindSpeed-LLM's converters: what is written is for one process.
    same = LAYOUTS[layout][2:] if layout != "tp2 pp2" else ()
    run(*shared, *same, "--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "1")


@pytest.mark.parametrize(
    ("flags", "says", "code"),
    [
        (("--target-pipeline-parallel-size", "3"), "4 layers, --target-pipeline-parallel-size 3", 2),
        (("--target-pipeline-parallel-size", "2", "--num-layer-list", "2,1"), "2,1: 2 stages, 3 layers", 2),
        (
            ("--target-pipeline-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "2"),
            "2 layers a stage",
            2,
        ),
        (("--noop-layers", "6,1", "--target-pipeline-parallel-size", "2"), "--noop-layers", 2),
        (("--target-tensor-parallel-size", "8"), "4 heads", 1),
        (("--target-expert-parallel-size", "2"), "no experts", 2),
    ],
)
def test_layers_heads_and_experts_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str, code: int
) -> None:
    shared = ("--save-format", "legacy", "--load-dir", hf_folder("q25", VOCAB), "--save-dir", tmp_path / "out")
    run(*shared, *flags, code=code)
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_tree_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = to_tree(hf_folder("q25", VOCAB), tmp_path / "tree", *LAYOUTS["tp2 pp2"])
    path = tree / "iter_0000001" / "mp_rank_01_001" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-100])
    out = tmp_path / "out"
    run("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", tree, "--save-dir", out, code=1)
    assert "mp_rank_01_001" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree"]
