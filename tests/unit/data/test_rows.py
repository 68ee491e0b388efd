"""Rows: what is a text, what is not and why, whoever parses it."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_llm.data import rows
from mindspeed_llm.data.rows import MAX_DEPTH, Rows, read_rows
from mindspeed_llm.data.sources import Block, InputFile, read_blocks, resolve_inputs
from mindspeed_llm.errors import DataError

BOM = b"\xef\xbb\xbf"


def read(lines: bytes, keys: Sequence[str] = ("text",), kind: str = "jsonl") -> Rows:
    return read_rows(Block("rows", kind, 1, len(lines), lines), list(keys))


def read_file(path: Path, block_bytes: int = 1 << 20, kind: str = "jsonl") -> tuple[dict[int, str], dict[int, str]]:
    """Number -> text of the good rows, number -> reason of the bad ones."""
    good: dict[int, str] = {}
    bad: dict[int, str] = {}
    row = 1
    for block in read_blocks([InputFile(str(path), kind, None, path.stat().st_size)], block_bytes=block_bytes):
        found = read_rows(block, ["text"])
        row = block.first_row or row
        good.update(zip((row + number for number in found.numbers), found.texts[0], strict=True))
        bad.update((row + number, why) for number, why in found.bad)
        row += found.count
    return good, bad


def nested(depth: int) -> bytes:
    """A row of so many levels."""
    return b'{"text": "deep", "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


#: row -> its text.
GOOD: dict[bytes, str] = {
    b'{"text": "plain"}': "plain",
    b' {"text" : "carriage return"}\t\r': "carriage return",
    '{"text": "日詩 🙂"}'.encode(): "日詩 🙂",
    b'{"text": "\\u65e5 \\ud83d\\ude42 \\u0000 \\n"}': "日 🙂 \0 \n",
    b'{"text": " "}': " ",
    b'{"text": "NaN", "n": NaN, "i": -Infinity}': "NaN",
    b'{"text": "number", "n": ' + b"9" * 5000 + b', "m": 1e999}': "number",
    b'{"text": "surrogate elsewhere", "x": "\\ud800", "\\udfff": 1}': "surrogate elsewhere",
    b'{"text": 1, "text": "the last of two"}': "the last of two",
    b'{"text": "other fields", "x": [null, {"text": 1}], "y": null}': "other fields",
    nested(MAX_DEPTH): "deep",
    b'{"text": "brackets in text ' + b"[{" * MAX_DEPTH + b'", "x": ["[[", {}]}': "brackets in text " + "[{" * MAX_DEPTH,
    b'{"text": "' + b"x" * 100_000 + b'"}': "x" * 100_000,
}

#: row -> how its reason begins.
BAD: dict[bytes, str] = {
    b"": "blank line",
    b" \t\r": "blank line",
    b'{"text": ""}': "'text' is empty",
    b'{"text": null}': "'text' is null, not text",
    b'{"text": 123}': "'text' is a number, not text",
    b'{"text": 1.5}': "'text' is a number, not text",
    b'{"text": NaN}': "'text' is a number, not text",
    b'{"text": false}': "'text' is true or false, not text",
    b'{"text": ["a"]}': "'text' is a list, not text",
    b'{"text": {"a": "b"}}': "'text' is an object, not text",
    b'{"text": "the first of two", "text": 2}': "'text' is a number, not text",
    b'{"txt": "x"}': "no key 'text'",
    b"{}": "no key 'text'",
    b'["text"]': "not a JSON object but a list",
    b'"text"': "not a JSON object but text",
    b"null": "not a JSON object but null",
    b'{"text": "a"': "broken JSON",
    b"{'text': 'a'}": "broken JSON",
    b'{"text": "a"} {"text": "b"}': "broken JSON",
    b'{"text": "raw \0 nul"}': "broken JSON",
    b'{"text": "raw \t tab"}': "broken JSON",
    b'{"text": "\\x"}': "broken JSON",
    BOM + b'{"text": "a mark in the middle"}': "broken JSON",
    b'{"text": "\\ud800 half"}': "'text' holds half of a surrogate pair",
    b'{"text": "\xff\xfe"}': "invalid UTF-8: invalid start byte at byte 10",
    b'{"text": "\xed\xa0\x80"}': "invalid UTF-8",
    b'{"text": "a", "x": "\xff"}': "invalid UTF-8",
    nested(MAX_DEPTH + 1): "broken JSON: nested too deeply",
    nested(1000): "broken JSON: nested too deeply",
    b"[" * 100_000: "broken JSON: nested too deeply",
}


@pytest.fixture(params=["orjson", "json"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "json":
        monkeypatch.setattr(rows, "orjson", None)
    return request.param


@pytest.mark.parametrize("row", GOOD, ids=lambda row: repr(row[:30]))
def test_good_rows(parser: str, row: bytes) -> None:
    assert read(row) == Rows([[GOOD[row]]], [0], [], 1)
    assert parser in ("orjson", "json")


@pytest.mark.parametrize("row", BAD, ids=lambda row: repr(row[:30]))
def test_bad_rows(parser: str, row: bytes) -> None:
    found = read(row + b"\n")
    assert (found.texts, found.count, [number for number, _ in found.bad]) == ([[]], 1, [0])
    assert found.bad[0][1].startswith(BAD[row])


@pytest.mark.parametrize("block_bytes", [97, 1 << 20])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_good_rows_among_bad_ones_are_as_in_a_clean_file(tmp_path: Path, block_bytes: int, end: bytes) -> None:
    mixed: list[bytes] = []
    for index, row in enumerate(BAD):
        mixed += [row, list(GOOD)[index % len(GOOD)]]
    dirty, clean = tmp_path / "dirty.jsonl", tmp_path / "clean.jsonl"
    dirty.write_bytes(BOM + b"\n".join(mixed) + end)
    clean.write_bytes(b"\n".join(row for row in mixed if row in GOOD))
    good, bad = read_file(dirty, block_bytes)
    assert list(good.values()) == list(read_file(clean)[0].values())
    assert list(good) == [number for number, row in enumerate(mixed, start=1) if row in GOOD]
    assert list(bad) == [number for number, row in enumerate(mixed, start=1) if row in BAD]


def test_a_row_counts_only_when_all_its_keys_do() -> None:
    found = read(
        b'{"a": "1", "b": "2"}\n{"a": "3"}\n{"b": "4"}\n{"a": "5", "b": null}\n{"a": "6", "b": ""}\n'
        b'{"b": "8", "a": "7"}\n',
        ["a", "b"],
    )
    assert found.texts == [["1", "7"], ["2", "8"]]
    assert found.numbers == [0, 5]
    assert found.bad == [(1, "no key 'b'"), (2, "no key 'a'"), (3, "'b' is null, not text"), (4, "'b' is empty")]


def test_plain_text_is_a_document_a_line_and_blank_lines_separate() -> None:
    found = read(b"a\r\n\n \t \n\xff\n nul \0 and\rreturn \n" + BOM + b"last", ["any"], "txt")
    assert found == Rows([["a", " nul \0 and\rreturn ", "\ufefflast"]], [0, 4, 5],
                         [(3, "invalid UTF-8: invalid start byte at byte 0")], 6)  # fmt: skip


@pytest.mark.parametrize("content", [b"", BOM])
def test_a_file_without_lines_has_no_rows(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    assert read_file(tmp_path / "a") == ({}, {})
    assert read_file(tmp_path / "a", kind="txt") == ({}, {})


# --- whatever the bytes are ----------------------------------------------------------------------------------------

#: Pieces that come near to JSON more often than bytes do.
PIECES = st.sampled_from(
    [b'{"text": "', b'"}', b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u", b"d800", b"dc00", b"0041", b"null",
     b"true", b"NaN", b"-Infinity", b"-0", b"1e400", b"0.1", b"01", b"9" * 30, b" ", b"\t", b"\r", b"\0", b"\x7f",
     b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x99\x82", b"\xc2\x80", b"\xe2\x80\xa8", BOM, b'"text"', b'"x": ', b"a"]
)  # fmt: skip
NOISE = st.one_of(st.binary(max_size=40), st.lists(PIECES, max_size=12).map(b"".join)).map(
    lambda noise: noise.replace(b"\n", b" ")
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["text", "txt", "", "é"]), VALUES).map(lambda row: json.dumps(row).encode())
TEXTS = st.text(min_size=1, max_size=20).map(lambda text: json.dumps({"text": text}, ensure_ascii=False))
ROWS = st.one_of(NOISE, OBJECTS, TEXTS.map(lambda row: row.encode(errors="surrogatepass")))
FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def python_text(line: bytes) -> str | None:
    """The text of a row as Python's own JSON reader sees it."""
    try:
        text = json.loads(line.decode())["text"]
        text.encode()
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return text or None


