"""Sources: every format and compression gives the same documents, every cut loses and doubles none."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import zstandard

from mindspeed_llm.data.rows import read_rows
from mindspeed_llm.data.sources import InputFile, read_blocks, resolve_inputs

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
        row = block.first_row or row
        rows = read_rows(block, ["text"])
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
