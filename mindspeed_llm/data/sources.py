"""Input files of the preparation: which there are, what they hold, and how they are cut into units of work.

A file that can be cut anywhere (jsonl and txt as they are) is only described here: the process that parses a block
also reads it. Everything else is read here, in one pass whose memory does not grow with the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import DataError

BLOCK_BYTES = 1 << 20
STDIN = "-"

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}


@dataclass(frozen=True)
class InputFile:
    """One file to read.

    Attributes:
        path: as the messages name it; ``-`` is standard input.
        format: ``jsonl``, ``json`` (an array of objects), ``txt``, ``csv``, ``parquet`` or ``arrow``.
        compression: ``gzip``, ``zstd`` or None.
        bytes: its size as it lies on the disk; 0 for standard input.
    """

    path: str
    format: str
    compression: str | None
    bytes: int


@dataclass(frozen=True)
class Block:
    """A unit of work: rows of one file that follow each other. It can be sent to another process.

    Attributes:
        path: the file.
        format: that of :class:`InputFile`.
        first_row: number in the file, from 1, of the first row; None when the block goes on where the one before ended.
        size: bytes of input that it stands for; those of a whole file add up to its size.
        payload: what :func:`mindspeed_llm.data.rows.read_rows` reads: the byte range in which its rows begin.
    """

    path: str
    format: str
    first_row: int | None
    size: int
    payload: tuple[int, int]


def resolve_inputs(words: Sequence[str]) -> tuple[InputFile, ...]:
    """The files that the words of ``--input`` name, in the order in which they are read.

    Raises:
        DataError: a file does not exist.
    """
    return tuple(_inspect(word) for word in words)


def read_blocks(
    inputs: Sequence[InputFile],
    shard: tuple[int, int] = (0, 1),
    block_bytes: int = BLOCK_BYTES,
    *,
    keys: Sequence[str] | None = None,
) -> Iterator[Block]:
    """Cut files into blocks of about ``block_bytes``.

    Args:
        inputs: in the order of the documents.
        shard: ``(i, n)``: the i-th of n parts of nearly the same number of bytes. The parts laid end to end are the
            whole; a row is in the part in which it begins.
        block_bytes: of the input as it is after decompression.
        keys: the columns that are wanted of tables (parquet, arrow, csv); None reads all that hold text.

    Raises:
        DataError: a file cannot be read.
    """
    index, count = shard
    total = sum(file.bytes for file in inputs)
    begin, end = total * index // count, total * (index + 1) // count
    for file in inputs:
        yield from _range_blocks(file, max(begin, 0), min(end, file.bytes), block_bytes)
        begin, end = begin - file.bytes, end - file.bytes


def _range_blocks(file: InputFile, begin: int, end: int, block_bytes: int) -> Iterator[Block]:
    """Ranges of a file of lines between two bytes; only the first has to know the number of its row."""
    first_row = _rows_before(file.path, begin) + 1 if begin < end else None
    for start in range(begin, end, block_bytes):
        stop = min(start + block_bytes, end)
        yield Block(file.path, file.format, first_row, stop - start, (start, stop))
        first_row = None


def _rows_before(path: str, position: int) -> int:
    """How many rows begin before a byte: the first, and one behind each newline but the last byte's."""
    if position == 0:
        return 0
    rows, rest = 1, position - 1
    with open(path, "rb") as stream:
        while rest and (piece := stream.read(min(rest, BLOCK_BYTES))):
            rows += piece.count(b"\n")
            rest -= len(piece)
    return rows


def _inspect(path: str) -> InputFile:
    if not os.path.isfile(path):
        raise DataError("An input file does not exist.", got=path, allowed="jsonl or txt files", fix="--input")
    return InputFile(path, _FORMATS.get(Path(path).suffix.lower(), "txt"), None, os.path.getsize(path))
