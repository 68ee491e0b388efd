"""Errors that all processes of a node meet are told once, and those of one process all the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from mindspeed_llm.cli import pretrain
from mindspeed_llm.cli.once import tell

LAUNCH = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_first_process_tells_everything_and_the_others_one_line() -> None:
    told = [tell("prog", "it broke\n  fix: this", {**LAUNCH, "RANK": str(rank)}) for rank in (2, 0, 1)]
    assert told[0] == "prog: error: it broke\n  fix: this\n"
    assert [text.count("\n") for text in told[1:]] == [1, 1]
    assert "it broke (rank 0; told in full" in told[1]


def test_what_one_process_alone_meets_is_told_in_full() -> None:
    told = [tell("prog", f"rank {rank}\n  fix: this", {**LAUNCH, "RANK": str(rank)}) for rank in (0, 3)]
    assert all("fix: this" in text for text in told)


def test_each_launch_and_each_restart_tells_again() -> None:
    launches = [LAUNCH, {**LAUNCH, "TORCHELASTIC_RESTART_COUNT": "1"}, {**LAUNCH, "MASTER_PORT": "1"}]
    assert all("fix: this" in tell("prog", "it broke\n  fix: this", launch) for launch in launches)


def test_without_a_launcher_or_a_place_to_claim_everybody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    for environ in ({}, {}, LAUNCH, LAUNCH):
        assert "fix: this" in tell("prog", "it broke\n  fix: this", environ)


def test_the_command_exits_alike_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    told = []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert pretrain.main(["--no-such-flag"]) == 2
        told.append(capsys.readouterr().err)
    assert told[0].startswith("pretrain_gpt.py: error: --no-such-flag is not a known option")
    assert "told in full by another rank" in told[1]
