"""Folders in every form that transformers writes, and every way in which they can be broken."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.hf_io import ShardWriter, TensorInfo, open_tensors, plan_shards, read_config
from mindspeed_llm.errors import CheckpointError
from tests.fixtures import hf_folder


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return load_file(hf_folder("q25") / "model.safetensors")


def written(folder: Path, weights: dict[str, torch.Tensor], form: str) -> Path:
    """``weights`` as transformers stores them."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    shutil.copyfile(hf_folder("q25") / "config.json", folder / "config.json")
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif form == "bin shards":
        halves = dict(list(weights.items())[:20]), dict(list(weights.items())[20:])
        names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        for name, half in zip(names, halves, strict=True):
            torch.save(half, folder / name)
        index = {"weight_map": {key: name for name, half in zip(names, halves, strict=True) for key in half}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        model = AutoModelForCausalLM.from_pretrained(hf_folder("q25"))
        model.save_pretrained(folder, max_shard_size="300KB" if form == "shards" else "1GB")
    return folder


@pytest.mark.parametrize("form", ["single", "shards", "bin", "bin shards"])
def test_every_form_reads_alike(tmp_path: Path, weights: dict[str, torch.Tensor], form: str) -> None:
    folder = written(tmp_path / "m", weights, form)
    assert (len(list(folder.glob("*.safetensors"))) >= 3) == (form == "shards")
    with ExitStack() as stack:
        source = open_tensors(folder, stack)
        assert source.tensors.keys() == weights.keys()
        for name, tensor in weights.items():
            assert source.tensors[name] == TensorInfo(tuple(tensor.shape), tensor.dtype)
            assert torch.equal(source.read(name), tensor)
            assert torch.equal(source.read(name, rows=(3, 9)), tensor[3:9])
            if tensor.dim() == 2:
                assert torch.equal(source.read(name, (3, 9), (5, 11)), tensor[3:9, 5:11])


def failing(folder: Path) -> str:
    with ExitStack() as stack, pytest.raises(CheckpointError) as caught:
        open_tensors(folder, stack)
    return str(caught.value)


def test_missing_folders_and_configs_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no JSON object"):
        read_config(tmp_path)
    assert "has no weights" in failing(tmp_path)


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    folder = written(tmp_path / "m", weights, "shards")
    path = folder / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    first = next(iter(good["weight_map"]))

    path.write_text(json.dumps({"weight_map": {**good["weight_map"], "ghost.weight": good["weight_map"][first]}}))
    assert "named, but in no shard: ghost.weight (1 in all)" in failing(folder)
    path.write_text(json.dumps({"weight_map": {k: v for k, v in good["weight_map"].items() if k != first}}))
    assert f"in a shard, but not named: {first}" in failing(folder)
    path.write_text(json.dumps({"weight_map": {**good["weight_map"], first: "../../etc/passwd"}}))
    assert "not a file name beside the index" in failing(folder)
    path.write_text(json.dumps({}))
    assert "no weight_map" in failing(folder)
    path.write_text(json.dumps(good))
    shard = folder / good["weight_map"][first]
    shard.rename(folder / "gone")
    assert f"lacks shards that model.safetensors.index.json names\n  got: {shard.name}" in failing(folder)


@pytest.mark.parametrize("size", [0, 4, 5000])
def test_a_truncated_file_is_named(tmp_path: Path, weights: dict[str, torch.Tensor], size: int) -> None:
    for form, name in (("single", "model.safetensors"), ("bin", "pytorch_model.bin")):
        folder = written(tmp_path / form, weights, form)
        os.truncate(folder / name, size)
        text = failing(folder)
        assert name in text
        assert "cannot be read" in text


class Poison:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch poisoned",)


def test_a_poisoned_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model.norm.weight": Poison()}, tmp_path / "pytorch_model.bin")
    assert "without running code from it" in failing(tmp_path)
    assert not (tmp_path / "poisoned").exists()
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    assert "not a mapping" in failing(tmp_path)


def test_shards_keep_their_size_and_their_writer() -> None:
    tensors = {
        name: TensorInfo((size, 4), torch.float32) for name, size in zip("abcdef", (2, 2, 9, 1, 1, 1), strict=True)
    }
    plan = plan_shards(tensors, dict(zip("abcdef", (0, 0, 0, 1, 1, 0), strict=True)), max_bytes=64)
    assert [(writer, shard.file, shard.tensors) for writer, shard in plan] == [
        (0, "model-00001-of-00004.safetensors", ("a", "b")),
        (0, "model-00002-of-00004.safetensors", ("c",)),  # larger than a shard may be: alone
        (1, "model-00003-of-00004.safetensors", ("d", "e")),
        (0, "model-00004-of-00004.safetensors", ("f",)),
    ]
    (single,) = plan_shards(tensors, dict.fromkeys(tensors, 0))
    assert single[1].file == "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_safetensors_reads_what_the_writer_streams(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.randn(3, 5).t(),  # not contiguous
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "long.name.vector": torch.randn(7),
        "strided": torch.randn(14)[::2],
    }
    infos = {name: TensorInfo(tuple(tensor.shape), dtype) for name, tensor in tensors.items()}
    shards = [shard for _, shard in plan_shards(infos, dict.fromkeys(tensors, 0))]
    writer = ShardWriter(tmp_path, shards, infos)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name].to(dtype)) for name in tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_the_writer_refuses_gaps_and_surprises(tmp_path: Path) -> None:
    infos = {name: TensorInfo((2,), torch.float32) for name in "ab"}
    shards = [shard for _, shard in plan_shards(infos, dict.fromkeys(infos, 0))]
    writer = ShardWriter(tmp_path, shards, infos)
    with pytest.raises(CheckpointError, match="out of plan"):
        writer.write("b", torch.zeros(2))
    with pytest.raises(CheckpointError, match="out of plan"):
        writer.write("a", torch.zeros(3))
    writer.write("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"not every planned tensor.*\n.*e\.g\. b"):
        writer.finish()


def test_companions_come_along_unchanged(tmp_path: Path) -> None:
    source, out = hf_folder("q25"), tmp_path / "out"
    out.mkdir()
    hf_io.copy_companions(source, out, hf_io.TOKENIZER_FILES)
    copied = {path.name for path in out.iterdir()}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in copied)
