"""Hugging Face weights into real model chunks of every layout and back, on gloo ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.pool import Pool
from tests.fixtures import hf_folder

CASES = "tests.distributed.cases_hf_weights"
VOCAB = 323  # padded to 384 at TP1, 512 at TP2, 1024 at TP8


def reference(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("name", "tp", "pp", "vpp", "dp", "ep"),
    [
        ("q25", 1, 1, None, 1, 1),
        ("q25", 2, 1, None, 1, 1),
        ("q25", 4, 1, None, 1, 1),  # fewer KV heads (2) than ranks
        ("q25", 2, 2, None, 2, 1),
        ("q25", 1, 2, 2, 1, 1),
        ("q25tied", 2, 2, None, 1, 1),
        ("q25tied", 1, 4, None, 1, 1),
        ("q25tied", 1, 2, 2, 1, 1),
        ("llama31", 2, 2, 2, 1, 1),
        ("llama32tied", 4, 1, None, 1, 1),
        ("llamabias", 2, 2, None, 1, 1),
        ("mixtral", 1, 1, None, 4, 2),
        ("qwen2_moe", 2, 2, None, 2, 2),
        ("deepseek_v3", 2, 2, None, 1, 2),  # one expert-tensor-parallel rank
        ("gpt_oss", 2, 2, None, 1, 2),  # all experts of a layer in one tensor
    ],
)
def test_every_layout_gives_back_the_same_bits(
    pool: Pool, tmp_path: Path, name: str, tp: int, pp: int, vpp: int | None, dp: int, ep: int
) -> None:
    folder = hf_folder(name, VOCAB)
    results: list[dict[str, Any]] = pool.run(
        f"{CASES}:round_trip",
        tp * pp * dp,
        folder=folder,
        out=tmp_path / "out",
        wrapped=dp > 1,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if ep > dp else None,
        sequence_parallel=ep > 1 and tp > 1,
    )
    expected = reference(folder)
    assert_same(results[0]["stream"], expected)
    assert_same(exported(tmp_path / "out"), expected)
    # With tp-dp-pp rank order, one replica's ranks cover the model; nothing stays unfilled and padding is zero.
    for result in results:
        for tensor in result["live"].values():
            assert torch.isfinite(tensor).all()
    first = [result["live"].get("embedding.word_embeddings.weight") for result in results[:tp]]
    embedding = torch.cat([part for part in first if part is not None])
    assert embedding.shape[0] == math.ceil(VOCAB / (128 * tp)) * 128 * tp
    assert torch.equal(embedding[VOCAB:], torch.zeros_like(embedding[VOCAB:]))


@pytest.mark.parametrize("name", ["q25", "q25tied", "llama31", "llamalin", "llamayarn", "llamabias", "q25window"])
def test_a_loaded_model_computes_what_transformers_does(pool: Pool, name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = hf_folder(name, VOCAB)
    ids = torch.arange(2 * 100).reshape(2, 100) * 7 % 256
    (found,) = pool.run(f"{CASES}:logits", 1, folder=folder, ids=ids)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    assert (found[:, :, :VOCAB] - expected).abs().max() <= 2e-5


def test_a_sharded_export_loads_in_transformers_with_nothing_missing(pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, out = hf_folder("q25", VOCAB), tmp_path / "out"
    pool.run(f"{CASES}:round_trip", 2, folder=folder, out=out, wrapped=False, pipeline_model_parallel_size=2)
    loading: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    model, info = loading
    assert not any(info.values())
    assert_same(dict(model.state_dict()), reference(folder))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in out.glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in reference(folder).values())
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(folder).chat_template


def test_a_bf16_model_streams_its_own_bits_and_saves_them_as_asked(pool: Pool, tmp_path: Path) -> None:
    folder = hf_folder("q25tied", VOCAB)
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "bf16": True}
    results = pool.run(f"{CASES}:round_trip", 4, folder=folder, out=tmp_path / "out", wrapped=True, **layout)
    rounded = {name: tensor.bfloat16() for name, tensor in reference(folder).items()}
    assert_same(results[0]["stream"], rounded)
    assert [len(result["stream"]) for result in results[1:]] == [0, 0, 0]
    assert_same(exported(tmp_path / "out"), {name: tensor.float() for name, tensor in rounded.items()})
