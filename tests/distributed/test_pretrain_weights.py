"""Where the weights of a run come from and go to: ``--load`` and ``--save-hf``, through the command line."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_llm.checkpoint.in_use import hold
from tests.distributed.launch import (
    TINY,
    command_line,
    global_batches,
    launch,
    read_rows,
    reference,
    succeed,
    write_corpus,
)
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder
from tests.parity.reference import relative

Flags = dict[str, Any]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def flags(corpus: str, tmp_path: Path) -> Flags:
    return {**TINY, "--load": hf_folder("q25"), "--data-path": corpus, "--metrics-file": tmp_path / "metrics.jsonl"}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# ------------------------------------------------------------------------------------------------------------- exports


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("q25", "one"),
        ("q25", "tp2+pp2"),
        ("q25", "pp2+vpp2"),
        ("q25tied", "one"),
        ("q25tied", "tp2+pp2"),
        ("q25tied", "pp4"),
        ("q25tied", "pp2+vpp2"),
        ("llama31", "tp4+dp2"),
    ],
)
def test_no_steps_give_back_every_bit(pool: Pool, tmp_path: Path, name: str, layout: str) -> None:
    # Padded to 384 and more by the default divisor.
    vocab = 323
    folder, out = hf_folder(name, vocab), tmp_path / "out"
    succeed(pool, {"--load": folder, "--train-iters": 0, "--save-hf": out}, layout)
    assert_same(stored(out), stored(folder))
    assert stored(out)["model.embed_tokens.weight"].shape[0] == vocab
    assert ("lm_head.weight" in stored(out)) == ("tied" not in name)
    written, given = (json.loads((path / "config.json").read_text()) for path in (out, folder))
    # The second spelling is for older versions of transformers.
    assert written.pop("torch_dtype") == written["dtype"]
    assert written == given


@pytest.mark.parametrize(("name", "layout"), [("q25", "tp2+pp2"), ("q25tied", "pp2+vpp2")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_loads_a_trained_export(
    pool: Pool, flags: Flags, tmp_path: Path, name: str, layout: str, dtype: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, out = hf_folder(name, 323), tmp_path / "out"
    more = {"--load": folder, "--save-hf": out, "--params-dtype": dtype, "--make-vocab-size-divisible-by": 128}
    succeed(pool, flags | more | {"--save-hf-interval": 2}, layout)
    asked = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for place in (out, out / "iter_0000002"):
        loading: Any = AutoModelForCausalLM.from_pretrained(place, dtype="auto", output_loading_info=True)
        model, info = loading
        assert not any(info.values()), info
        assert {tensor.dtype for tensor in stored(place).values()} == {asked}
        assert model.dtype == asked
        assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 323
        assert model.config.tie_word_embeddings == ("tied" in name)
        assert AutoTokenizer.from_pretrained(place).chat_template == AutoTokenizer.from_pretrained(folder).chat_template
        assert (
            AutoTokenizer.from_pretrained(place)("abc").input_ids
            == AutoTokenizer.from_pretrained(folder)("abc").input_ids
        )
        assert GenerationConfig.from_pretrained(place).eos_token_id == 256
    name_of_one = "model.layers.1.mlp.down_proj.weight"
    three = [stored(place)[name_of_one] for place in (folder, out / "iter_0000002", out)]
    assert not torch.equal(three[0].to(asked), three[1])
    assert not torch.equal(three[1], three[2])
    # Again, over the earlier export and its intermediate ones.
    succeed(pool, flags | more | {"--train-iters": 0}, layout)
    assert torch.equal(stored(out)[name_of_one], three[0].to(asked))
    assert (out / "iter_0000002" / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "layout", "passes"),
    [("q25", "tp2+sp+dp2+dist+reduce+gather", 2), ("q25tied", "pp2+vpp2", 4), ("llama31", "tp4", 4)],
)
def test_an_export_is_what_the_run_ended_with(
    pool: Pool, flags: Flags, tmp_path: Path, name: str, layout: str, passes: int
) -> None:
    """The loss that transformers finds in an export is that of the run's own evaluation."""
    more = {"--load": hf_folder(name), "--save-hf": tmp_path / "out", "--eval-iters": 2, "--split": "70,30,0"}
    results = succeed(pool, flags | more, layout)
    (valid,) = read_rows(tmp_path / "metrics.jsonl", "valid")
    assert valid["iteration"] == 3
    steps = global_batches(results[:1] if passes == 4 else results, passes)
    assert len(steps) == 5
    loss, _ = reference(tmp_path / "out", [batch for step in steps[3:] for batch in step])
    assert relative(valid["lm_loss"], loss) <= 1e-5
    assert relative(valid["lm_loss"], read_rows(tmp_path / "metrics.jsonl")[0]["lm_loss"]) > 0.05


