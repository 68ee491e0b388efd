"""Preparation: the bytes of good rows, the fate of bad ones, and that no failure leaves anything behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm.cli.preprocess import main
from mindspeed_llm.data import sources
from mindspeed_llm.data.prepare import PrepareSettings, prepare
from mindspeed_llm.data.tokenizer import load_tokenizer
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import QUICKSTART, TOKENIZER

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

VALID = QUICKSTART / "text" / "valid.jsonl"
ROOT = QUICKSTART.parents[1]

#: line -> its reason, or None for a good row; the numbers of lines are those of DIRTY.
DIRTY: list[tuple[bytes, str | None]] = [
    (b'{"text": ""}', "empty"),
    (b'{"text": "first"}', None),
    (b'{"text": null}', "null"),
    (b'{"text": 123}', "a number"),
    (b'{"text": true}', "true or false"),
    (b'{"text": ["a"]}', "a list"),
    (b'{"txt": "x"}', "no key 'text'"),
    (b"", "blank line"),
    (b'{"text": "a"', "broken JSON"),
    (b'["text"]', "not a JSON object"),
    (b'{"text": "\\ud800 half"}', "surrogate"),
    (b'{"text": "\xff\xfe"}', "invalid UTF-8"),
    (b'{"text": "with NaN", "score": NaN}', None),
    (b'{"text": "big number", "n": 123456789012345678901234567890}', None),
    (b'{"text": "carriage return"}\r', None),
    (b'{"text": "nul \\u0000 inside"}', None),
    ('{"text": "日詩"}'.encode(), None),
    (b"[" * 5000, "broken JSON"),
    (b'{"text": "last row, no newline"}', None),
]


def good_rows() -> bytes:
    return b"\n".join(line for line, reason in DIRTY if reason is None) + b"\n"


def files(prefix: Path, key: str = "text") -> tuple[bytes, bytes]:
    return Path(f"{prefix}_{key}_document.bin").read_bytes(), Path(f"{prefix}_{key}_document.idx").read_bytes()


def run(tmp_path: Path, name: str, *inputs: Path, **values: object) -> Path:
    prefix = tmp_path / name / "out"
    values = {"append_eod": True, "inputs": tuple(map(str, inputs)), "output_prefix": str(prefix), **values}
    prepare(PrepareSettings(**values), load_tokenizer(TOKENIZER))  # pyright: ignore[reportArgumentType]
    return prefix


def test_shipped_text_equals_megatrons_files(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for line in VALID.read_text(encoding="utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    prefix = tmp_path / "ours"
    assert main(["--input", str(VALID), "--output-prefix", str(prefix), "--tokenizer-name-or-path", str(TOKENIZER),
                 "--append-eod", "--workers", "2"]) == 0  # fmt: skip
    assert files(prefix) == ((tmp_path / "theirs.bin").read_bytes(), (tmp_path / "theirs.idx").read_bytes())


def test_workers_and_blocks_do_not_change_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = tmp_path / "again.jsonl"
    again.write_bytes(VALID.read_bytes())
    expected = files(run(tmp_path, "one", VALID, again))
    monkeypatch.setattr(sources.read_blocks, "__defaults__", ((0, 1), 3000))
    assert files(run(tmp_path, "small-blocks", VALID, again)) == expected
    assert files(run(tmp_path, "workers", VALID, again, workers=3)) == expected


def test_bad_rows_are_listed_and_good_rows_are_as_from_a_clean_file(tmp_path: Path) -> None:
    dirty, clean = tmp_path / "dirty.jsonl", tmp_path / "clean.jsonl"
    dirty.write_bytes(b"\xef\xbb\xbf" + b"\n".join(line for line, _ in DIRTY))
    clean.write_bytes(good_rows())
    prefix = run(tmp_path, "dirty", dirty)
    assert files(prefix) == files(run(tmp_path, "clean", clean))
    listed = [json.loads(line) for line in Path(f"{prefix}.bad_rows.jsonl").read_text().splitlines()]
    expected = {number: reason for number, (_, reason) in enumerate(DIRTY, start=1) if reason is not None}
    assert [row["line"] for row in listed] == list(expected)
    for row in listed:
        assert row["file"] == str(dirty)
        assert expected[row["line"]] in row["reason"], row
    assert not (tmp_path / "clean" / "out.bad_rows.jsonl").exists()


def test_a_clean_run_removes_the_list_of_an_earlier_one(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'{"text": 1}\n' + good_rows())
    listed = Path(f"{run(tmp_path, 'same', source)}.bad_rows.jsonl")
    assert listed.exists()
    source.write_bytes(good_rows())
    run(tmp_path, "same", source)
    assert not listed.exists()


def test_stop_names_file_and_line_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(good_rows() + b'{"text": null}\n')
    lines = good_rows().count(b"\n") + 1
    with pytest.raises(DataError, match=rf"rows\.jsonl:{lines}: 'text' is null"):
        run(tmp_path, "stop", source, on_bad_row="stop")
    assert list((tmp_path / "stop").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n{"txt": "x"}\n'])
def test_no_good_row_is_an_error_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(content)
    with pytest.raises(DataError, match="No row gave a document"):
        run(tmp_path, "none", source)
    assert list((tmp_path / "none").iterdir()) == []


def test_a_row_counts_only_when_all_its_keys_do(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'{"a": "one", "b": "two"}\n{"a": "three"}\n{"a": "four", "b": "five"}\n')
    prefix = run(tmp_path, "keys", source, keys=("a", "b"), append_eod=False)
    tokenizer = load_tokenizer(TOKENIZER)
    for key, texts in (("a", ["one", "four"]), ("b", ["two", "five"])):
        dataset = IndexedDataset(f"{prefix}_{key}_document")
        assert [np.asarray(dataset[i]).tolist() for i in range(len(dataset))] == tokenizer.encode_batch(texts)


def test_text_files_give_a_document_a_line(tmp_path: Path) -> None:
    source = tmp_path / "verses.txt"
    source.write_bytes("first line\r\n\n  \nsecond line\n日詩".encode())
    prefix = run(tmp_path, "txt", source, append_eod=False)
    dataset = IndexedDataset(f"{prefix}_text_document")
    expected = load_tokenizer(TOKENIZER).encode_batch(["first line", "second line", "日詩"])
    assert [np.asarray(dataset[i]).tolist() for i in range(len(dataset))] == expected


def test_manifest_says_what_was_made(tmp_path: Path) -> None:
    prefix = run(tmp_path, "manifest", VALID)
    manifest = json.loads(Path(f"{prefix}_text_document.manifest.json").read_text())
    tokenizer = load_tokenizer(TOKENIZER)
    assert manifest["tokenizer_hash"] == tokenizer.hash
    assert (manifest["eod"], manifest["append_eod"], manifest["bad_rows"]) == (tokenizer.eod, True, 0)
    assert manifest["sources"] == [{"path": str(VALID), "bytes": VALID.stat().st_size}]
    assert manifest["documents"] == len(VALID.read_text(encoding="utf-8").splitlines())
    assert manifest["tokens"] * 2 == Path(f"{prefix}_text_document.bin").stat().st_size


def test_command_line_errors_have_no_traceback_and_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--output-prefix", str(tmp_path / "o"), "--tokenizer-name-or-path", str(TOKENIZER)]
    assert main(["--input", str(tmp_path / "nowhere.jsonl"), *common]) == 1
    assert "nowhere.jsonl" in capsys.readouterr().err
    assert main(["--input", str(VALID), *common, "--json-keys", "a", "a"]) == 2
    assert main(["--input", str(VALID), *common, "--workers", "0"]) == 2
    assert main(["--input", str(VALID), *common, "--json-keys", "nothing"]) == 1
    assert list(tmp_path.iterdir()) == []


def test_preparation_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from mindspeed_llm.cli.preprocess import main\n"
        f"code = main(['--input', {str(VALID)!r}, '--output-prefix', {str(tmp_path / 'o')!r},"
        f" '--tokenizer-name-or-path', {str(TOKENIZER)!r}])\n"
        "print(code, sorted({'torch', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
