"""Raw files in --data-path of whole runs: the losses of prepared data, one preparation for all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import TINY, launch, read_rows, succeed, write_corpus
from tests.distributed.pool import Pool
from tests.fixtures import hf_folder

Flags = dict[str, Any]


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    return {**TINY, "--load": hf_folder("q25"), "--metrics-file": tmp_path / "metrics.jsonl"}


def losses(pool: Pool, flags: Flags, name: str, layout: str) -> tuple[list[float], str]:
    """The losses of training and evaluation, and what the ranks said."""
    path = Path(flags["--metrics-file"]).with_name(name)
    results = succeed(pool, {**flags, "--metrics-file": path}, layout)
    rows = read_rows(path) + read_rows(path, "valid")
    assert len(rows) >= 3
    return [row["lm_loss"] for row in rows], "".join(result["out"] + result["err"] for result in results)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_raw_file_gives_the_losses_of_the_prepared_one(pool: Pool, flags: Flags, tmp_path: Path, layout: str) -> None:
    prepared = write_corpus(tmp_path)
    more = {"--split": "80,20,0", "--eval-iters": 1, "--eval-interval": 2, "--reset-position-ids": True}
    expected, _ = losses(pool, {**flags, **more, "--data-path": prepared}, "prepared.jsonl", layout)
    raw = {**flags, **more, "--data-path": tmp_path / "texts.jsonl"}
    first, said = losses(pool, raw, "first.jsonl", layout)
    assert first == expected
    assert said.count("preparing ") <= 1  # only the first rank says such things
    (folder,) = (tmp_path / "_prepared").iterdir()
    made = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
    again, said = losses(pool, {**raw, "--verify-data": True}, "again.jsonl", layout)
    assert again == expected
    assert "preparing" not in said
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()} == made


def test_a_blend_of_a_raw_and_a_prepared_one(pool: Pool, flags: Flags, tmp_path: Path) -> None:
    prepared = write_corpus(tmp_path)
    expected, _ = losses(pool, {**flags, "--data-path": (3, prepared, 1, prepared)}, "prepared.jsonl", "dp2")
    mixed = {**flags, "--data-path": (3, tmp_path / "texts.jsonl", 1, prepared), "--data-cache-path": tmp_path / "c"}
    assert losses(pool, mixed, "mixed.jsonl", "dp2")[0] == expected


@pytest.mark.parametrize(
    ("row", "more", "what"),
    [
        ({"body": "text"}, {}, "No row gave a document"),
        ({"text": "text"}, {"--tokenizer-type": "NullTokenizer"}, "Raw data needs a tokenizer"),
    ],
)
def test_every_rank_ends_with_the_same_error(
    pool: Pool, flags: Flags, tmp_path: Path, row: dict[str, str], more: Flags, what: str
) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps(row) + "\n")
    results = launch(pool, {**flags, "--data-path": tmp_path / "texts.jsonl", **more}, "dp2")
    assert [result["code"] for result in results] == [1, 1]
    first, second = (result["err"].rpartition("error: ")[2].partition("FATAL")[0] for result in results)
    assert first == second
    assert what in first
