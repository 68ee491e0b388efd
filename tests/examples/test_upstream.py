"""Recipes of upstream's shape run as they are: only their placeholders are filled in."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import hf_folder

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "examples" / "quickstart" / "text" / "valid.jsonl"
RECIPES = sorted((ROOT / "tests" / "examples" / "upstream").glob("*.sh"))
# What the recipe says of the architecture is what the Hugging Face folder says.
MODELS = {
    "pretrain_qwen25_7b_4k_ptd": "q25",
    "pretrain_llama2_7b_ptd": "llamaplain",
}


def filled(recipe: Path, folder: Path) -> Path:
    """The recipe with its placeholders filled in, beside the scripts that it starts."""
    model = hf_folder(MODELS[recipe.stem])
    text = folder / "train.jsonl"
    text.symlink_to(TEXT)
    values = {
        "your model ckpt path": model,
        "your model save ckpt path": folder / "saved",
        "your data path": text,
        "your tokenizer path": model,
    }
    written = recipe.read_text()
    for placeholder, value in values.items():
        assert placeholder in written
        written = written.replace(placeholder, str(value))
    (folder / "logs").mkdir()
    (folder / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    new = folder / recipe.name
    new.write_text(written)
    return new


def run(recipe: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MINDSPEED_LLM_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.run(
        ["bash", "-o", "pipefail", recipe.name],
        cwd=recipe.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_migrate_leaves_nothing_to_do(recipe: Path, tmp_path: Path) -> None:
    new = filled(recipe, tmp_path)
    command = [sys.executable, "-m", "mindspeed_llm.tools.migrate", str(new)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "examples/" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_trains_on_two_ranks(recipe: Path, tmp_path: Path) -> None:
    new = filled(recipe, tmp_path)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    done = run(new, MASTER_PORT=str(port))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    losses = [float(text) for text in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) >= 4
    assert losses[3] < losses[0]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    (log,) = (tmp_path / "logs").iterdir()
    assert "lm loss" in log.read_text()
