"""Preparation where something around it goes wrong: full disks, odd names, files that change, others that write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mindspeed_llm.cli.preprocess import main
from mindspeed_llm.data import encode, prepare
from mindspeed_llm.data.bad_rows import SKIP, BadRows
from mindspeed_llm.data.indexed import IndexedWriter, bin_path
from mindspeed_llm.data.manifest import read_manifest
from mindspeed_llm.data.merge import merge_groups
from mindspeed_llm.data.sources import JSONL, Block
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import TOKENIZER, write_documents

UINT16 = np.dtype(np.uint16)
CANNOT_BE_WRITTEN = "error: What is prepared cannot be written."


def run(source: Path | str, prefix: Path | str, *flags: str) -> int:
    return main(["--input", str(source), "--output-prefix", str(prefix), "--workers", "1",
                 "--tokenizer-name-or-path", str(TOKENIZER), *flags])  # fmt: skip


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "corpus.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "a"}\n' * 3000)
    return path


@contextmanager
def largest_file(size: int) -> Generator[None]:
    """Files may not grow beyond ``size`` bytes: as on a full disk, a write fails (Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# 3000 documents of one token: 6000 bytes of .bin and 60 kB of .idx, and twice as many bytes in the list of bad rows.
@pytest.mark.parametrize("room", [1000, 20_000])
def test_a_full_disk_is_an_error_and_keeps_what_was_there(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], room: int
) -> None:
    out = tmp_path / "out"
    first = tmp_path / "in" / "first.txt"
    first.write_text("something else\n")
    assert run(first, out / "x") == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    with largest_file(room):
        assert run(corpus, out / "x") == 1
    assert capsys.readouterr().err.splitlines()[0] == CANNOT_BE_WRITTEN
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_full_disk_for_bad_rows_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dirty = tmp_path / "dirty.jsonl"
    dirty.write_text('{"text": "a"}\n' + "\n" * 100)
    with largest_file(1000):
        assert run(dirty, tmp_path / "out" / "x") == 1
    assert capsys.readouterr().err.splitlines()[0] == CANNOT_BE_WRITTEN
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("suffix", ["_text_document.bin", "_text_document.idx", "_text_document.manifest.json"])
def test_a_folder_in_the_way_is_an_error(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    (tmp_path / f"x{suffix}").mkdir()
    assert run(corpus, tmp_path / "x") == 1
    assert f"  got: {tmp_path}/x{suffix}: Is a directory" in capsys.readouterr().err
    assert not [name for name in names(tmp_path) if name.endswith(".partial")]


def test_a_key_that_cannot_be_part_of_a_name_is_an_error(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus, tmp_path / "x", "--json-keys", "a/b") == 1
    assert "x_a/b_document.bin.partial: No such file or directory" in capsys.readouterr().err


def test_names_that_are_no_utf8(tmp_path: Path, corpus: Path) -> None:
    odd = corpus.parent / os.fsdecode(b"\xff.jsonl")
    odd.write_bytes(b'{"text": "a"}\n')
    prefix = tmp_path / "out" / os.fsdecode(b"\xfe")
    assert run(odd, prefix, "--report") == 0
    manifest = read_manifest(f"{prefix}_text_document")
    assert manifest is not None
    assert [source.path for source in manifest.sources] == [str(odd)]
    report = json.loads(Path(f"{prefix}.report.json").read_text(encoding="utf-8"))
    assert report["datasets"]["text"]["prefix"] == f"{prefix}_text_document"


def test_a_terminal_without_the_letters_of_a_name(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(terminal, encoding="ascii", write_through=True))
    assert run(corpus, tmp_path / "名") == 0
    assert rb"\u540d_text_document: 3000 documents" in terminal.getvalue()


def test_the_report_of_a_folder_as_prefix_lies_in_it(tmp_path: Path, corpus: Path) -> None:
    assert run(corpus, f"{tmp_path}/out/", "--report") == 0
    assert {".report.html", ".report.json", ".report.png"} < set(names(tmp_path / "out"))
    assert names(tmp_path) == ["in", "out"]


def pipe(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize("make", [pipe, dangling])
def test_a_folder_with_what_is_no_file_is_refused(
    corpus: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    make(corpus.parent / "odd.jsonl")
    assert run(corpus.parent, corpus.parent / "x") == 1
    assert f"  got: {corpus.parent}/odd.jsonl\n" in capsys.readouterr().err


def test_a_folder_of_prepared_data_is_not_taken_for_raw(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus, tmp_path / "out" / "x") == 0
    assert run(tmp_path / "out", tmp_path / "y") == 1
    assert (
        f"  fix: for prepared data the prefix, for instance {tmp_path}/out/x_text_document" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.jsonl.gz", "x.txt.zst"])
def test_an_empty_file_that_must_hold_something_is_called_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).touch()
    assert run(tmp_path / name, tmp_path / "y") == 1
    assert f"  got: {tmp_path / name}: an empty file\n" in capsys.readouterr().err


@pytest.mark.parametrize("change", [b'{"text": "more"}\n', None])
def test_an_input_that_changes_meanwhile_is_an_error(
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: bytes | None,
) -> None:
    def blocks(*given: Any, **named: Any) -> Generator[Any]:
        yield from prepare_blocks(*given, **named)
        with open(corpus, "ab") as stream:
            stream.write(change) if change else stream.truncate(14)

    prepare_blocks = prepare.read_blocks
    monkeypatch.setattr(prepare, "read_blocks", blocks)
    assert run(corpus, tmp_path / "out" / "x") == 1
    assert f"The data changed while it was prepared.\n  got: {corpus}" in capsys.readouterr().err
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_rows_behind_the_last_sample_are_left_alone(tmp_path: Path, policy: str) -> None:
    rows = ['{"text": "aa"}', '{"text": "bb"}', "", '{"text": "cc"}', '{"text": ""}', '{"text": "ddd"}']
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(rows if policy == "skip" else [rows[0], *rows[4:]]))
    kept = 3 if policy == "skip" else 1
    assert run(source, tmp_path / "x", "--max-samples", str(kept), "--on-bad-row", policy) == 0
    manifest = read_manifest(tmp_path / "x_text_document")
    assert manifest is not None
    assert (manifest.documents, manifest.bad_rows, manifest.text_bytes) == (kept, kept // 3, 2 * kept)


def test_the_limit_counts_documents_with_tokens() -> None:
    class Letters:
        vocab_size, pad, eod = 300, None, 0

        def encode_flat(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
            words = [text.strip().encode() for text in texts]
            return np.frombuffer(b"".join(words), np.uint8).astype(np.int32), np.array(list(map(len, words)), np.int32)

    encoder = encode.BlockEncoder(Letters(), ["text"])  # type: ignore[arg-type]
    lines = [b'{"text": " "}', b'{"text": "ab"}', b"", b'{"text": " "}', b'{"text": "c"}', b'{"text": " "}']
    block = Block("x", JSONL, 1, 0, lines)
    found = encoder.encode(block, 2)
    assert found.columns[0].ids.tolist() == [97, 98, 99]
    assert (found.rows, found.bad, found.text_bytes) == (
        5,
        [(0, "no tokens"), (2, "blank line"), (3, "no tokens")],
        [3],
    )


def test_a_writer_that_opens_just_before_another_commits_does_not_touch_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = IndexedWriter(tmp_path / "x", UINT16)
    first.add_documents(np.array([7, 8], UINT16).tobytes(), np.array([2], np.int32).tobytes())
    lock = fcntl.flock

    def commit_first(stream: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.commit()
        lock(stream, how)

    monkeypatch.setattr(fcntl, "flock", commit_first)
    with IndexedWriter(tmp_path / "x", UINT16):
        assert bin_path(tmp_path / "x").read_bytes() == np.array([7, 8], UINT16).tobytes()
        # What the first does when it leaves is its own affair as well.
        first.__exit__(None, None, None)
        assert (tmp_path / "x.bin.partial").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def none(stream: Any, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    write_documents(tmp_path / "x", [[1, 2]])
    assert bin_path(tmp_path / "x").read_bytes() == np.array([1, 2], UINT16).tobytes()
    assert "has no locks" in caplog.text


def test_two_preparations_of_different_keys_do_not_share_a_list_of_bad_rows(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with BadRows(str(tmp_path / "x"), SKIP):
        assert run(corpus, tmp_path / "x") == 1
    assert f"Another process is writing this dataset.\n  got: {tmp_path}/x.bad_rows.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["folder/", "[x]", "*"])
def test_shards_of_any_prefix_are_found(tmp_path: Path, corpus: Path, name: str) -> None:
    prefix = f"{tmp_path}/out/{name}"
    for shard in ("0/2", "1/2"):
        assert run(corpus, prefix, "--shard", shard) == 0
        assert run(corpus, f"{tmp_path}/out/other", "--shard", shard) == 0
    assert run(corpus, f"{tmp_path}/whole") == 0
    assert main(["--output-prefix", prefix, "--merge-shards"]) == 0
    assert bin_path(f"{prefix}_text_document").read_bytes() == bin_path(tmp_path / "whole_text_document").read_bytes()


def test_a_merge_of_groups_again_does_not_take_in_its_own_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a_text", "b_text"):
        write_documents(tmp_path / name, [[1, 2], [3]])
    for _ in range(2):
        found = merge_groups(".", ["text", "a"], "./all")
        assert {target: index.tokens for target, index in found.items()} == {"./all_text": 6, "./all_a": 3}
    with pytest.raises(DataError, match="No dataset of the folder"):
        merge_groups(".", ["text", "c"], "new/folder/all")
    assert not (tmp_path / "new").exists()
    assert merge_groups(".", ["a_text"], "new/folder/all")["new/folder/all_a_text"].tokens == 3


def test_a_text_for_which_a_model_has_no_tokens_is_a_bad_row(tmp_path: Path) -> None:
    library = Tokenizer(models.WordLevel({"hello": 0, "world": 1}))
    library.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    library.save(str(tmp_path / "tokenizer.json"))
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "hello world"}\n{"text": "hello you"}\n{"text": "world"}\n')
    given = ["--input", str(source), "--output-prefix", str(tmp_path / "x"), "--tokenizer-name-or-path", str(tmp_path)]
    assert main([*given, "--workers", "2"]) == 0
    assert np.fromfile(tmp_path / "x_text_document.bin", UINT16).tolist() == [0, 1, 1]
    assert [json.loads(line)["line"] for line in (tmp_path / "x.bad_rows.jsonl").read_text().splitlines()] == [2]
