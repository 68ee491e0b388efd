"""``--validate-only``: what a run would stop at is said at once, without torch and without other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_llm.cli import preprocess
from mindspeed_llm.cli.pretrain import main

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples" / "quickstart" / "model"
TEXT = ROOT / "examples" / "quickstart" / "text" / "valid.jsonl"
FLAGS = f"""--validate-only --hf-config {MODEL} --seq-length 64 --micro-batch-size 1 --global-batch-size 8
    --train-iters 2 --lr 1e-4 --eval-iters 0 --tensor-model-parallel-size 2 --data-path {TEXT}""".split()


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_it_prints_what_follows_and_touches_nothing(tmp_path: Path) -> None:
    """As a process of its own, because here torch is imported already."""
    guard = tmp_path / "torch.py"
    guard.write_text("raise ImportError('torch is not needed')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    save = tmp_path / "checkpoints"
    command = [sys.executable, ROOT / "pretrain_gpt.py", *FLAGS, "--save", save, "--load", save]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "valid: 4 processes, TP 2, PP 1 (interleaved stages: 1), DP 2; weights: random"
    )
    assert "world_size" in done.stdout
    assert "command line" in done.stdout
    assert sorted(tmp_path.iterdir()) == [guard]
    assert not (TEXT.parent / "_prepared").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--tensor-model-parallel-size", "3"), "4 processes cannot hold copies of a model over 3 processes"),
        (("--data-path", "nowhere/corpus_text_document"), "nowhere/corpus_text_document"),
        (("--tokenizer-name-or-path", "nowhere"), "no tokenizer at this path"),
        (("--vocab-size", "100"), "more ids than the model's vocabulary has rows"),
        (("--load", "nowhere"), "neither a Hugging Face folder nor a checkpoint folder"),
        (("--tokenizer-type", "NullTokenizer"), "Raw data needs a tokenizer"),
    ],
)
def test_it_stops_where_the_run_would(
    more: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*FLAGS, *more]) == 2
    out, err = capsys.readouterr()
    assert told in err
    assert out == ""


def test_a_run_without_steps_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS[:-1], "nowhere", "--train-iters", "0"]) == 0
    assert "valid: 4 processes" in capsys.readouterr().out


def test_a_preparation_is_looked_at_and_nothing_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--output-prefix", str(tmp_path / "text"), "--tokenizer-name-or-path", str(MODEL), "--validate-only"]
    assert preprocess.main(["--input", str(TEXT), *flags]) == 0
    assert "valid: 1 files, a tokenizer with 4096 ids" in capsys.readouterr().out
    assert preprocess.main(["--input", "nowhere", *flags]) != 0
    assert "nowhere" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
