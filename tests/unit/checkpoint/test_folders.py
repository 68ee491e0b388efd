"""What folders of saves may hold: links to saves that lie elsewhere, and checkpoints of other software."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mindspeed_llm.checkpoint.folders import TRACKER, clear, retire
from mindspeed_llm.tools.checkpoint import main


def linked(root: Path, name: str) -> Path:
    """A save that someone has moved to another disk."""
    elsewhere = root.parent / "elsewhere" / name
    elsewhere.mkdir(parents=True)
    (elsewhere / "metadata.json").write_text("{}")
    root.mkdir(exist_ok=True)
    (root / name).symlink_to(elsewhere)
    return elsewhere


def test_the_link_to_a_save_goes_and_the_save_stays(tmp_path: Path) -> None:
    elsewhere = linked(tmp_path / "saves", "iter_0000004")
    assert retire(tmp_path / "saves", 8, limit=1, every=None) == [4]
    assert list((tmp_path / "saves").iterdir()) == []
    assert (elsewhere / "metadata.json").is_file()


@pytest.mark.parametrize("kind", ["tmp", "replaced", "removed"])
def test_what_was_cut_off_may_be_a_link_or_a_file(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "saves"
    linked(root, f"iter_0000004.{kind}")
    linked(root, "iter_0000004")
    linked(root, "iter_0000005")
    (root / f"iter_0000005.{kind}").touch()
    clear(root, kind)
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000004", "iter_0000005"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("save", ["iter_0000005", "release"])
def test_the_tool_calls_a_per_rank_checkpoint_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, save: str
) -> None:
    rank = tmp_path / save / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({"model": {}}, rank / "model_optim_rng.pt")
    (tmp_path / TRACKER).write_text(save.removeprefix("iter_"))
    for folder in (tmp_path, rank.parent):
        assert main([command, str(folder)]) == 1
        err = capsys.readouterr().err
        assert "is a per-rank checkpoint" in err
        assert "convert_ckpt.py" in err