@FUZZ
@given(lines=st.lists(ROWS, max_size=12))
def test_orjson_and_python_agree_on_what_is_good_and_why_not(lines: list[bytes]) -> None:
    content = b"\n".join(lines) + b"\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "orjson", None)
        expected = read(content)
    assert read(content) == expected
    assert dict(zip(expected.numbers, expected.texts[0], strict=True)) == {
        number: text for number, line in enumerate(content.split(b"\n")) if (text := python_text(line)) is not None
    }


@FUZZ
@given(lines=st.lists(ROWS, max_size=12), block=st.integers(1, 60), last_newline=st.booleans())
def test_no_line_is_lost_whatever_it_holds(tmp_path: Path, lines: list[bytes], block: int, last_newline: bool) -> None:
    source = tmp_path / "rows.jsonl"
    content = b"\n".join(lines) + (b"\n" if last_newline else b"")
    source.write_bytes(content)
    good, bad = read_file(source, block)
    content = content.removeprefix(BOM)
    expected = content.split(b"\n")[: content.count(b"\n") + (not content.endswith(b"\n") and content != b"")]
    assert sorted([*good, *bad]) == list(range(1, len(expected) + 1))
    for number, line in enumerate(expected, start=1):
        assert good.get(number) == python_text(line), line


@FUZZ
@given(
    noise=st.lists(NOISE, min_size=1, max_size=8), block=st.integers(1, 60), pack=st.sampled_from(["", ".gz", ".zst"])
)
def test_noise_between_good_rows_takes_none_of_them(tmp_path: Path, noise: list[bytes], block: int, pack: str) -> None:
    known = [f"known {index} 日" for index in range(len(noise) + 1)]
    for kind in ("jsonl", "txt"):
        made = [json.dumps({"text": text}).encode() if kind == "jsonl" else text.encode() for text in known]
        content = made[0] + b"".join(b"\n" + junk + b"\n" + row for junk, row in zip(noise, made[1:], strict=True))
        path = tmp_path / f"rows.{kind}{pack}"
        path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[pack](content))
        found: list[str] = []
        for piece in read_blocks(resolve_inputs([str(path)]), block_bytes=block):
            found += [text for text in read_rows(piece, ["text"]).texts[0] if text.startswith("known")]
        assert found == known


