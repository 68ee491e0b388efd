"""Raw files as data: what is one, what decides what is prepared from it, who prepares it, and what goes wrong."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.data import raw
from mindspeed_llm.data.datasets import build_datasets, prepare_raw
from mindspeed_llm.data.inputs import split_sizes
from mindspeed_llm.data.once import Pace
from mindspeed_llm.data.prepare import PrepareResult, PrepareSettings, prepare
from mindspeed_llm.data.raw import PIECE, RawSettings, is_raw, prepared_prefix
from mindspeed_llm.data.tokenizer import NullTokenizer, TextTokenizer, load_tokenizer
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import TOKENIZER, run_config, write_documents

FORK = multiprocessing.get_context("fork")
PACE = Pace(beat=0.01, stale=1000.0)
SETTINGS = RawSettings()
TEXTS = [f"document number {number}, and what it says" for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(TOKENIZER)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", TEXTS)


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[PrepareSettings]:
    """The preparations of this process, in order."""
    seen: list[PrepareSettings] = []

    def counted(settings: PrepareSettings, tokenizer: TextTokenizer) -> PrepareResult:
        seen.append(settings)
        return prepare(settings, tokenizer)

    monkeypatch.setattr(raw, "prepare", counted)
    return seen


def write_rows(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def content(prefix: str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def at_time(path: Path, nanoseconds: int) -> Path:
    os.utime(path, ns=(nanoseconds, nanoseconds))
    return path


# ------------------------------------------------------------------------------------------------------ what is raw


def test_what_is_raw(tmp_path: Path, source: Path) -> None:
    prefix = write_documents(tmp_path / "d", [[1, 2, 3]])
    assert is_raw(str(source))
    assert is_raw(str(tmp_path))
    assert not any(is_raw(f"{prefix}{suffix}") for suffix in ("", ".bin", ".idx"))
    assert not is_raw(str(tmp_path / "missing.jsonl"))
    # A .bin whose index is lost is no text.
    Path(f"{prefix}.idx").unlink()
    assert not is_raw(f"{prefix}.bin")


def test_where_a_file_and_a_dataset_have_one_name_it_is_the_dataset(source: Path) -> None:
    write_documents(source, [[1, 2, 3]])
    assert source.is_file()
    assert not is_raw(str(source))


def test_a_word_that_is_neither(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    cfg = run_config(data_path=(str(tmp_path / "missing"),), split="1,0,0", seq_length=8)
    cfg = prepare_raw(cfg, tokenizer, [1, 0, 0])
    with pytest.raises(DataError, match=r"missing.idx does not exist(.|\n)*raw file"):
        build_datasets(cfg, tokenizer, [1, 0, 0])


def test_raw_data_needs_a_tokenizer(source: Path) -> None:
    with pytest.raises(DataError, match=r"needs a tokenizer(.|\n)*rows.jsonl(.|\n)*--tokenizer-name-or-path"):
        prepared_prefix(str(source), NullTokenizer(9), SETTINGS)


# ------------------------------------------------------------------------------------------------------- what is made


def test_as_preprocess_data_makes_it_with_ends_of_documents(
    tmp_path: Path, source: Path, tokenizer: TextTokenizer
) -> None:
    with source.open("a") as stream:
        stream.write("broken\n")
    whole = prepare(PrepareSettings((str(source),), str(tmp_path / "by_hand"), append_eod=True), tokenizer)
    prefix = prepared_prefix(str(source), tokenizer, SETTINGS, PACE)
    assert content(prefix) == content(whole.prefixes["text"])
    folder = Path(prefix).parent
    assert folder.parent == tmp_path / "_prepared"
    assert folder.name.startswith("rows.jsonl-")
    (bad,) = folder.glob("*.bad_rows.jsonl")
    assert json.loads(bad.read_text())["line"] == len(TEXTS) + 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_another_place(tmp_path: Path, source: Path, tokenizer: TextTokenizer) -> None:
    prefix = prepared_prefix(str(source), tokenizer, RawSettings(cache=str(tmp_path / "cache")), PACE)
    assert Path(prefix).is_relative_to(tmp_path / "cache" / "_prepared")
    assert not (tmp_path / "_prepared").exists()


def test_a_folder_of_files(tmp_path: Path, tokenizer: TextTokenizer, source: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    write_rows(folder / "a.jsonl", TEXTS[:25])
    write_rows(folder / "b.jsonl", TEXTS[25:])
    prefix = prepared_prefix(f"{folder}/", tokenizer, SETTINGS, PACE)
    assert Path(prefix).is_relative_to(tmp_path / "_prepared")
    assert content(prefix) == content(prepared_prefix(str(source), tokenizer, SETTINGS, PACE))
    # What is prepared from one of its files lies in it, and is no data.
    prepared_prefix(str(folder / "a.jsonl"), tokenizer, SETTINGS, PACE)
    assert (folder / "_prepared").is_dir()
    assert prepared_prefix(str(folder), tokenizer, SETTINGS, PACE) == prefix


def test_a_compressed_file(source: Path, tokenizer: TextTokenizer) -> None:
    packed = source.with_name("rows.jsonl.gz")
    packed.write_bytes(gzip.compress(source.read_bytes()))
    prefix = prepared_prefix(str(packed), tokenizer, SETTINGS, PACE)
    assert content(prefix) == content(prepared_prefix(str(source), tokenizer, SETTINGS, PACE))


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, mindspeed_llm.data.raw; sys.exit(bool({'torch', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------------ the key


def test_a_second_start_prepares_nothing(
    source: Path, tokenizer: TextTokenizer, preparations: list[PrepareSettings]
) -> None:
    first = prepared_prefix(str(source), tokenizer, SETTINGS, PACE)
    assert prepared_prefix(str(source), load_tokenizer(TOKENIZER), SETTINGS, PACE) == first
    assert len(preparations) == 1


def one_merge_less(folder: Path) -> TextTokenizer:
    """The same vocabulary and end of document, other ids for some texts."""
    shutil.copytree(TOKENIZER, folder)
    file = folder / "tokenizer.json"
    parts = json.loads(file.read_text())
    parts["model"]["merges"].pop()
    file.write_text(json.dumps(parts))
    return load_tokenizer(folder)


def test_what_decides_the_key(source: Path, tokenizer: TextTokenizer, preparations: list[PrepareSettings]) -> None:
    def key(by: TextTokenizer = tokenizer, **settings: Any) -> str:
        return prepared_prefix(str(source), by, replace(SETTINGS, **settings), PACE)

    at_time(source, 10**18)
    rows = source.read_text()
    source.write_text(rows.replace('"text"', '"body"').replace("\n", " \n") + rows)
    at_time(source, 10**18)
    keys = [key(), key(one_merge_less(source.parent / "tokenizer")), key(key="body")]
    at_time(source, 10**18 + 1)
    keys.append(key())
    # The same size and time, another letter.
    source.write_text(source.read_text().replace("number 7,", "number X,"))
    at_time(source, 10**18)
    keys.append(key())
    assert len({Path(prefix).parent for prefix in keys}) == len(keys) == len(preparations)
    # Earlier ones stay, for the runs that read them, and serve again.
    source.write_text(source.read_text().replace("number X,", "number 7,"))
    assert key(workers=2) not in keys
    at_time(source, 10**18)
    assert key(workers=2, verify=True) == keys[0]


@pytest.mark.parametrize("size", [1, PIECE, 66 * PIECE, 66 * PIECE + 1, 1000 * PIECE + 5])
def test_the_sample_sees_all_of_a_small_file_and_parts_of_a_large_one(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"

    def sample(start: int = 0, length: int = 0) -> str:
        data = bytearray(size)
        data[start : start + length] = b"\1" * length
        path.write_bytes(data)
        return raw._sample(str(path), 64)

    blank, small = sample(), size <= 66 * PIECE
    # Of a large file, whatever is longer than the way from one of the 66 pieces to the next.
    length = 1 if small else size // 65 + PIECE
    places = [*range(0, size - length, max(1, size // 50)), size - length]
    assert blank not in [sample(place, length) for place in places]
    assert blank not in [sample(0, 1), sample(size - 1, 1)]
    assert size < 1000 * PIECE or sample(2 * PIECE, PIECE) == blank


def test_a_change_that_the_sample_does_not_see(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    source = at_time(write_rows(tmp_path / "large.jsonl", ["x" * 9 * PIECE] * 80), 10**18)
    settings = RawSettings(verify=True)
    prefix = prepared_prefix(str(source), tokenizer, settings, PACE)
    assert prepared_prefix(str(source), tokenizer, settings, PACE) == prefix
    sample = raw._sample(str(source), 64)
    data = bytearray(source.read_bytes())
    place = next(place for place in range(PIECE, len(data), PIECE) if unseen(source, data, place, sample))
    data[place] = ord("y")
    source.write_bytes(data)
    at_time(source, 10**18)
    assert prepared_prefix(str(source), tokenizer, SETTINGS, PACE) == prefix
    with pytest.raises(DataError, match=r"not the one that was prepared(.|\n)*large.jsonl(.|\n)*remove .*large.jsonl-"):
        prepared_prefix(str(source), tokenizer, settings, PACE)


def unseen(source: Path, data: bytearray, place: int, sample: str) -> bool:
    changed = data.copy()
    changed[place] = ord("y")
    source.write_bytes(changed)
    return data[place] == ord("x") and raw._sample(str(source), 64) == sample


def test_a_file_that_changes_while_it_is_prepared(
    source: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def growing(settings: PrepareSettings, by: TextTokenizer) -> PrepareResult:
        result = prepare(settings, by)
        with source.open("a") as stream:
            stream.write('{"text": "one more"}\n')
        return result

    monkeypatch.setattr(raw, "prepare", growing)
    with pytest.raises(DataError, match=r"changed while it was prepared"):
        prepared_prefix(str(source), tokenizer, SETTINGS, PACE)
    assert not [path for path in (source.parent / "_prepared").iterdir() if path.is_dir()]


# ------------------------------------------------------------------------------------------------- several processes


def test_four_processes_prepare_once(tmp_path: Path, source: Path, tokenizer: TextTokenizer) -> None:
    barrier, results, log = FORK.Barrier(4), FORK.SimpleQueue(), tmp_path / "log"

    def logged(settings: PrepareSettings, by: TextTokenizer) -> PrepareResult:
        with log.open("a") as stream:
            stream.write("prepared\n")
        return prepare(settings, by)

    def rank() -> None:
        raw.prepare = logged
        barrier.wait()
        prefix = prepared_prefix(str(source), tokenizer, SETTINGS, PACE)
        results.put((prefix, content(prefix)))

    ranks = [FORK.Process(target=rank, daemon=True) for _ in range(4)]
    for process in ranks:
        process.start()
    said = [results.get() for _ in ranks]
    for process in ranks:
        process.join()
    assert log.read_text() == "prepared\n"
    assert said == [said[0]] * 4
    assert [path.name for path in (tmp_path / "_prepared").iterdir()] == [Path(said[0][0]).parent.name]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_ended_preparation_is_done_again(source: Path, tokenizer: TextTokenizer, how: int) -> None:
    place = source.parent / "_prepared"

    def stuck() -> None:
        def half(settings: PrepareSettings, by: TextTokenizer) -> PrepareResult:
            result = prepare(settings, by)
            threading.Event().wait()
            return result

        raw.prepare = half
        prepared_prefix(str(source), tokenizer, SETTINGS, PACE)

    process = FORK.Process(target=stuck, daemon=True)
    process.start()
    until(lambda: any(place.glob("*.partial0/*.idx")))
    os.kill(process.pid or 0, how)
    process.join()
    assert not [path for path in place.iterdir() if path.is_dir() and ".partial" not in path.name]
    prefix = prepared_prefix(str(source), tokenizer, SETTINGS, PACE)
    assert len(content(prefix)[0]) > 0
    assert [path.name for path in place.iterdir()] == [Path(prefix).parent.name]


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


def test_a_failure_is_one_clear_error_each_time(source: Path, tokenizer: TextTokenizer) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match=r"No row gave a document(.|\n)*no key 'body'"):
            prepared_prefix(str(source), tokenizer, RawSettings(key="body"), PACE)


def test_a_place_that_cannot_be_written_to(source: Path, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    # A file where the folder should be: refused to root as well, unlike a folder without permission to write.
    (tmp_path / "_prepared").write_text("")
    with pytest.raises(DataError, match=r"cannot be written(.|\n)*_prepared: (.|\n)*--data-cache-path"):
        prepared_prefix(str(source), tokenizer, SETTINGS, PACE)
    prepared_prefix(str(source), tokenizer, RawSettings(cache=str(tmp_path / "cache")), PACE)


# ----------------------------------------------------------------------------------------------------- configurations


def tokens(cfg: Any, tokenizer: TextTokenizer, sizes: list[int]) -> list[list[int]]:
    datasets = build_datasets(cfg, tokenizer, sizes)
    return [part[number]["tokens"].tolist() for part in datasets if part is not None for number in range(len(part))]


def test_blends_mix_raw_and_prepared(tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = write_rows(tmp_path / "one.jsonl", TEXTS), write_rows(tmp_path / "two.jsonl", TEXTS[::-1])
    (tmp_path / "3").write_text("a file with the name of a weight")
    hand = [
        prepare(PrepareSettings((str(path),), str(path.with_suffix("")), append_eod=True), tokenizer).prefixes["text"]
        for path in (one, two)
    ]
    sizes, values = [12, 0, 0], {"split": "1,0,0", "seq_length": 16}
    for words, same in (
        (("3", str(one), "1", hand[1]), ("3", hand[0], "1", hand[1])),
        ((str(one), str(two)), tuple(hand)),
    ):
        cfg = prepare_raw(run_config(data_path=words, **values), tokenizer, sizes)
        assert tokens(cfg, tokenizer, sizes) == tokens(run_config(data_path=same, **values), tokenizer, sizes)
        assert not any(is_raw(word) for word in cfg.data.data_path or () if word != "3")


@pytest.mark.parametrize("form", ["flags", "file"])
def test_each_split_by_itself_and_only_what_is_read(
    tmp_path: Path, tokenizer: TextTokenizer, preparations: list[PrepareSettings], form: str
) -> None:
    paths = {name: str(write_rows(tmp_path / f"{name}.jsonl", TEXTS)) for name in ("train", "valid", "test")}
    if form == "flags":
        values: dict[str, Any] = {f"{name}_data_path": (path,) for name, path in paths.items()}
    else:
        listing = tmp_path / "listing.json"
        listing.write_text(json.dumps({name: [path] for name, path in paths.items()}))
        values = {"per_split_data_args_path": str(listing)}
    cfg = run_config(**values, seq_length=16, global_batch_size=2, train_iters=2, eval_iters=1)
    sizes = list(split_sizes(cfg))
    assert sizes == [4, 2, 2]
    sizes[2] = 0
    cfg = prepare_raw(cfg, tokenizer, sizes)
    assert sorted(Path(word).name for settings in preparations for word in settings.inputs) == [
        "train.jsonl",
        "valid.jsonl",
    ]
    assert len(tokens(cfg, tokenizer, sizes)) >= 6


@pytest.mark.parametrize("text", ["[]", '{"train": "one word"}', "{"])
def test_a_file_of_splits_that_is_none(tmp_path: Path, tokenizer: TextTokenizer, text: str) -> None:
    (tmp_path / "splits.json").write_text(text)
    cfg = run_config(per_split_data_args_path=str(tmp_path / "splits.json"), seq_length=16)
    with pytest.raises(DataError, match=r"splits.json(.|\n)*--per-split-data-args-path"):
        prepare_raw(cfg, tokenizer, [1, 0, 0])


def test_words_from_a_file(tmp_path: Path, source: Path, tokenizer: TextTokenizer) -> None:
    (tmp_path / "words").write_text(f"1.0 {source}\n")
    values = {"split": "1,0,0", "seq_length": 16}
    direct = prepare_raw(run_config(data_path=("1.0", str(source)), **values), tokenizer, [4, 0, 0])
    listed = prepare_raw(run_config(data_args_path=str(tmp_path / "words"), **values), tokenizer, [4, 0, 0])
    assert tokens(listed, tokenizer, [4, 0, 0]) == tokens(direct, tokenizer, [4, 0, 0])


def test_prepared_data_is_left_alone(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    cfg = run_config(data_path=(write_documents(tmp_path / "d", [[1, 2, 3]]),), seq_length=2)
    assert prepare_raw(cfg, tokenizer, [1, 0, 0]) is cfg
