"""The samples tool prints what training reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_llm.data.prepare import PrepareSettings, prepare
from mindspeed_llm.data.tokenizer import load_tokenizer
from mindspeed_llm.tools.samples import main
from tests.unit.data.corpus import TOKENIZER, numbered_documents, write_documents

EOD = 999
FLAGS = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, list[int]]]:
    assert main(arguments) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_stream_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = numbered_documents([4, 6, 3, 21], EOD)
    prefix = write_documents(tmp_path / "d", documents)
    stream = [token for document in documents for token in document] * 3
    rows = printed(capsys, "--data-path", prefix, "--seq-length", "8", "--count", "12", "--no-shuffle")
    assert [row["tokens"] for row in rows] == [stream[8 * i : 8 * i + 8] for i in range(12)]
    assert [row["labels"] for row in rows] == [stream[8 * i + 1 : 8 * i + 9] for i in range(12)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_the_manifest_tells_the_end_of_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "one two"}\n{"text": "three four five six seven eight nine ten eleven"}\n')
    tokenizer = load_tokenizer(TOKENIZER)
    prepare(PrepareSettings((str(source),), str(tmp_path / "o"), append_eod=True), tokenizer)
    common = ["--data-path", str(tmp_path / "o_text_document"), "--seq-length", "8", "--count", "1", "--no-shuffle"]
    (row,) = printed(capsys, *common, *FLAGS)
    end = row["tokens"].index(tokenizer.eod)
    assert row["loss_mask"] == [0.0 if place == end else 1.0 for place in range(8)]
    assert row["position_ids"] == [*range(end + 1), *range(7 - end)]
    assert row["cu_seqlens"] == [0, end + 1, 8]


def test_raw_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, tokenizer = tmp_path / "rows.jsonl", load_tokenizer(TOKENIZER)
    source.write_text('{"body": "one two"}\n{"body": "three four five six seven eight nine ten eleven"}\n')
    prepare(PrepareSettings((str(source),), str(tmp_path / "o"), keys=("body",), append_eod=True), tokenizer)
    common = ["--seq-length", "8", "--count", "2", "--tokenizer-name-or-path", str(TOKENIZER), *FLAGS]
    raw = ["--data-path", str(source), "--json-key", "body", "--data-cache-path", str(tmp_path / "cache")]
    expected = printed(capsys, "--data-path", str(tmp_path / "o_body_document"), *common)
    assert printed(capsys, *raw, *common) == expected
    # It stays for the training that comes next; the indices do not.
    (folder,) = (tmp_path / "cache").iterdir()
    (made,) = folder.iterdir()
    assert sorted(path.suffix for path in made.iterdir()) == [".bin", ".idx", ".json", ".json"]


def test_errors_have_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_documents(tmp_path / "d", numbered_documents([8], EOD))
    assert main(["--data-path", prefix, "--seq-length", "8", "--count", "1"]) == 1
    assert "shorter than one sample" in capsys.readouterr().err
    assert main(["--data-path", prefix, "--seq-length", "4", "--count", "1", *FLAGS]) == 1
    assert "--tokenizer-name-or-path" in capsys.readouterr().err
    assert main(["--data-path", prefix, "--seq-length", "4", "--count", "0"]) == 1