def table_bytes(kind: str) -> bytes:
    table = arrow.table({"text": ["one", "two", None, "日詩"] * 5, "n": range(20)})
    sink = io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, sink, row_group_size=7)
    else:
        with arrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue()


PLAIN = b'{"text": "one"}\n{"text": "two"}\n'
WHOLE: dict[str, bytes] = {
    "a.jsonl": PLAIN,
    "a.txt": PLAIN,
    "a.json": b'[{"text": "one"},\n {"text": "two", "x": [1, {}]}]',
    "a.csv": b'text,n\none,1\n"two, and\n""three""",2\n',
    "a.jsonl.gz": gzip.compress(PLAIN),
    "a.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress(PLAIN),
    "a.csv.gz": gzip.compress(b"text\none\n"),
    "a.parquet": table_bytes("parquet"),
    "a.arrow": table_bytes("arrow"),
    "part-0": b"",
}


@FUZZ
@given(name=st.sampled_from(list(WHOLE)), data=st.data())
def test_arbitrary_bytes_are_rows_or_one_error(tmp_path: Path, name: str, data: st.DataObject) -> None:
    whole = WHOLE[name]
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, min(len(whole), begin + 30)))
    path = tmp_path / name
    path.write_bytes(whole[:begin] + data.draw(st.binary(max_size=30)) + whole[end:])
    try:
        for block in read_blocks(resolve_inputs([str(path)]), block_bytes=data.draw(st.integers(1, 50))):
            found = read_rows(block, ["text"])
            assert sorted([*found.numbers, *(number for number, _ in found.bad)])[-1:] < [found.count]
            assert all(text.encode() for text in found.texts[0])
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017 - either outcome is right
