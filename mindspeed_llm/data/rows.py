"""Rows of a block: the texts of the good ones, and why the others give none.

The whole policy on dirty rows is here; ``docs/data.md`` has it as a table. What a row holds decides, never who parses
it: orjson, where it is installed, only has the first word on rows that Python's own reader accepts as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

from mindspeed_llm.data.compressed import BOM
from mindspeed_llm.data.json_array import TOKENS
from mindspeed_llm.data.sources import TXT, Block
from mindspeed_llm.data.tables import Cells, check_columns
from mindspeed_llm.errors import DataError

try:
    import orjson
except ImportError:
    orjson = None

MAX_DEPTH = 500
"""Levels of nesting in a row. Either reader has a limit of its own, orjson's fixed, Python's that of the stack."""
_NESTING = {dict, list}
_TOO_DEEP = "broken JSON: nested too deeply"


@dataclass(frozen=True)
class BadRow:
    """A row that gives no document: where, and why."""

    path: str
    line: int
    reason: str


@dataclass(frozen=True)
class Rows:
    """What a block holds.

    Attributes:
        texts: ``[key][row]``, the good rows.
        numbers: ``[row]``, their numbers within the block, from 0.
        bad: numbers and reasons of the other rows. Blank lines of plain text are separators and in neither.
        count: rows of the block, whatever they hold; the next block goes on from there.
    """

    texts: list[list[str]]
    numbers: list[int] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    count: int = 0


def read_rows(block: Block, keys: list[str]) -> Rows:
    """Read a block.

    Args:
        block: of :func:`mindspeed_llm.data.sources.read_blocks`.
        keys: the fields that must all hold text; plain text has one, whatever its name.

    Raises:
        DataError: the file cannot be read any more, or a table has no such column.
    """
    payload = block.payload
    if isinstance(payload, Cells):
        return _cell_rows(block.path, payload, keys)
    if isinstance(payload, tuple):
        payload = _read_range(block.path, *payload)
    lines = _split(payload) if isinstance(payload, bytes) else payload
    return _text_rows(lines, keys) if block.format == TXT else _json_rows(lines, keys)


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return lines


def _read_range(path: str, begin: int, end: int) -> bytes:
    """The lines that begin in a range of bytes, whole."""
    try:
        with open(path, "rb") as stream:
            if begin == 0:
                data = stream.read(end)
            else:
                stream.seek(begin - 1)
                data = stream.read(end - begin + 1)
                data = data[data.find(b"\n") + 1 or len(data) :]
            if data and not data.endswith(b"\n"):
                data += stream.readline()
    except OSError as error:
        raise DataError("An input file cannot be read.", got=f"{path}: {error.strerror}", fix="--input") from error
    return data.removeprefix(BOM) if begin == 0 else data


def _text_rows(lines: list[bytes], keys: list[str]) -> Rows:
    texts: list[str] = []
    rows = Rows([texts for _ in keys], count=len(lines))
    for number, line in enumerate(lines):
        raw = line.removesuffix(b"\r")
        if not raw.strip():
            continue
        try:
            texts.append(raw.decode("utf-8"))
            rows.numbers.append(number)
        except UnicodeDecodeError as error:
            rows.bad.append((number, _invalid_utf8(error)))
    return rows


def _cell_rows(path: str, cells: Cells, keys: list[str]) -> Rows:
    check_columns(path, dict.fromkeys(cells.columns, True), keys)
    rows = Rows([[] for _ in keys], bad=list(cells.bad), count=cells.count)
    for number, row in zip(cells.numbers, zip(*(cells.columns[key] for key in keys), strict=True), strict=True):
        texts: list[str] = []
        for key, cell in zip(keys, row, strict=True):
            if not cell:
                rows.bad.append((number, f"{key!r} is {'null, not text' if cell is None else 'empty'}"))
                break
            try:
                texts.append(cell.decode("utf-8"))
            except UnicodeDecodeError as error:
                rows.bad.append((number, _invalid_utf8(error)))
                break
        else:
            rows.numbers.append(number)
            for column, text in zip(rows.texts, texts, strict=True):
                column.append(text)
    rows.bad.sort()
    return rows


def _json_rows(lines: list[bytes], keys: list[str]) -> Rows:
    rows = Rows([[] for _ in keys], count=len(lines))
    for number, raw in enumerate(lines):
        row = _json_row(raw, keys)
        if isinstance(row, str):
            rows.bad.append((number, row))
            continue
        rows.numbers.append(number)
        for column, text in zip(rows.texts, row, strict=True):
            column.append(text)
    return rows


def _json_row(raw: bytes, keys: list[str]) -> list[str] | str:
    """The texts of a row, or why it has none."""
    try:
        value = _load_json(raw)
    except UnicodeDecodeError as error:
        return _invalid_utf8(error)
    except ValueError as error:
        return f"broken JSON: {error}" if raw.strip() else "blank line"
    except RecursionError:
        return _TOO_DEEP
    if type(value) is not dict:
        return f"not a JSON object but {_json_type(value)}"
    fields = cast("dict[str, object]", value)
    if not _NESTING.isdisjoint(map(type, fields.values())) and _depth(raw) > MAX_DEPTH:
        return _TOO_DEEP
    row: list[str] = []
    for key in keys:
        text = fields.get(key)
        if type(text) is not str:
            return f"{key!r} is {_json_type(text)}, not text" if key in fields else f"no key {key!r}"
        if not text:
            return f"{key!r} is empty"
        if _has_surrogate(text):
            return f"{key!r} holds half of a surrogate pair"
        row.append(text)
    return row


def _load_json(raw: bytes) -> Any:
    if orjson is not None:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            # Python's reader accepts what others write and orjson refuses: NaN, numbers beyond 64 bits.
            pass
    # As floats, since Python refuses to make an integer of some thousand digits.
    return json.loads(raw.decode("utf-8"), parse_int=float)


def _depth(raw: bytes) -> int:
    """Levels of nesting in a row of valid JSON, or anything less than :data:`MAX_DEPTH`."""
    depth = deepest = 0
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return depth
    for token in TOKENS.finditer(raw):
        mark = token[0]
        if mark in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in b"]}":
            depth -= 1
    return deepest


def _has_surrogate(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _invalid_utf8(error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8: {error.reason} at byte {error.start}"


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "true or false", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
