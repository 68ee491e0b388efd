"""Preparation beyond one file: sentences, padding, limits, shards, merging, Ray, and interruptions."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import nltk.data  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm.cli.preprocess import NO_EFFECT, REFUSED, main
from mindspeed_llm.data.encode import Column
from mindspeed_llm.data.tokenizer import load_tokenizer
from tests.unit.data.corpus import QUICKSTART, TOKENIZER, write_documents

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

VALID = QUICKSTART / "text" / "valid.jsonl"
ROOT = QUICKSTART.parents[1]
TEXTS = [json.loads(line)["text"] for line in VALID.read_text(encoding="utf-8").splitlines()]


def run(prefix: Path | str, *flags: str, source: Path | None = VALID, tokenizer: bool = True) -> int:
    given = ["--input", str(source)] if source else []
    given += ["--tokenizer-name-or-path", str(TOKENIZER)] if tokenizer else []
    return main(["--output-prefix", str(prefix), "--workers", "1", *given, *flags])


def files(prefix: Path | str, name: str = "text_document") -> tuple[bytes, bytes]:
    return Path(f"{prefix}_{name}.bin").read_bytes(), Path(f"{prefix}_{name}.idx").read_bytes()


def documents(prefix: Path | str, name: str = "text_document") -> list[list[int]]:
    dataset = IndexedDataset(f"{prefix}_{name}")
    bounds = dataset.document_indices
    return [
        [token for number in range(first, last) for token in np.asarray(dataset[number]).tolist()]
        for first, last in pairwise(bounds)
    ]


def their_files(path: Path, rows: Sequence[Sequence[Sequence[int]]]) -> tuple[bytes, bytes]:
    """What megatron-core's builder makes of documents of sequences of ids."""
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for row in rows:
        builder.add_document(torch.tensor([token for part in row for token in part]), [len(part) for part in row])
    builder.finalize(f"{path}.idx")
    return Path(f"{path}.bin").read_bytes(), Path(f"{path}.idx").read_bytes()


@pytest.fixture(scope="module")
def punkt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a Punkt model trained here, in the form of NLTK's own."""
    from nltk.tokenize import punkt  # pyright: ignore[reportMissingTypeStubs]

    root = tmp_path_factory.mktemp("nltk")
    folder = root / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    trainer = punkt.PunktTrainer()
    trainer.train("\n".join(TEXTS[:200]))
    nltk.data.path.insert(0, str(root))
    punkt.save_punkt_params(trainer.get_params(), dir=str(folder))
    return str(root)


def test_sentences_are_those_of_nltk_and_files_those_of_megatron(tmp_path: Path, punkt: str) -> None:
    from nltk.tokenize.punkt import PunktTokenizer  # pyright: ignore[reportMissingTypeStubs]

    tokenizer, split = load_tokenizer(TOKENIZER), PunktTokenizer("english").tokenize
    rows = [tokenizer.encode_batch(split(text)) for text in TEXTS]
    assert max(map(len, rows)) > 2
    for row in rows:
        row[-1].append(tokenizer.eod)
    assert run(tmp_path / "ours", "--split-sentences", "--append-eod") == 0
    assert files(tmp_path / "ours", "text_sentence") == their_files(tmp_path / "theirs", rows)


def test_kept_newlines_lose_no_character_between_sentences(tmp_path: Path, punkt: str) -> None:
    source = tmp_path / "rows.jsonl"
    text = "The first one is here.  The second is there!\n\nWhat of the third?\tThe fourth."
    source.write_text(json.dumps({"text": text}))
    assert run(tmp_path / "o", "--split-sentences", "--keep-newlines", source=source) == 0
    dataset, tokenizer = IndexedDataset(str(tmp_path / "o_text_sentence")), load_tokenizer(TOKENIZER)
    pieces = [tokenizer.decode(np.asarray(dataset[number]).tolist()) for number in range(len(dataset))]
    assert len(pieces) > 2
    assert "".join(pieces) == text


