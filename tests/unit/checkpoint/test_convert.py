"""Conversions as the command line does them: every model there and back, and what is refused."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.checkpoint.convert import execution
from mindspeed_llm.checkpoint.convert.conversion import Settings, plan
from mindspeed_llm.checkpoint.convert.torch_dist import TorchDistSource
from mindspeed_llm.cli import convert
from mindspeed_llm.models.registry import family_for
from tests.fixtures import MODELS, hf_folder, tokenizer_folder

VOCAB = 323
ORACLE = "oracle.safetensors"
"""Stands where transformers has no class for the family."""


def run(*argv: str | Path, code: int = 0) -> None:
    assert convert.main([str(word) for word in argv]) == code


def to_megatron(folder: Path, out: Path, *more: str | Path) -> Path:
    run("--load-dir", folder, "--save-dir", out, *more)
    return out


def to_hf(folder: Path, out: Path, *more: str | Path) -> Path:
    run("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", folder, "--save-dir", out, *more)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_same_config(found: Path, expected: Path) -> None:
    """All keys; the dtype, which has had two names, under both."""
    after, before = config(found), config(expected)
    names = {"dtype", "torch_dtype"}
    assert {after.pop(name) for name in names} == {before[name] for name in names & before.keys()}
    assert after == {name: value for name, value in before.items() if name not in names}


def assert_loads(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, said = loaded
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.vocab_size == VOCAB


@pytest.mark.parametrize("name", MODELS)
def test_every_model_comes_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # The embedding goes through in several blocks.
    monkeypatch.setattr(execution, "BLOCK_BYTES", 2**14)
    folder = hf_folder(name, VOCAB)
    mg = to_megatron(folder, tmp_path / "mg", "--make-vocab-size-divisible-by", "128")
    assert (mg / "latest_checkpointed_iteration.txt").read_text() == "1"
    back = to_hf(mg, tmp_path / "back")
    assert_same(weights(back), weights(folder))
    assert_same_config(back, folder)
    if not (folder / ORACLE).exists():
        assert_loads(back)
    for file in tokenizer_folder().iterdir():
        assert (back / file.name).read_bytes() == file.read_bytes()
    generation = [path.read_bytes() for path in folder.glob("generation_config.json")]
    assert [path.read_bytes() for path in back.glob("generation_config.json")] == generation


def test_both_other_pairs(tmp_path: Path) -> None:
    """hf -> hf and mg -> mg: another dtype, another padding; what rounding did stays done."""
    folder = hf_folder("q25tied", VOCAB)
    expected = {name: tensor.bfloat16() for name, tensor in weights(folder).items()}
    half = tmp_path / "half"
    run("--save-model-type", "hf", "--load-dir", folder, "--save-dir", half, "--params-dtype", "bf16")
    assert_same(weights(half), expected)
    assert config(half)["dtype"] == "bfloat16"
    mg = to_megatron(half, tmp_path / "mg", "--make-vocab-size-divisible-by", "128")
    wide = tmp_path / "wide"
    more = ("--params-dtype", "fp32", "--make-vocab-size-divisible-by", "7", "--target-tensor-parallel-size", "2")
    run("--load-model-type", "mg", "--load-dir", mg, "--save-dir", wide, *more)
    source = TorchDistSource(wide / "iter_0000001")
    embedding = source.read("embedding.word_embeddings.weight")
    assert embedding.shape[0] == 336
    assert not embedding[VOCAB:].any()
    back = to_hf(wide, tmp_path / "back", "--params-dtype", "bf16")
    assert_same(weights(back), expected)
    assert "lm_head.weight" not in weights(back)
    assert config(back)["tie_word_embeddings"] is True


@pytest.mark.parametrize("form", ["sharded", "pickled"])
def test_every_form_of_input(tmp_path: Path, form: str) -> None:
    from transformers import AutoModelForCausalLM

    folder, copy = hf_folder("q25", VOCAB), tmp_path / "copy"
    if form == "sharded":
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(copy, max_shard_size="200KB")
        assert len(list(copy.glob("*.safetensors"))) > 2
    else:
        shutil.copytree(folder, copy)
        torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
        (copy / "model.safetensors").unlink()
    assert_same(weights(to_hf(to_megatron(copy, tmp_path / "mg"), tmp_path / "back")), weights(folder))


def test_large_exports_are_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "SHARD_BYTES", 100_000)
    folder = hf_folder("q25", VOCAB)
    back = to_hf(to_megatron(folder, tmp_path / "mg"), tmp_path / "back")
    index = json.loads((back / "model.safetensors.index.json").read_text())
    held = {name: file.name for file in back.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(folder).values())
    assert len(set(held.values())) > 2


def test_columns_and_rows_are_read_alone(tmp_path: Path) -> None:
    folder = hf_folder("q25", VOCAB)
    source = TorchDistSource(to_megatron(folder, tmp_path / "mg") / "iter_0000001")
    down = weights(folder)["model.layers.2.mlp.down_proj.weight"]
    name = "decoder.layers.2.mlp.linear_fc2.weight"
    assert torch.equal(source.read(name), down)
    assert torch.equal(source.read(name, (3, 9), (64, 128)), down[3:9, 64:128])
    assert torch.equal(source.read(name, None, (0, 5)), down[:, :5])
    assert torch.equal(source.read("decoder.final_layernorm.weight", (1, 4)), weights(folder)["model.norm.weight"][1:4])


@pytest.mark.parametrize("name", ["q25tied", "llama31"])
def test_the_recorded_model_is_enough(tmp_path: Path, name: str) -> None:
    """Without config.json of the original: the same values in other words, and no tokenizer."""
    folder = hf_folder(name, VOCAB)
    mg = to_megatron(folder, tmp_path / "mg")
    (mg / "iter_0000001" / "conversion.json").unlink()
    back = to_hf(mg, tmp_path / "back")
    assert_same(weights(back), weights(folder))
    family = family_for(config(folder))
    assert family.config_to_values(config(back)) == family.config_to_values(config(folder))
    assert not (back / "tokenizer.json").exists()
    again = to_hf(mg, tmp_path / "again", "--hf-cfg-dir", folder)
    assert_same_config(again, folder)
    assert (again / "tokenizer.json").is_file()


def test_fewer_layers(tmp_path: Path) -> None:
    folder = hf_folder("q25window", VOCAB)
    back = to_hf(to_megatron(folder, tmp_path / "mg", "--num-layers", "3"), tmp_path / "back")
    kept = {name: tensor for name, tensor in weights(folder).items() if ".layers.3." not in name}
    assert_same(weights(back), kept)
    assert config(back)["num_hidden_layers"] == len(config(back)["layer_types"]) == 3


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--load-dir", hf_folder("q25", VOCAB), "--save-dir", tmp_path / "mg", "--dry-run")
    assert list(tmp_path.iterdir()) == []
    shown = capsys.readouterr().out
    assert "decoder.layers.3.self_attention.linear_qkv.weight" in shown
    assert "128 x 64" in shown


def test_flags_of_the_other_converters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--use-mcore-models", "--model-type", "GPT", "--tokenizer-model", "x", "--loader", "hf", "--saver", "mg")
    to_megatron(hf_folder("q25", VOCAB), tmp_path / "mg", *more, "--spec", "a", "b", "--ckpt-format", "torch_dist")
    assert capsys.readouterr().err.count("has no effect here") == 6
    run("--load-dir", "a", "--save-dir", "b", "--lora-r", "8", code=2)
    assert "--lora-r is not available: adapters" in capsys.readouterr().err
    run("--load-dir", "a", "--save-dir", "b", "--model-type", "BERT", code=2)
    run("--load-dir", "a", "--save-dir", "b", "--tensor-size", "8", code=2)
    assert "Unknown flags" in capsys.readouterr().err


LAYOUTS = {
    "layers do not divide over": ("q25", "--target-pipeline-parallel-size 3"),
    "4 layers a stage": ("q25", "--num-layers-per-virtual-pipeline-stage 3"),
    "2 layers a stage": ("q25", "--target-pipeline-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"),
    "2 stages, 3 layers": ("q25", "--target-pipeline-parallel-size 2 --num-layer-list 1,2"),
    "1 stages, 4 layers": ("q25", "--target-pipeline-parallel-size 2 --num-layer-list 4"),
    "--num-layer-list does not go with": (
        "q25",
        "--target-pipeline-parallel-size 2 --num-layer-list 1,3 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "does not name places": ("q25", "--noop-layers 7"),
    "5 layers, --target-pipeline": ("q25", "--target-pipeline-parallel-size 2 --noop-layers 4"),
    "4 heads, 2 KV heads, target-tensor-parallel-size 3": ("q25", "--target-tensor-parallel-size 3"),
    "no experts": ("q25", "--target-expert-parallel-size 2"),
    "1 to 4": ("q25", "--num-layers 5"),
}


@pytest.mark.parametrize("said", LAYOUTS)
def test_layouts_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str) -> None:
    """Case 13: no layer is dropped silently; case 19: heads that cannot be cut."""
    name, flags = LAYOUTS[said]
    code = convert.main(["--load-dir", str(hf_folder(name, VOCAB)), "--save-dir", str(tmp_path / "mg"), *flags.split()])
    assert code in (1, 2)
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def changed(folder: Path, to: Path, tensors: dict[str, torch.Tensor | None] | None = None, **keys: Any) -> Path:
    """A copy with other tensors (None: without it) and other keys of config.json."""
    shutil.copytree(folder, to)
    held = load_file(to / "model.safetensors") | (tensors or {})
    save_file({name: t for name, t in held.items() if t is not None}, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text(json.dumps(config(to) | keys))
    return to


def test_weights_that_do_not_fit_their_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, tied = hf_folder("q25", VOCAB), hf_folder("q25tied", VOCAB)
    wrong = {
        "missing in the checkpoint: model.norm.weight": changed(folder, tmp_path / "a", {"model.norm.weight": None}),
        "not in the model: extra": changed(folder, tmp_path / "b", {"extra": torch.zeros(2)}),
        "other shape than the model's": changed(folder, tmp_path / "c", {"model.norm.weight": torch.zeros(32)}),
        "[256, 64]": changed(folder, tmp_path / "d", intermediate_size=256),
        "no model family": changed(folder, tmp_path / "e", architectures=["MambaForCausalLM"], model_type="mamba"),
        "two different tensors": changed(tied, tmp_path / "f", {"lm_head.weight": torch.zeros(VOCAB, 64)}),
        "missing in the checkpoint: lm_head.weight": changed(tied, tmp_path / "g", tie_word_embeddings=False),
    }
    for said, bad in wrong.items():
        run("--load-dir", bad, "--save-dir", tmp_path / "mg", code=1)
        assert said in " ".join(capsys.readouterr().err.split()), said
    assert not (tmp_path / "mg").exists()


def test_folders_that_are_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hf_folder("q25", VOCAB)
    mg = to_megatron(folder, tmp_path / "mg")
    trees = ("--load-model-type", "mg", "--save-model-type", "hf")

    def refused(said: str, *argv: str | Path, code: int = 1) -> None:
        run(*argv, code=code)
        assert said in capsys.readouterr().err

    refused("has no config.json", "--load-dir", mg, "--save-dir", tmp_path / "out")
    refused("not a folder", "--load-dir", tmp_path / "none", "--save-dir", tmp_path / "out")
    refused("--load-model-type hf", *trees, "--load-dir", folder, "--save-dir", tmp_path / "out")
    refused("is no checkpoint", *trees, "--load-dir", tmp_path, "--save-dir", tmp_path / "out")
    refused("overwrite its input", "--load-dir", folder, "--save-dir", folder)
    refused("overwrite its input", *trees, "--load-dir", mg, "--save-dir", mg)
    refused("overwrite its input", *trees, "--load-dir", mg, "--save-dir", folder, "--hf-cfg-dir", folder)
    refused("not an earlier export", "--load-dir", folder, "--save-dir", tmp_path)
    refused(
        "is not of the model",
        *trees,
        "--load-dir",
        mg,
        "--save-dir",
        tmp_path / "out",
        "--hf-cfg-dir",
        hf_folder("q25", 328),
    )
    layers = ("--load-dir", mg, "--save-dir", tmp_path / "out", "--num-layers", "2")
    refused("--num-layers is not that", *trees, *layers, code=2)
    # An earlier conversion may be replaced; what a run has saved there since may not.
    to_megatron(hf_folder("llama31", VOCAB), mg)
    assert_same(weights(to_hf(mg, tmp_path / "back")), weights(hf_folder("llama31", VOCAB)))
    (mg / "iter_0000002").mkdir()
    refused("checkpoints of a run", "--load-dir", folder, "--save-dir", mg)


def test_a_damaged_save_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit in the elements, then a file that is too short."""
    mg = to_megatron(hf_folder("q25", VOCAB), tmp_path / "mg")
    file = mg / "iter_0000001" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[30_000] ^= 1
    file.write_bytes(content)
    trees = ("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", mg, "--save-dir", tmp_path / "out")
    run(*trees, code=1)
    assert "the checksum does not fit" in capsys.readouterr().err
    file.write_bytes(content[: len(content) // 2])
    run(*trees, code=1)
    assert "is not whole" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mg"]


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mindspeed_llm.checkpoint.convert.torch_dist.sync_file", full)
    run("--load-dir", hf_folder("q25", VOCAB), "--save-dir", tmp_path / "mg", code=1)
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_memory_holds_blocks_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads ask for no more than a block, in the order of what is written."""
    monkeypatch.setattr(execution, "BLOCK_BYTES", 2**12)
    folder = hf_folder("q25", VOCAB)
    with ExitStack() as stack:
        planned = plan(Settings(folder, tmp_path / "mg", "hf", "mg"), stack)
        read, sizes = planned.source.read, list[int]()

        def noted(*args: Any) -> torch.Tensor:
            found = read(*args)
            sizes.append(found.nbytes)
            return found

        monkeypatch.setattr(planned.source, "read", noted)
        execution.execute(planned)
    assert max(sizes) <= 2**12
    assert sum(sizes) == planned.nbytes
