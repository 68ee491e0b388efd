"""Rows of text files: cutting a file into blocks of whole lines, and a block into texts and the rows that are no text.

Two formats: ``.jsonl`` (and ``.json`` with one object a line), one document a row under each key; anything else is
plain text, one document a line, blank lines left out, as the ``text`` loader of Hugging Face ``datasets`` has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mindspeed_llm.errors import DataError

try:
    import orjson
except ImportError:
    orjson = None

BLOCK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Block:
    """Whole lines of one file.

    Attributes:
        path: the file.
        first_line: number of the first line, from 1.
        data: the lines.
    """

    path: str
    first_line: int
    data: bytes


@dataclass(frozen=True)
class BadRow:
    """A row that gives no document: where, and why."""

    path: str
    line: int
    reason: str


def is_json_lines(path: str | Path) -> bool:
    """Whether the file's name says JSON, one object a line."""
    return Path(path).suffix.lower() in _JSON_SUFFIXES


def read_blocks(path: str, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Cut a file into blocks of about ``block_bytes`` that end at line ends (a longer line is a block of its own).

    Raises:
        DataError: when the file cannot be opened.
    """
    try:
        stream = open(path, "rb")  # noqa: SIM115 - closed below, the error message needs its own try
    except OSError as error:
        raise DataError("An input file cannot be read.", got=f"{path}: {error.strerror}", fix="--input") from error
    with stream:
        line = 1
        pending = [stream.read(len(_BOM)).removeprefix(_BOM)]
        while piece := stream.read(block_bytes):
            cut = piece.rfind(b"\n") + 1
            if cut == 0:
                pending.append(piece)
                continue
            data = b"".join([*pending, piece[:cut]])
            pending = [piece[cut:]]
            yield Block(path, line, data)
            line += data.count(b"\n")
        data = b"".join(pending)
        if data:
            yield Block(path, line, data)


def parse_block(block: Block, keys: list[str]) -> tuple[list[list[str]], list[int], list[BadRow]]:
    """Split a block into texts.

    Args:
        block: whole lines.
        keys: for JSON, the fields that must all hold text; plain text has one, whatever its name.

    Returns:
        texts: ``[key][row]``, the good rows.
        lines: ``[row]``, their line numbers.
        bad: the other rows. Blank lines of plain text are separators and in neither.
    """
    raw_lines = block.data.split(b"\n")
    if raw_lines[-1] == b"":
        raw_lines.pop()
    json_lines = is_json_lines(block.path)
    texts: list[list[str]] = [[] for _ in keys]
    lines: list[int] = []
    bad: list[BadRow] = []
    for number, raw in enumerate(raw_lines, start=block.first_line):
        if json_lines:
            row, reason = _parse_json_row(raw, keys)
        else:
            row, reason = _parse_text_row(raw, len(keys))
            if row is None and reason is None:
                continue
        if row is None:
            bad.append(BadRow(block.path, number, reason or "no text"))
            continue
        lines.append(number)
        for column, text in zip(texts, row, strict=True):
            column.append(text)
    return texts, lines, bad


def _parse_text_row(raw: bytes, keys: int) -> tuple[list[str] | None, str | None]:
    raw = raw.removesuffix(b"\r")
    if not raw.strip():
        return None, None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return None, f"invalid UTF-8: {error.reason} at byte {error.start}"
    return [text] * keys, None


def _parse_json_row(raw: bytes, keys: list[str]) -> tuple[list[str] | None, str | None]:
    if not raw.strip():
        return None, "blank line"
    try:
        value = _load_json(raw)
    except UnicodeDecodeError as error:
        return None, f"invalid UTF-8: {error.reason} at byte {error.start}"
    except ValueError as error:
        return None, f"broken JSON: {error}"
    except RecursionError:
        return None, "broken JSON: nested too deeply"
    if not isinstance(value, dict):
        return None, f"not a JSON object but {_json_type(value)}"
    fields = cast("dict[str, object]", value)
    row: list[str] = []
    for key in keys:
        if key not in fields:
            return None, f"no key {key!r}"
        text = fields[key]
        if not isinstance(text, str):
            return None, f"{key!r} is {_json_type(text)}, not text"
        if not text:
            return None, f"{key!r} is empty"
        if _has_surrogate(text):
            return None, f"{key!r} holds half of a surrogate pair"
        row.append(text)
    return row, None


def _load_json(raw: bytes) -> Any:
    if orjson is not None:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            # Python's reader accepts what others write and orjson refuses: NaN, numbers beyond 64 bits.
            pass
    return json.loads(raw.decode("utf-8"))


def _has_surrogate(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "true or false", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