def test_a_missing_model_of_sentences_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "o", "--split-sentences", "--lang", "klingon") == 1
    assert "klingon" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=5), min_size=1, max_size=3), max_size=6),
    eod=st.sampled_from([None, 1]),
    multiple=st.integers(1, 4),
    data=st.data(),
)
def test_closing_and_keeping_documents(
    rows: list[list[list[int]]], eod: int | None, multiple: int, data: st.DataObject
) -> None:
    flat = np.array([token for row in rows for part in row for token in part], np.int32)
    lengths = np.array([len(part) for row in rows for part in row], np.int32)
    column = Column(flat, lengths, np.array([len(row) for row in rows], np.int32))
    wanted = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    expected = [[list(part) for part in row] for row, keep in zip(rows, wanted, strict=True) if keep]
    for row in expected:
        row[-1] += [] if eod is None else [eod]
        while sum(map(len, row)) % multiple:
            row[-1].append(0)
    closed = column.keep(np.array(wanted, dtype=bool)).close(eod, 0, multiple)
    assert closed.ids.tolist() == [token for row in expected for part in row for token in part]
    assert closed.lengths.tolist() == [len(part) for row in expected for part in row]
    assert closed.counts.tolist() == [len(row) for row in expected]
    assert closed.sizes.tolist() == [sum(map(len, row)) for row in expected]


def test_padding_uses_the_padding_token_after_the_end(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    pad = tokenizer.eod if tokenizer.pad is None else tokenizer.pad
    assert run(tmp_path / "o", "--append-eod", "--pad-to-multiple-of", "8") == 0
    for ids, text in zip(documents(tmp_path / "o"), TEXTS, strict=True):
        plain = [*tokenizer.encode(text), tokenizer.eod]
        assert ids == plain + [pad] * (-len(plain) % 8)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_max_samples_keeps_the_first(tmp_path: Path, workers: str) -> None:
    assert run(tmp_path / "all") == 0
    assert run(tmp_path / "few", "--max-samples", "7", "--workers", workers) == 0
    assert documents(tmp_path / "few") == documents(tmp_path / "all")[:7]


def test_shards_merge_to_the_whole(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"text": f"document {number} " * (40 * number + 1), "title": "t"} for number in range(5)]
    lines = [json.dumps(row) for row in rows]
    lines[1], lines[3] = '{"text": 1}', "broken"
    source.write_text("\n".join(lines))
    keys = ("--json-keys", "text", "title", "--append-eod")
    assert run(tmp_path / "whole", *keys, source=source) == 0
    # More shards than some would find rows for: an empty shard is a shard.
    for count in (2, 7):
        for number in reversed(range(count)):
            assert run(tmp_path / "cut", *keys, "--shard", f"{number}/{count}", source=source) == 0
        assert run(tmp_path / "cut", "--merge-shards", source=None, tokenizer=False) == 0
        for key in ("text", "title"):
            assert files(tmp_path / "cut", f"{key}_document") == files(tmp_path / "whole", f"{key}_document")
            ours, theirs = (
                json.loads((tmp_path / f"{name}_{key}_document.manifest.json").read_text()) for name in ("cut", "whole")
            )
            assert ours == theirs
        assert (tmp_path / "cut.bad_rows.jsonl").read_text() == (tmp_path / "whole.bad_rows.jsonl").read_text()
        assert not list(tmp_path.glob("cut.shard*"))


def test_incomplete_or_mixed_shards_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merge = ("--merge-shards",)
    assert run(tmp_path / "o", *merge, source=None, tokenizer=False) == 1
    assert "no " in capsys.readouterr().err
    assert run(tmp_path / "o", "--shard", "0/2") == 0
    assert run(tmp_path / "o", *merge, source=None, tokenizer=False) == 1
    assert "1/2" in capsys.readouterr().err
    assert run(tmp_path / "o", "--shard", "1/2", "--append-eod") == 0
    assert run(tmp_path / "o", *merge, source=None, tokenizer=False) == 1
    assert "append_eod" in capsys.readouterr().err
    assert run(tmp_path / "o", "--shard", "1/2", "--pad-to-multiple-of", "2") == 0
    assert run(tmp_path / "o", *merge, source=None, tokenizer=False) == 1
    assert "pad_to_multiple_of" in capsys.readouterr().err
    assert len(list(tmp_path.glob("o.shard*.idx"))) == 2, "a refused merge loses nothing"


def test_groups_of_a_folder_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "parts"
    for name in ("b", "a"):
        assert run(folder / name, "--max-samples", "5" if name == "a" else "2") == 0
    write_documents(folder / "c_other_document", [[1, 2], [3]])
    flags = ("--merge-group-keys", "text_document", "other")
    assert run(tmp_path / "m", *flags, source=folder, tokenizer=False) == 0
    assert documents(tmp_path / "m") == documents(folder / "a") + documents(folder / "b")
    assert documents(tmp_path / "m", "other") == [[1, 2], [3]]
    assert (tmp_path / "m_text_document.manifest.json").exists()
    assert run(tmp_path / "m", "--merge-group-keys", "nothing", source=folder, tokenizer=False) == 1
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["made/", "made/name", "there", "there/"])
def test_the_prefix_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "there").mkdir()
    assert run(f"{tmp_path}/{name}") == 0
    assert os.path.getsize(f"{tmp_path}/{name}_text_document.idx") > 0
    assert os.path.getsize(f"{tmp_path}/{name}_text_document.bin") > 0