def test_tied_copies_stay_equal(pool: Pool, flags: Flags, tmp_path: Path) -> None:
    tied = hf_folder("q25tied")
    for layout, last in (("pp2", 1), ("tp2+pp2", 2), ("pp2+vpp2", 1), ("pp2+dp2+dist+reduce", 2)):
        results = succeed(pool, flags | {"--load": tied}, layout)
        for first, other in zip(results[:last], results[last:], strict=True):
            embedding = first["weights"]["0.embedding.word_embeddings.weight"]
            (copy,) = [value for name, value in other["weights"].items() if name.endswith("output_layer.weight")]
            assert torch.equal(embedding, copy), layout
        assert not torch.equal(results[0]["weights"]["0.embedding.word_embeddings.weight"][:64],
                               stored(tied)["model.embed_tokens.weight"][:64])  # fmt: skip


@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_an_export_overwrites_nothing_of_others(pool: Pool, flags: Flags, tmp_path: Path, layout: str) -> None:
    source = tmp_path / "in"
    shutil.copytree(flags["--load"], source)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    kept = {path.name: path.read_bytes() for path in source.iterdir()}
    for target, words in (
        (source, "overwrite its input"),
        (tmp_path, "overwrite its input"),
        (foreign, "not an earlier export"),
    ):
        for result in launch(pool, flags | {"--load": source, "--save-hf": target}, layout):
            assert result["code"] == 1
            assert words in result["err"]
            assert str(target) in result["err"]
            assert not result["batches"], "it was found out after training"
    assert {path.name: path.read_bytes() for path in source.iterdir()} == kept
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]


# -------------------------------------------------------------------------------------------------------------- --load


@pytest.mark.parametrize(
    ("name", "layout"),
    [("q25", "tp2"), ("q25", "tp2+sp+pp2"), ("q25tied", "one"), ("q25tied", "pp2+vpp2"), ("llama31", "tp4+sp")],
)
def test_the_first_loss_is_that_of_the_loaded_model(
    pool: Pool, flags: Flags, tmp_path: Path, name: str, layout: str
) -> None:
    folder = hf_folder(name)
    results = succeed(pool, flags | {"--load": folder, "--train-iters": 1}, layout)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    loss, norm = reference(folder, global_batches(results[:1], 4)[0])
    assert relative(row["lm_loss"], loss) <= 1e-5
    assert relative(row["grad_norm"], norm) <= 1e-4


@pytest.mark.parametrize("layout", ["one", "tp2+dp2"])
def test_a_padded_vocabulary_does_not_change_the_loss(pool: Pool, flags: Flags, tmp_path: Path, layout: str) -> None:
    folder = hf_folder("q25", 323)
    more = {"--load": folder, "--train-iters": 1, "--make-vocab-size-divisible-by": 128}
    results = succeed(pool, flags | more, layout)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    loss, norm = reference(folder, global_batches(results, row["num_micro_batches"])[0])
    assert relative(row["lm_loss"], loss) <= 1e-5
    assert relative(row["grad_norm"], norm) <= 1e-4


def missing(folder: Path) -> None:
    """Nothing at all."""


def empty(folder: Path) -> None:
    folder.mkdir()


def without_tracker(folder: Path) -> None:
    (folder / "iter_0000010").mkdir(parents=True)
    (folder / "iter_0000010" / "metadata.json").write_text("{}")


