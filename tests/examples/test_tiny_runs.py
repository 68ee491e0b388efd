"""Recipes run with ``TINY=1`` from a clean folder, on two processes of this machine."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.recorded import project_of

# What is trained on is the quickstart's 4096 ids.
UNIFORM = math.log(4096)


def run(project: Path, recipe: str, **variables: str) -> str:
    """What ``examples/<recipe>.sh`` writes."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    command = [project / "examples" / f"{recipe}.sh"]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def check_losses(project: Path, recipe: str, out: str) -> None:
    losses = [float(text) for text in re.findall(r"lm loss: (\S+)", out)]
    assert len(losses) == 4
    # Weights with a deviation of 0.02 make a nearly uniform distribution.
    assert losses == pytest.approx([UNIFORM] * 4, abs=0.1)
    name = Path(recipe).name
    assert (project / "logs" / f"{name}_0.log").read_text() == out
    saved = project / "out" / "tiny" / name / "latest_checkpointed_iteration.txt"
    assert saved.read_text().strip() == "4"


def test_text_is_prepared_and_a_pipeline_with_interleaved_stages_trains_on_it(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    assert "117 documents" in run(project, "qwen25/data_qwen25_pretrain", TINY="1")
    prefix = "out/tiny/data_qwen25_pretrain/corpus_text_document"
    out = run(project, "qwen25/pretrain_qwen25_72b", TINY="1", DATA_PATH=prefix)
    check_losses(project, "qwen25/pretrain_qwen25_72b", out)


def test_raw_text_and_tensor_parallel_ranks(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    check_losses(project, "llama31/pretrain_llama31_8b", run(project, "llama31/pretrain_llama31_8b", TINY="1"))


def check_there_and_back(project: Path, script: str, family: str) -> None:
    """Convert to per-rank files of two by two ranks and back: the same weights, settings and tokenizer."""
    out = run(project, f"{script}_hf2mcore", TINY="1", SAVE_FORMAT="legacy")
    assert (project / "logs" / f"{Path(script).name}_hf2mcore.log").read_text() == out
    tiny = project / "out" / "tiny"
    trees = (tiny / f"{Path(script).name}_hf2mcore").rglob("mp_rank_*")
    assert len(list(trees)) == 4
    run(project, f"{script}_mcore2hf", TINY="1")
    before, after = tiny / "models" / family, tiny / f"{Path(script).name}_mcore2hf"
    weights, found = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert weights.keys() == found.keys()
    assert all(torch.equal(weights[name], found[name]) for name in weights)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (before, after)]
    assert configs[0] == {key: value for key, value in configs[1].items() if key in configs[0]}
    assert (before / "tokenizer.json").read_bytes() == (after / "tokenizer.json").read_bytes()


def test_a_model_is_converted_and_back(tmp_path: Path) -> None:
    check_there_and_back(project_of(tmp_path), "glm4/convert_glm4_32b", "glm4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "family"),
    [
        ("glm4/convert_glm4_9b", "glm"),
        ("llama32/convert_llama32_1b", "llama"),
        ("qwen25/convert_qwen25_72b", "qwen2"),
        ("qwen3/convert_qwen3_8b", "qwen3"),
    ],
)
def test_models_of_the_other_families_are_converted_and_back(tmp_path: Path, script: str, family: str) -> None:
    check_there_and_back(project_of(tmp_path), script, family)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "qwen2/pretrain_qwen2_0point5b",
        "qwen3/pretrain_qwen3_32b",
        "glm4/pretrain_glm4_9b",
        "glm4/pretrain_glm4_9b_32k",
        "glm4/pretrain_glm4_32b",
        "qwen25/pretrain_qwen25_72b_32k",
        "llama2/pretrain_llama2_7b",
        "llama3/pretrain_llama3_70b",
        "llama32/pretrain_llama32_3b",
        "llama33/pretrain_llama33_70b",
    ],
)
def test_the_other_models(tmp_path: Path, recipe: str) -> None:
    project = project_of(tmp_path)
    check_losses(project, recipe, run(project, recipe, TINY="1"))
