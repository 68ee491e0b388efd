"""What ``--load`` turns out to be, and what an export takes from where."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.checkpoint.origin import Origin, find_origin
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import CheckpointError, ConfigError
from mindspeed_llm.training.weights import export_dtype, family_of, hf_source

TRACKER = "latest_checkpointed_iteration.txt"


def configuration(**values: Any) -> RunConfig:
    model = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "train_iters": 0,
    }
    return from_values({**model, **values}, world_size=1)


def saves(root: Path, *iterations: int) -> Path:
    for iteration in iterations:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "metadata.json").write_text("{}")
    return root


def of_megatron(root: Path, name: str, tracker: str) -> Path:
    """A save with what tells Megatron-LM's from ours."""
    (root / name).mkdir(parents=True)
    (root / name / "metadata.json").write_text("{}")
    torch.save({"args": argparse.Namespace(lr=1.0), "iteration": 7}, root / name / "common.pt")
    (root / TRACKER).write_text(tracker)
    return root


def hugging_face(root: Path) -> Path:
    root.mkdir()
    (root / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return root


def test_nothing_to_load_is_random() -> None:
    assert find_origin(configuration()) == Origin("random")


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf")
    assert find_origin(configuration(load=str(folder))) == Origin("hf", folder)


def test_the_tracker_names_the_save_unless_a_flag_does(tmp_path: Path) -> None:
    root = saves(tmp_path, 10, 20)
    (root / TRACKER).write_text("20\n")
    assert find_origin(configuration(load=str(root))) == Origin("checkpoint", root, 20)
    assert find_origin(configuration(load=str(root), ckpt_step=10)) == Origin("checkpoint", root, 10)
    with pytest.raises(CheckpointError, match="iteration 30") as error:
        find_origin(configuration(load=str(root), ckpt_step=30))
    assert "iter_0000010" in str(error.value)


def test_a_step_that_is_not_there_is_no_fresh_start(tmp_path: Path) -> None:
    hf, save = str(hugging_face(tmp_path / "hf")), str(tmp_path / "save")
    for more in ({}, {"pretrained_checkpoint": hf}):
        with pytest.raises(CheckpointError, match="no checkpoint of iteration 10"):
            find_origin(configuration(load=save, save=save, ckpt_step=10, **more))
    with pytest.raises(CheckpointError, match="chooses among the saves"):
        find_origin(configuration(load=hf, ckpt_step=10))


def test_a_step_is_looked_for_among_the_saves_that_are_not_persistent_too(tmp_path: Path) -> None:
    root, other = saves(tmp_path / "save", 10), saves(tmp_path / "save" / "non_persistent", 10, 12)
    assert find_origin(configuration(load=str(root), ckpt_step=12)) == Origin("checkpoint", other, 12)
    assert find_origin(configuration(load=str(root), ckpt_step=10)) == Origin("checkpoint", root, 10)


@pytest.mark.parametrize(("name", "tracker"), [("iter_0000007", "7"), ("release", "release\n")])
def test_a_save_of_megatron_is_weights_to_start_from(tmp_path: Path, name: str, tracker: str) -> None:
    root, other = of_megatron(tmp_path / "theirs", name, tracker), str(tmp_path / "other")
    found = Origin("megatron", root / name)
    assert find_origin(configuration(load=str(root))) == found
    assert find_origin(configuration(load=str(root / name), save=other)) == found
    assert find_origin(configuration(pretrained_checkpoint=str(root), load=other, save=other)) == found
    for save in (root, root / name):
        with pytest.raises(CheckpointError, match="holds the checkpoint of Megatron-LM"):
            find_origin(configuration(load=str(root), save=str(save)))
    if tracker == "7":
        assert find_origin(configuration(load=str(root), ckpt_step=7)) == found
        (root / TRACKER).unlink()
        assert find_origin(configuration(load=str(root))) == found


def test_one_of_ours_beside_theirs_is_gone_on_with(tmp_path: Path) -> None:
    root = saves(of_megatron(tmp_path, "iter_0000007", "9"), 9)
    assert find_origin(configuration(load=str(root), save=str(root))) == Origin("checkpoint", root, 9)


def test_links_that_lead_round_in_a_circle_are_no_folder(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(CheckpointError, match="neither"):
        find_origin(configuration(load=str(link), save=str(tmp_path / "save")))


def test_without_a_tracker_the_newest_whole_save_is_taken(tmp_path: Path) -> None:
    """A first save may be cut off between its name and the tracker."""
    root = saves(tmp_path, 10)
    assert find_origin(configuration(load=str(root))) == Origin("checkpoint", root, 10)
    assert find_origin(configuration(load=str(root), ckpt_step=10)) == Origin("checkpoint", root, 10)
    (root / "iter_0000010" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="--ckpt-step"):
        find_origin(configuration(load=str(root)))


def test_a_restarted_run_begins_with_the_pretrained_weights_until_there_is_a_save(tmp_path: Path) -> None:
    hf, save = tmp_path / "hf", tmp_path / "save"
    hugging_face(hf)
    start = configuration(load=str(save), save=str(save), pretrained_checkpoint=str(hf))
    assert find_origin(start) == Origin("hf", hf)
    assert find_origin(configuration(pretrained_checkpoint=str(hf))) == Origin("hf", hf)
    saves(tmp_path / "other", 7)
    other = str(tmp_path / "other")
    assert find_origin(configuration(load=str(save), save=str(save), pretrained_checkpoint=other)) == Origin(
        "checkpoint", Path(other), 7, weights_only=True
    )
    saves(save, 10)
    assert find_origin(start) == Origin("checkpoint", save, 10)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="--pretrained-checkpoint"):
        find_origin(configuration(pretrained_checkpoint=str(tmp_path / "empty")))


def test_the_restart_idiom_knows_a_folder_by_any_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    for load in ("real", "./real/", "link", str(tmp_path / "real")):
        caplog.clear()
        assert find_origin(configuration(load=load, save="real")) == Origin("random")
        assert "random weights" in caplog.text
        with pytest.raises(CheckpointError, match="neither"):
            find_origin(configuration(load=load, save="real", exit_on_missing_checkpoint=True))
        with pytest.raises(CheckpointError, match="neither"):
            find_origin(configuration(load=load, save="other"))
        with pytest.raises(CheckpointError, match="neither"):
            find_origin(configuration(load=load))


def test_an_unfinished_save_is_no_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010.tmp").mkdir()
    with pytest.raises(CheckpointError, match="neither"):
        find_origin(configuration(load=str(tmp_path)))


def test_the_tokenizer_of_an_export_is_that_of_the_loaded_folder(tmp_path: Path) -> None:
    loaded, shape = hugging_face(tmp_path / "loaded"), hugging_face(tmp_path / "shape")
    assert hf_source(configuration(load=str(loaded), hf_config=str(shape))) == loaded
    assert hf_source(configuration(load=str(tmp_path), hf_config=str(shape))) == shape
    assert hf_source(configuration(hf_config=str(shape / "config.json"))) == shape
    assert hf_source(configuration()) is None


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True}, torch.float16),
        ({"bf16": True, "params_dtype": "fp32"}, torch.float32),
        ({"params_dtype": "bf16"}, torch.bfloat16),
    ],
)
def test_exports_have_the_dtype_asked_for(values: dict[str, Any], dtype: torch.dtype) -> None:
    assert export_dtype(configuration(**values)) == dtype


def test_without_a_family_there_is_no_export() -> None:
    with pytest.raises(ConfigError, match="--model-type-hf"):
        family_of(configuration())
    assert family_of(configuration(model_type_hf="llama")).name == "llama"
