"""The elements of a JSON array of any length, one by one and as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mindspeed_llm.data.compressed import BOM, InputStream
from mindspeed_llm.errors import DataError

TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[\]{},]', re.DOTALL)
"""Strings, with an empty group 1 when the end is missing, and whatever opens, closes or separates."""

_SPACE = b" \t\r\n"


def array_elements(stream: InputStream, piece_bytes: int) -> Iterator[bytes]:
    """Cut an array into its elements; whether one of them is sound is left to whoever parses it.

    Args:
        stream: holds ``[``, behind blanks and a byte order mark at most.
        piece_bytes: read at once.

    Raises:
        DataError: the array does not end, or something follows it.
    """
    data = b""
    while b"[" not in data:
        more = stream.read(piece_bytes)
        if not more:
            raise _broken("A JSON array does not begin.", stream, 1)
        data += more
    data = data.removeprefix(BOM).lstrip(_SPACE)[1:]
    begin = position = count = 0
    depth = 1
    while depth:
        token = TOKENS.search(data, position)
        if token is None or token[1] == b"":
            # Nothing more in this piece, or a string whose end is still to come.
            position = (len(data) if token is None else token.start()) - begin
            data, begin = data[begin:], 0
            more = stream.read(max(piece_bytes, len(data)))
            if not more:
                raise _broken("A JSON array does not end.", stream, count + 1)
            data += more
            continue
        position, mark = token.end(), token[0]
        if mark in (b"[", b"{"):
            depth += 1
        elif mark == b"]" or (mark == b"}" and depth > 1):
            # A brace too many within an element is that element's fault, not the end of the array.
            depth -= 1
        if depth == 0 or (depth == 1 and mark == b","):
            element, begin = data[begin : token.start()].strip(_SPACE), position
            if depth or element or count:
                count += 1
                yield element
    data = data[position:]
    while data:
        if data.strip(_SPACE):
            raise _broken("Something follows a JSON array.", stream, count)
        data = stream.read(piece_bytes)


def _broken(what: str, stream: InputStream, element: int) -> DataError:
    return DataError(what, got=f"{stream.path}, element {element}", fix="mend the file, or write an object a line")
