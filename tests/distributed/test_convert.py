"""Converted checkpoints are read by megatron-core's own loader, in any layout, and saves of runs are converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.checkpoint.survey import Save
from tests.distributed.launch import TINY, succeed, write_corpus
from tests.distributed.pool import Pool
from tests.fixtures import MODELS, hf_folder
from tests.unit.checkpoint.test_convert import (
    ORACLE,
    assert_same,
    assert_same_config,
    config,
    to_hf,
    to_megatron,
    weights,
)

CASES = "tests.distributed.cases_convert"
VOCAB = 323


@pytest.mark.parametrize("name", MODELS)
def test_megatron_core_loads_what_was_converted(pool: Pool, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = hf_folder(name, VOCAB)
    save = to_megatron(folder, tmp_path / "mg") / "iter_0000001"
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = pool.run(
        f"{CASES}:load", 1, folder=folder, converted=save, ids=ids, make_vocab_size_divisible_by=1
    )[0]
    assert_same(found["weights"], weights(folder))
    stored = Save(save)
    named = {tensor.name: tensor.shape for tensor in stored.tensors.values()}
    assert named | dict.fromkeys(stored.objects) == found["saved"]
    if (folder / ORACLE).exists():
        return
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(found["logits"], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "vpp", "ep"),
    [
        ("q25", 2, 2, None, 1),
        ("q25tied", 2, 2, None, 1),
        ("q25tied", 1, 4, None, 1),
        ("llama31", 1, 2, 2, 1),
        ("mixtral", 2, 2, None, 2),
        ("gpt_oss", 1, 2, None, 2),
    ],
)
def test_any_layout_loads_the_same_files(
    pool: Pool, tmp_path: Path, name: str, tp: int, pp: int, vpp: int | None, ep: int
) -> None:
    folder = hf_folder(name, VOCAB)
    save = to_megatron(folder, tmp_path / "mg", "--make-vocab-size-divisible-by", "128") / "iter_0000001"
    layout = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "expert_model_parallel_size": ep,
    }
    found = pool.run(f"{CASES}:load", tp * pp * ep, folder=folder, converted=save, **layout)
    assert_same(found[0]["weights"], weights(folder))


@pytest.mark.parametrize(("name", "tp", "pp", "vpp"), [("q25", 2, 2, None), ("q25tied", 1, 2, 2)])
def test_a_save_of_a_run_becomes_a_model(
    pool: Pool, tmp_path: Path, name: str, tp: int, pp: int, vpp: int | None
) -> None:
    """No other folder need be named: the save says what the model is, and where its tokenizer was."""
    folder = hf_folder(name, VOCAB)
    argv = ["--load", folder, "--save", tmp_path / "run", "--train-iters", 0, "--use-distributed-optimizer"]
    argv += ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
    argv += ["--num-virtual-stages-per-pipeline-rank", vpp] if vpp else []
    ranks = pool.run("tests.distributed.cases_pretrain:command", tp * pp, argv=[str(word) for word in argv])
    assert [rank["code"] for rank in ranks] == [0] * tp * pp, ranks[0]["err"]
    back = to_hf(tmp_path / "run", tmp_path / "back")
    assert_same(weights(back), weights(folder))
    assert_same_config(back, folder)
    assert (back / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["q25", "q25tied"])
def test_a_trained_save_loses_its_padding(pool: Pool, tmp_path: Path, name: str) -> None:
    """Case 5: training moves rows above the vocabulary; the converter is not told of them, nor takes the tokenizer's
    260 tokens for the model's 323. The run's own export has the same weights."""
    flags = {**TINY, "--load": hf_folder(name, VOCAB), "--data-path": write_corpus(tmp_path), "--train-iters": 1}
    more = {"--make-vocab-size-divisible-by": 128, "--save": tmp_path / "run", "--save-hf": tmp_path / "hf"}
    succeed(pool, flags | more, "tp2")
    back = to_hf(tmp_path / "run", tmp_path / "back")
    assert weights(back)["model.embed_tokens.weight"].shape[0] == config(back)["vocab_size"] == VOCAB
    assert_same(weights(back), weights(tmp_path / "hf"))
    assert not torch.equal(weights(back)["model.norm.weight"], weights(hf_folder(name, VOCAB))["model.norm.weight"])


def test_a_run_starts_from_converted_weights(pool: Pool, tmp_path: Path) -> None:
    folder = hf_folder("q25", VOCAB)
    mg = to_megatron(folder, tmp_path / "mg")
    argv = ["--load", mg, "--hf-config", folder, "--save-hf", tmp_path / "out", "--train-iters", 0]
    (run,) = pool.run("tests.distributed.cases_pretrain:command", 1, argv=[str(word) for word in argv])
    assert run["code"] == 0, run["err"]
    assert "the run begins at iteration 0 with a fresh optimizer" in run["err"]
    assert_same(weights(tmp_path / "out"), weights(folder))