def test_ids_as_text_for_the_null_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "ids.txt"
    source.write_text("1 2 3\nfour\n7 8\n99\n")
    flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "10", "--append-eod")
    assert run(tmp_path / "o", *flags, source=source, tokenizer=False) == 0
    assert documents(tmp_path / "o") == [[1, 2, 3, 10], [7, 8, 10]]
    assert len((tmp_path / "o.bad_rows.jsonl").read_text().splitlines()) == 2


def test_a_text_that_the_tokenizer_gives_up_is_a_bad_row(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (tmp_path / "ranks.tiktoken").write_text("\n".join(lines))
    source = tmp_path / "rows.jsonl"
    texts = ["ab", "c", " " * 2_000_000, "d e"]
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    flags = ("--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(tmp_path / "ranks.tiktoken"))
    assert run(tmp_path / "o", *flags, source=source, tokenizer=False) == 0
    (bad,) = (tmp_path / "o.bad_rows.jsonl").read_text().splitlines()
    assert json.loads(bad)["line"] == 3
    assert [bytes(ids).decode() for ids in documents(tmp_path / "o")] == [texts[0], texts[1], texts[3]]


def test_flags_of_the_upstream_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "plain") == 0
    given = [word for flag, (takes, _) in NO_EFFECT.items() for word in ([flag, "1"] if takes else [flag])]
    assert run(tmp_path / "same", *given) == 0
    shown = capsys.readouterr().err
    assert all(f"{flag} has no effect here" in shown for flag in NO_EFFECT)
    assert files(tmp_path / "same") == files(tmp_path / "plain")
    for flag in REFUSED:
        assert run(tmp_path / "no", flag, "x") == 2
        assert f"{flag} is not available" in capsys.readouterr().err
    for flags in (
        ("--shard", "2/2"),
        ("--shard", "1"),
        ("--workers", "x"),
        ("--max-samples", "0"),
        ("--no-such-flag",),
        ("--handler-name", "AlpacaStyleInstructionHandler"),
        ("--keep-newlines",),
        ("--shard", "0/2", "--max-samples", "3"),
    ):
        assert run(tmp_path / "no", *flags) == 2, flags
        assert flags[0] in capsys.readouterr().err
    assert not list(tmp_path.glob("no*"))


def test_numbers_of_workers_are_compared_without_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--find-optimal-num-workers", "--workers-to-check", "1", "2", "--max-documents", "20")
    assert run(tmp_path / "o", *flags) == 0
    shown = capsys.readouterr().out
    assert "1 workers:" in shown
    assert "2 workers:" in shown
    assert "The fastest is --workers" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_ray_job_makes_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert run(tmp_path / "plain", "--append-eod") == 0
    assert run(tmp_path / "ray", "--append-eod", "--ray", "--workers", "2") == 0
    assert files(tmp_path / "ray") == files(tmp_path / "plain")
    assert not list(tmp_path.glob("ray.shard*"))


def start_long_preparation(tmp_path: Path) -> subprocess.Popen[str]:
    """A preparation of a pipe that never ends, under way."""
    command = [sys.executable, "preprocess_data.py", "--input", "-", "--output-prefix", str(tmp_path / "o")]
    command += ["--tokenizer-name-or-path", str(TOKENIZER), "--workers", "2", "--log-interval", "1"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stderr
    row = json.dumps({"text": "some words " * 1000}) + "\n"
    for _ in range(1000):
        process.stdin.write(row)
    process.stdin.flush()
    for line in process.stderr:
        if line.startswith("Processed"):
            return process
    raise AssertionError("the preparation ended early")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_preparation_leaves_no_dataset_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    process = start_long_preparation(tmp_path)
    workers = children(process.pid)
    assert len(workers) == 2
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    left = {path.name for path in tmp_path.iterdir()}
    assert all(name.endswith(".partial") for name in left)
    if number == signal.SIGTERM:
        assert left == set()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    assert run(tmp_path / "o") == 0
    assert not list(tmp_path.glob("*.partial"))
