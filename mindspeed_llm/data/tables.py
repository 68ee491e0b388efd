"""Tables as rows of bytes, and csv as such a table."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.data.compressed import InputStream
from mindspeed_llm.errors import DataError

CHUNK_ROWS = 1024
"""Rows that are looked at together at most."""

MAX_CSV_CELL = 1 << 26
"""Characters in a cell; more is a quote that is never closed, and would take the rest of the file into memory."""


@dataclass(frozen=True)
class Cells:
    """Some rows of a table.

    Attributes:
        columns: name -> the cells of the whole rows, UTF-8 as far as the file keeps to it, None where there is none.
        numbers: of these rows, within this part of the table, from 0.
        bad: numbers and reasons of the other rows.
        count: rows, of csv: lines.
    """

    columns: dict[str, list[bytes | None]]
    numbers: Sequence[int]
    bad: list[tuple[int, str]]
    count: int


Part = tuple[int, int, Cells]
"""Number in the file of the first row (csv: line), bytes of the file up to the end of these rows, the rows."""


def check_columns(path: str, columns: dict[str, bool], keys: Sequence[str]) -> None:
    """Refuse a table in which a key is missing or holds no text.

    Args:
        path: of the table.
        columns: name -> whether it holds text.
        keys: the wanted columns.

    Raises:
        DataError: with the columns that there are.
    """
    for key in keys:
        if not columns.get(key):
            what = f"The column {key!r} holds no text." if key in columns else f"There is no column {key!r}."
            names = ", ".join(name if text else f"{name} (no text)" for name, text in columns.items())
            raise DataError(what, got=path, allowed=f"columns of text, of: {names or 'none'}", fix="--json-keys")


def wanted_columns(path: str, columns: dict[str, bool], keys: Sequence[str] | None) -> list[str]:
    """The columns to read: the keys, or all that hold text. For the rest see :func:`check_columns`."""
    if keys is None:
        return [name for name, text in columns.items() if text]
    check_columns(path, columns, keys)
    return list(keys)


def csv_parts(stream: InputStream, keys: Sequence[str] | None, delimiter: str, block_bytes: int) -> Iterator[Part]:
    """Read records as Python's ``csv`` does, strictly; the first names the columns.

    Raises:
        DataError: a column is missing or there twice, or a cell is longer than :data:`MAX_CSV_CELL`.
    """
    csv.field_size_limit(MAX_CSV_CELL)
    # What is no UTF-8 comes out again as the bytes it was, so that it spoils only its own row.
    lines = (line.decode("utf-8", "surrogateescape") for line in stream.lines())
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    try:
        header = next(reader, header)
    except csv.Error as error:
        raise DataError("The header of a csv file is broken.", got=f"{stream.path}: {error}") from error
    names = wanted_columns(stream.path, {name: header.count(name) == 1 for name in header}, keys)
    places = [header.index(name) for name in names]
    first, size = reader.line_num + 1, 0
    rows: list[list[bytes]] = []
    numbers: list[int] = []
    bad: list[tuple[int, str]] = []

    def part() -> Part:
        columns: dict[str, list[bytes | None]] = {name: [row[i] for row in rows] for i, name in enumerate(names)}
        return first, stream.consumed, Cells(columns, numbers, bad, reader.line_num + 1 - first)

    while True:
        number = reader.line_num + 1 - first
        record = _csv_record(reader, stream.path, len(header))
        if record is None:
            break
        if isinstance(record, str):
            bad.append((number, record))
            continue
        row = [record[place].encode("utf-8", "surrogateescape") for place in places]
        rows.append(row)
        numbers.append(number)
        size += sum(map(len, row))
        if size >= block_bytes or len(rows) >= CHUNK_ROWS:
            yield part()
            first, size = reader.line_num + 1, 0
            rows, numbers, bad = [], [], []
    if reader.line_num + 1 > first:
        yield part()


def _csv_record(reader: Any, path: str, width: int) -> list[str] | str | None:
    """The next record, or why there is none in these lines, or None at the end."""
    before = reader.line_num
    try:
        record = next(reader, None)
    except csv.Error as error:
        if "field limit" in str(error):
            raise DataError(
                "A cell of a csv file is too long; a quote before it may never be closed.",
                got=f"{path}:{before + 1}: {error}",
                fix="mend the file",
            ) from error
        lines = reader.line_num - before
        return f"broken csv: {error}" + (f", {lines} lines on" if lines > 1 else "")
    if record is None or len(record) == width:
        return record
    return f"{len(record)} cells where the header has {width}" if record else "blank line"
