"""Sources: every format and compression gives the same documents, every cut loses and doubles none."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import os
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.rows import read_rows
from mindspeed_llm.data.sources import InputFile, read_blocks, resolve_inputs
from mindspeed_llm.errors import DataError

TEXTS = [
    "plain",
    "日詩 and 🙂",
    'with "quotes", commas',
    "two\nlines\r\nand a third",
    "nul \0 inside",
    "[1, {",
    " blank around ",
    "long " * 50,
    '\\ and \\" at the end\\',
] + [f"document {i} " + "x" * (i * 7 % 90) for i in range(200)]

#: What a line of plain text cannot hold.
LINES = [text for text in TEXTS if "\n" not in text]


def jsonl(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def json_array(texts: Sequence[str]) -> bytes:
    return json.dumps([{"id": i, "text": text} for i, text in enumerate(texts)], indent=1, ensure_ascii=False).encode()


def separated(texts: Sequence[str], delimiter: str = ",") -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, delimiter=delimiter)
    writer.writerows([("id", "text"), *enumerate(texts)])
    return stream.getvalue().encode()


def table(texts: Sequence[str]) -> arrow.Table:
    return arrow.table({"id": range(len(texts)), "text": texts})


def parquet_bytes(texts: Sequence[str], **options: Any) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(table(texts), sink, **{"row_group_size": 50, **options})
    return sink.getvalue()


def arrow_bytes(texts: Sequence[str], new: Callable[..., Any] = arrow.ipc.new_file, **options: Any) -> bytes:
    sink = io.BytesIO()
    with new(sink, table(texts).schema, options=arrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table(texts), max_chunksize=50)
    return sink.getvalue()


def gzips(data: bytes) -> bytes:
    """Two members and the zeros with which tapes are filled."""
    return gzip.compress(data[: len(data) // 3]) + gzip.compress(data[len(data) // 3 :]) + b"\0" * 100


def zstds(data: bytes) -> bytes:
    """A frame that decoders skip, an empty one, and two with data."""
    pack = zstandard.ZstdCompressor(write_content_size=False).compress
    return b"\x50\x2a\x4d\x18\x04\0\0\0skip" + pack(b"") + pack(data[:1000]) + pack(data[1000:])


TEXT_FILES: dict[str, tuple[bytes, list[str]]] = {
    "a.jsonl": (jsonl(TEXTS), TEXTS),
    "a.ndjson": (jsonl(TEXTS), TEXTS),
    "a-lines.json": (jsonl(TEXTS), TEXTS),
    "a.json": (json_array(TEXTS), TEXTS),
    "bom.json": (b"\xef\xbb\xbf \n" + json_array(TEXTS) + b"\n \n", TEXTS),
    "a.txt": ("\n".join(LINES).encode(), LINES),
    "a.csv": (separated(TEXTS), TEXTS),
    "bom.csv": (b"\xef\xbb\xbf" + separated(TEXTS), TEXTS),
    "a.tsv": (separated(TEXTS, "\t"), TEXTS),
}
FILES = {
    **TEXT_FILES,
    **{f"{name}.gz": (gzips(data), texts) for name, (data, texts) in TEXT_FILES.items()},
    **{f"{name}.zst": (zstds(data), texts) for name, (data, texts) in TEXT_FILES.items()},
    "a.parquet": (parquet_bytes(TEXTS), TEXTS),
    "zstd.pq": (parquet_bytes(TEXTS, compression="zstd", use_dictionary=False), TEXTS),
    "a.arrow": (arrow_bytes(TEXTS), TEXTS),
    "a.feather": (arrow_bytes(TEXTS, compression="lz4"), TEXTS),
    "stream.arrow": (arrow_bytes(TEXTS, arrow.ipc.new_stream), TEXTS),
}


def documents(
    inputs: Sequence[InputFile], shard: tuple[int, int] = (0, 1), block_bytes: int = 1 << 20, **options: Any
) -> list[tuple[str, int, str]]:
    """Path, number and text of each good row; bad rows have ``bad: reason``."""
    found: list[tuple[str, int, str]] = []
    row = 1
    for block in read_blocks(inputs, shard, block_bytes, **options):
        if shard == (0, 1) and found and found[-1][0] == block.path:
            assert block.first_row in (None, row)
        row = block.first_row or row
        rows = read_rows(block, ["text"])
        assert rows.bad == sorted(rows.bad)
        both = [*zip(rows.numbers, rows.texts[0], strict=True), *((n, f"bad: {why}") for n, why in rows.bad)]
        found += [(block.path, row + number, text) for number, text in sorted(both)]
        assert all(number < rows.count for number, _ in both)
        row += rows.count
    return found


def texts_of(path: Path, **options: Any) -> list[str]:
    return [text for _, _, text in documents(resolve_inputs([str(path)]), **options)]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("block_bytes", [1 << 20, 300, 1])
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str, block_bytes: int) -> None:
    data, texts = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    assert texts_of(path, block_bytes=block_bytes, keys=["text"]) == texts
    assert texts_of(path, block_bytes=block_bytes) == texts


@pytest.mark.parametrize("name", FILES)
def test_sizes_of_blocks_add_up_to_about_that_of_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name][0])
    total = sum(block.size for block in read_blocks(resolve_inputs([str(path)]), block_bytes=300))
    assert total == pytest.approx(path.stat().st_size, abs=200)


SHARDED = ["a.jsonl", "a.txt", "a.parquet", "a.arrow", "stream.arrow", "a.json", "a.csv.gz", "a.jsonl.zst", "bom.csv"]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_shards_laid_end_to_end_are_the_whole(tmp_path: Path, count: int) -> None:
    for name in SHARDED:
        (tmp_path / name).write_bytes(FILES[name][0])
    (tmp_path / "empty.txt").touch()
    (tmp_path / "zz-empty.jsonl").touch()
    inputs = resolve_inputs([str(tmp_path)])
    whole = documents(inputs)
    parts = [documents(inputs, (index, count), block_bytes=500, keys=["text"]) for index in range(count)]
    assert [row for part in parts for row in part] == whole
    assert len(whole) == sum(len(FILES[name][1]) for name in SHARDED)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_shards_of_one_file_share_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name][0])
    inputs = resolve_inputs([str(tmp_path / name)])
    shares = [len(documents(inputs, (index, 4))) for index in range(4)]
    assert max(shares) < len(TEXTS) / 2
    assert min(shares) > 0


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.integers(0, 40), max_size=15), min_size=1, max_size=3),
    count=st.integers(1, 9),
    block_bytes=st.integers(1, 80),
    bom=st.booleans(),
    last_newline=st.booleans(),
)
def test_lines_of_any_length_are_in_exactly_one_shard(
    tmp_path: Path, files: list[list[int]], count: int, block_bytes: int, bom: bool, last_newline: bool
) -> None:
    inputs: list[InputFile] = []
    expected: list[tuple[str, int, str]] = []
    for index, lengths in enumerate(files):
        path = tmp_path / f"{index}.txt"
        lines = [f"{number}".ljust(length, ".") if length else "" for number, length in enumerate(lengths)]
        data = b"\xef\xbb\xbf" * bom + "\n".join(lines).encode() + b"\n" * last_newline
        path.write_bytes(data)
        inputs.append(InputFile(str(path), "txt", None, len(data)))
        expected += [(str(path), number, line) for number, line in enumerate(lines, start=1) if line]
    parts = [documents(inputs, (index, count), block_bytes) for index in range(count)]
    assert [row for part in parts for row in part] == expected


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.csv", "a.parquet", "a.arrow"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    noise = random.Random(0)
    texts = [noise.randbytes(500).hex() for _ in range(8000)]
    make: dict[str, Callable[[list[str]], bytes]] = {
        "a.json": json_array,
        "a.csv": separated,
        # One row group; a dictionary or a page of a megabyte would weigh on the larger file only.
        "a.parquet": lambda texts: parquet_bytes(
            texts, row_group_size=10**6, use_dictionary=False, data_page_size=1 << 16
        ),
        "a.arrow": arrow_bytes,
    }
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    peaks: list[float] = []
    for rows in (10, 1000, 8000):  # the first also imports
        path = tmp_path / name
        path.write_bytes(pack(make.get(name, jsonl)(texts[:rows])))
        inputs = resolve_inputs([str(path)])
        tables = 0
        tracemalloc.start()
        for block in read_blocks(inputs, block_bytes=1 << 15, keys=["text"]):
            read_rows(block, ["text"])
            tables = max(tables, arrow.total_allocated_bytes())
        peaks.append(tracemalloc.get_traced_memory()[1] + tables)
        tracemalloc.stop()
    # Beside it the list of batches of an Arrow file, some ten kilobytes here.
    assert peaks[2] < 1.1 * peaks[1] + 20_000


# --- what the words of --input name ------------------------------------------------------------------------------


def put(folder: Path, *names: str, data: bytes = b'{"text": "x"}\n') -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def names(folder: Path, *words: str) -> list[str]:
    return [os.path.relpath(file.path, folder) for file in resolve_inputs([str(folder / word) for word in words])]


def test_folders_and_patterns_are_sorted_and_leave_hidden_files_out(tmp_path: Path) -> None:
    put(tmp_path, "b/2.jsonl", "b/10.jsonl", "b.jsonl", "a.txt", ".hidden.jsonl", "_SUCCESS", "b/.git/x.jsonl")
    assert names(tmp_path, ".") == ["a.txt", "b/10.jsonl", "b/2.jsonl", "b.jsonl"]
    assert names(tmp_path, "**/*.jsonl") == ["b/10.jsonl", "b/2.jsonl", "b.jsonl"]
    assert names(tmp_path, "b.jsonl", "a.*", "b") == ["b.jsonl", "a.txt", "b/10.jsonl", "b/2.jsonl"]


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path: Path) -> None:
    put(tmp_path, "a[1].jsonl", "a1.jsonl")
    assert names(tmp_path, "a[1].jsonl") == ["a[1].jsonl"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b' \n{"text": 1}', ("jsonl", None)),
        (b"\xef\xbb\xbf[\n", ("json", None)),
        ("日詩".encode() * 3000, ("txt", None)),
        (b"", ("txt", None)),
        (gzip.compress(b"[]"), ("json", "gzip")),
        (zstds(b"{}" * 9000), ("jsonl", "zstd")),
        (parquet_bytes(["x"]), ("parquet", None)),
        (arrow_bytes(["x"]), ("arrow", None)),
        (arrow_bytes(["x"], arrow.ipc.new_stream), ("arrow", None)),
    ],
)
def test_a_file_without_a_suffix_goes_by_its_content(tmp_path: Path, data: bytes, expected: tuple[str, str]) -> None:
    path = tmp_path / "part-00000"
    path.write_bytes(data)
    assert resolve_inputs([str(path)]) == (InputFile(str(path), *expected, len(data)),)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", gzip.compress(b"{}"), "not what its name says.*\n.*gzip"),
        ("a.jsonl", zstds(b"{}"), "not what its name says.*\n.*zstd"),
        ("a.jsonl.gz", b"{}", "not what its name says.*\n.*no compression"),
        ("a.jsonl.gz", b"", "not what its name says.*\n.*an empty file"),
        ("a.gz", zstds(b"{}"), "not what its name says"),
        ("a.parquet", b"{}", "not what its name says.*\n.*jsonl"),
        ("a.parquet", b"", "not what its name says"),
        ("a.arrow", parquet_bytes(["x"]), "not what its name says.*\n.*parquet"),
        ("a.txt", parquet_bytes(["x"]), "not what its name says.*\n.*parquet"),
        ("a.parquet.gz", gzip.compress(parquet_bytes(["x"])), "read as they are"),
        ("a.jsonl", '{"text": 1}'.encode("utf-16"), "Text must be UTF-8"),
        ("a.txt", b"\xfe\xff\0x", "Text must be UTF-8"),
        ("a.csv", "a".encode("utf-32"), "Text must be UTF-8"),
        ("a.txt.gz", gzip.compress("a".encode("utf-16")), "Text must be UTF-8"),
        ("a.bin", b"\0\1\2", "format of an input is not known"),
        ("a.jsonl.bz2", bz2.compress(b"{}"), "format of an input is not known"),
        ("a.jsonl.gz", gzip.compress(b"{}")[:9], "damaged or ends too early"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\xff\xff\xff", "damaged or ends too early"),
    ],
)
def test_a_file_that_is_not_what_it_seems_is_one_clear_error(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        resolve_inputs([str(path)])
    assert str(path) in str(caught.value)


def test_inputs_that_are_not_there_or_there_twice(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", "d/b.jsonl", "d/README.md")
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for words, message in [
        (["nowhere.jsonl"], "does not exist.*\n.*nowhere.jsonl"),
        (["*.parquet"], r"does not exist.*\n.*\*.parquet"),
        (["empty"], "is empty"),
        (["d"], r"holds other files.*\n.*README.md"),
        (["pipe"], "no regular file"),
        (["a.jsonl", "link.jsonl"], "given twice.*\n.*link.jsonl"),
        (["a.jsonl", "*.jsonl"], "given twice"),
    ]:
        with pytest.raises(DataError, match=message):
            names(tmp_path, *words)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    def give(data: bytes) -> None:
        reader, writer = os.pipe()
        with open(writer, "wb") as stream:
            stream.write(data)
        monkeypatch.setattr(sys, "stdin", open(reader, encoding="utf-8"))  # noqa: SIM115 - closed below

    yield give
    sys.stdin.close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz"])
def test_standard_input_is_one_of_the_inputs(tmp_path: Path, stdin: Callable[[bytes], None], name: str) -> None:
    put(tmp_path, "before.jsonl", "after.jsonl")
    data, texts = FILES[name]
    if name == "a.txt":
        # Content with NULs does not pass for text where no name says so.
        data, texts = data.replace(b"\0", b"-"), [text.replace("\0", "-") for text in texts]
    stdin(data)
    inputs = resolve_inputs([str(tmp_path / "before.jsonl"), "-", str(tmp_path / "after.jsonl")])
    assert [text for _, _, text in documents(inputs, block_bytes=500)] == ["x", *texts, "x"]
    stdin(data)
    assert [text for _, _, text in documents(resolve_inputs(["-"]))] == texts


def test_what_standard_input_cannot_be(stdin: Callable[[bytes], None]) -> None:
    stdin(parquet_bytes(["x"]))
    with pytest.raises(DataError, match="read as they are"):
        resolve_inputs(["-"])
    stdin(b"{}")
    with pytest.raises(DataError, match="given twice"):
        resolve_inputs(["-", "-"])
    with pytest.raises(DataError, match="cannot be read in parts"):
        documents([InputFile("-", "jsonl", None, 0)], (0, 2))


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [gzips, zstds])
def test_a_truncated_compressed_file_never_looks_whole(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    whole = pack(FILES["a.jsonl"][0]).rstrip(b"\0")
    path = tmp_path / "cut"
    for size in [*range(20, len(whole) - 1, 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="cut"):
            texts_of(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather", "stream.arrow", "a.jsonl.gz", "a.json.zst"])
def test_a_truncated_or_garbled_file_is_one_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = FILES[name][0]
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(DataError, match=name):
        texts_of(path)


@pytest.mark.parametrize("module", ["zstandard", "pyarrow"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    path = tmp_path / ("a.jsonl.zst" if module == "zstandard" else "a.parquet")
    path.write_bytes(FILES[path.name][0])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=f"pip install {module}"):
        texts_of(path)


def test_gzip_without_isal_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal", None)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(FILES["a.jsonl.gz"][0])
    assert texts_of(path, block_bytes=400) == TEXTS
    path.write_bytes(FILES["a.jsonl.gz"][0][:1000])
    with pytest.raises(DataError, match="ends too early"):
        texts_of(path)


def test_a_file_that_is_gone_is_an_error_of_the_worker(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl")
    blocks = list(read_blocks(resolve_inputs([str(tmp_path / "a.jsonl")])))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"cannot be read.*\n.*a\.jsonl"):
        read_rows(blocks[0], ["text"])


# --- dirty tables and arrays -------------------------------------------------------------------------------------


def outcomes(path: Path, **options: Any) -> list[tuple[int, str]]:
    return [(number, text) for _, number, text in documents(resolve_inputs([str(path)]), **options)]


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_dirty_csv_lists_lines_and_keeps_the_others(tmp_path: Path, block_bytes: int) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'text,n\r\nfirst,1\r\n"two\r\nlines",2\r\n,3\r\nshort\r\nlong,4,5\r\n\r\n"a"b,6\r\n\xff\xfe,7\r\n'
        b'nul \0 inside,8\r\nlast,9\r\n"open,10\r\nmore,11\r\n'
    )
    assert outcomes(path, block_bytes=block_bytes) == [
        (2, "first"),
        (3, "two\r\nlines"),
        (5, "bad: 'text' is empty"),
        (6, "bad: 1 cells where the header has 2"),
        (7, "bad: 3 cells where the header has 2"),
        (8, "bad: blank line"),
        (9, "bad: broken csv: ',' expected after '\"'"),
        (10, "bad: invalid UTF-8: invalid start byte at byte 0"),
        (11, "nul \0 inside"),
        (12, "last"),
        (13, "bad: broken csv: unexpected end of data, 2 lines on"),
    ]


def test_a_quote_that_is_never_closed_does_not_take_the_file_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindspeed_llm.data.tables.MAX_CSV_CELL", 1000)
    path = tmp_path / "a.csv"
    path.write_bytes(b'text\nfirst\n"open\n' + b"more\n" * 1000)
    with pytest.raises(DataError, match=r"too long(.|\n)*a\.csv:3: field larger"):
        outcomes(path)


@pytest.mark.parametrize(
    ("suffix", "key", "message"),
    [
        ("parquet", "txt", r"no column 'txt'(.|\n)*text, n \(no text\)"),
        ("parquet", "n", r"'n' holds no text(.|\n)*text, n \(no text\)"),
        ("arrow", "txt", r"no column 'txt'(.|\n)*text, n \(no text\)"),
        ("arrow", "n", r"'n' holds no text(.|\n)*text, n \(no text\)"),
        ("csv", "txt", r"no column 'txt'(.|\n)*text, n"),
        ("csv", "twice", r"'twice' holds no text(.|\n)*twice \(no text\)"),
    ],
)
def test_a_column_that_does_not_fit_is_told_before_the_first_block(
    tmp_path: Path, suffix: str, key: str, message: str
) -> None:
    rows = arrow.table({"text": ["a"], "n": [1]})
    good, path = tmp_path / "0.jsonl", tmp_path / f"1.{suffix}"
    good.write_bytes(b'{"text": "x"}\n')
    if suffix == "parquet":
        parquet.write_table(rows, path)
    elif suffix == "arrow":
        with arrow.ipc.new_file(path, rows.schema) as writer:
            writer.write_table(rows)
    else:
        path.write_text("text,n,twice,twice\na,1,2,3\n")
    inputs = resolve_inputs([str(good), str(path)])
    with pytest.raises(DataError, match=message):
        next(read_blocks(inputs, keys=[key]))
    with pytest.raises(DataError, match="column 'txt'"):
        [read_rows(block, ["txt"]) for block in read_blocks(inputs) if block.format != "jsonl"]


STRINGS: dict[str, Any] = {
    "string": arrow.string(),
    "large": arrow.large_string(),
    "view": arrow.string_view(),
    "dictionary": arrow.dictionary(arrow.int32(), arrow.string()),
}


@pytest.mark.parametrize("kind", STRINGS)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_every_arrow_type_of_text_gives_its_rows_and_lists_nulls(tmp_path: Path, kind: str, suffix: str) -> None:
    column = arrow.array(["a", None, "", "日詩", "a"])
    rows = arrow.table({"text": column.cast(STRINGS[kind]), "none": arrow.nulls(5)})
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        parquet.write_table(rows, path, row_group_size=2)
    else:
        with arrow.ipc.new_file(path, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=4)
    expected = [(1, "a"), (2, "bad: 'text' is null, not text"), (3, "bad: 'text' is empty"), (4, "日詩"), (5, "a")]
    assert outcomes(path, block_bytes=1) == expected
    blocks = read_blocks(resolve_inputs([str(path)]), keys=["none"])
    assert [why for block in blocks for _, why in read_rows(block, ["none"]).bad] == ["'none' is null, not text"] * 5


def test_a_cell_that_is_no_utf8_spoils_its_own_row(tmp_path: Path) -> None:
    column = arrow.array([b"good", b"\xff", b"also good"], arrow.binary()).view(arrow.string())
    parquet.write_table(arrow.table({"text": column}), tmp_path / "a.parquet")
    assert outcomes(tmp_path / "a.parquet") == [
        (1, "good"),
        (2, "bad: invalid UTF-8: invalid start byte at byte 0"),
        (3, "also good"),
    ]


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
def test_dirty_elements_of_an_array_are_listed_by_number(tmp_path: Path, block_bytes: int) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(
        b'[{"text": "a]},{"}, 5, [{"text": "b"}], {"text": "c"} }, {"text": "\xff"}, {"text": "two\nlines"},'
        b' {"text": "d\\\\"}, , null, {"txt": 1, "x": [[{}], "\\""]},\n{"text":\n"e"},]'
    )
    assert outcomes(path, block_bytes=block_bytes) == [
        (1, "a]},{"),
        (2, "bad: not a JSON object but a number"),
        (3, "bad: not a JSON object but a list"),
        (4, "bad: broken JSON: Extra data: line 1 column 15 (char 14)"),
        (5, "bad: invalid UTF-8: invalid start byte at byte 10"),
        (6, "bad: broken JSON: Invalid control character at: line 1 column 14 (char 13)"),
        (7, "d\\"),
        (8, "bad: blank line"),
        (9, "bad: not a JSON object but null"),
        (10, "bad: no key 'text'"),
        (11, "e"),
        (12, "bad: blank line"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"text": "a"}, {"text": "b', r"does not end(.|\n)*a\.json, element 2"),
        (b'[{"text": "a"}', r"does not end(.|\n)*a\.json, element 1"),
        (b'[{"text": "a"}] [1]', r"Something follows(.|\n)*a\.json, element 1"),
        (b"[", r"does not end(.|\n)*element 1"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_an_array_that_is_not_one_stops(tmp_path: Path, data: bytes, message: str, block_bytes: int) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        outcomes(path, block_bytes=block_bytes)


def test_an_empty_array_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b" [ \n] ")
    assert outcomes(tmp_path / "a.json") == []