def tracker_without_save(folder: Path) -> None:
    without_tracker(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("20")


def tracker_of_nonsense(folder: Path) -> None:
    without_tracker(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("twenty")


def other_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("hello")


def config_without_weights(folder: Path) -> None:
    shutil.copytree(hf_folder("q25"), folder)
    (folder / "model.safetensors").unlink()


def truncated_weights(folder: Path) -> None:
    shutil.copytree(hf_folder("q25"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("make", "more", "words"),
    [
        (missing, {}, ("no such folder", "correct --load")),
        (empty, {}, ("neither a Hugging Face folder nor a checkpoint", "correct --load")),
        (without_tracker, {}, ("iter_0000010", "common.pt", "--ckpt-step")),
        (tracker_without_save, {}, ("iteration 20", "iter_0000010", "--ckpt-step")),
        (tracker_of_nonsense, {}, ("twenty", "latest_checkpointed_iteration.txt")),
        (without_tracker, {"--ckpt-step": 30}, ("iteration 30", "iter_0000010", "--ckpt-step")),
        (other_files, {}, ("notes.txt", "correct --load")),
        (config_without_weights, {}, ("model.safetensors",)),
        (truncated_weights, {}, ("model.safetensors",)),
    ],
)
def test_a_wrong_load_never_trains(
    pool: Pool, flags: Flags, tmp_path: Path, make: Callable[[Path], None], more: Flags, words: tuple[str, ...]
) -> None:
    # Several ranks for those that are found out only when weights are read.
    layout = "tp2+pp2" if make in (missing, config_without_weights, truncated_weights) else "one"
    place = tmp_path / "place"
    make(place)
    for result in launch(pool, flags | more | {"--load": place, "--hf-config": hf_folder("q25")}, layout):
        assert result["code"] == 1
        assert str(place) in result["err"]
        assert "fix:" in result["err"]
        assert [word for word in words if word not in result["err"]] == [], result["err"]
        assert "Traceback" not in result["err"]
        assert not result["batches"]


@pytest.mark.parametrize("make", [missing, empty])
def test_the_restart_idiom_says_that_it_starts_from_random_weights(
    pool: Pool, flags: Flags, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    place = tmp_path / "place"
    make(place)
    restart = flags | {"--load": place, "--save": place, "--hf-config": hf_folder("q25")}
    for result in launch(pool, restart | {"--exit-on-missing-checkpoint": True}, "tp2"):
        assert result["code"] == 1
        assert str(place) in result["err"]
    # The same words again and again: a job scheduler restarts them as they are.
    first = succeed(pool, restart | {"--exit-interval": 2}, "tp2")
    assert "random weights" in first[0]["err"]
    assert read_rows(tmp_path / "metrics.jsonl")[0]["lm_loss"] == pytest.approx(math.log(328), rel=0.05)
    second = succeed(pool, restart | {"--exit-interval": 2}, "tp2")
    assert "random weights" not in second[0]["err"]
    assert [row["load"] for row in read_rows(tmp_path / "metrics.jsonl", "start")] == ["random", "checkpoint"]
    assert [row["iteration"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_another_schedule_on_resume_is_a_choice(pool: Pool, flags: Flags, tmp_path: Path) -> None:
    place = tmp_path / "place"
    keep = flags | {"--save": place, "--lr-decay-style": "linear", "--train-iters": 2}
    succeed(pool, keep)
    longer = keep | {"--load": place, "--hf-config": flags["--load"], "--train-iters": 4}
    for result in launch(pool, longer, "dp2"):
        assert result["code"] == 1
        assert "--override-opt-param-scheduler" in result["err"]
        assert "Traceback" not in result["err"]
    succeed(pool, longer | {"--override-opt-param-scheduler": True}, "dp2")
    rates = [row["learning_rate"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4], rel=1e-12)


def test_a_folder_with_saves_and_no_tracker_is_no_fresh_start(pool: Pool, flags: Flags, tmp_path: Path) -> None:
    place = tmp_path / "place"
    without_tracker(place)
    for result in launch(pool, flags | {"--load": place, "--save": place, "--hf-config": hf_folder("q25")}):
        assert result["code"] == 1
        assert "iter_0000010" in result["err"]


def test_a_flag_that_contradicts_the_weights_is_refused(pool: Pool, flags: Flags) -> None:
    for result in launch(pool, flags | {"--hidden-size": 128}):
        assert result["code"] == 2
        assert "--hidden-size" in result["err"]
        assert "64" in result["err"]


def test_the_root_script_is_the_same_command() -> None:
    import subprocess
    import sys

    from tests.distributed.pool import ROOT

    argv = command_line({"--load": "/nowhere", "--hf-config": hf_folder("q25"), **TINY, "--mock-data": True})
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_runs_do_not_save_into_one_folder(pool: Pool, flags: Flags, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with hold(place):
        for result in launch(pool, flags | {"--save": place}, "tp2"):
            assert result["code"] == 1
            assert f"another run writes to --save {place}" in result["err"]
            assert f"process {os.getpid()} on" in result["err"]
    succeed(pool, flags | {"--save": place}, "tp2")
    assert not (place / ".in_use.json").exists()
