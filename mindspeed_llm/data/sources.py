"""Input files of the preparation: which there are, what they hold, and how they are cut into units of work.

A file that can be cut anywhere (jsonl and txt that are not compressed) is only described here: the process that parses
a block also reads it. Everything else is read here, in one pass whose memory does not grow with the file.
"""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.data.arrow_tables import ARROW_FILE, arrow_parts, parquet_parts
from mindspeed_llm.data.compressed import BOM, GZIP, STDIN, ZSTD, InputStream
from mindspeed_llm.data.json_array import array_elements
from mindspeed_llm.data.tables import Cells, Part, csv_parts
from mindspeed_llm.errors import DataError

BLOCK_BYTES = 1 << 20

JSONL, JSON, TXT, CSV, PARQUET, ARROW = "jsonl", "json", "txt", "csv", "parquet", "arrow"
_FORMATS = {
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".json": JSON,
    ".txt": TXT,
    ".text": TXT,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
    ".pq": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".ipc": ARROW,
}
_COMPRESSIONS = {".gz": GZIP, ".zst": ZSTD, ".zstd": ZSTD}
_SUFFIXES = " ".join(_FORMATS) + ", with " + " ".join(_COMPRESSIONS) + " behind where they are text"
_TABLES = {PARQUET: (b"PAR1",), ARROW: (ARROW_FILE, b"\xff\xff\xff\xff")}
"""How the binary formats begin; Arrow's as a file and as a stream."""


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
        first_row: number in the file, from 1, of the first row: the line, also of csv; the element of a JSON array;
            the row of a table. None when the block goes on where the one before ended.
        size: bytes of input that it stands for; those of a whole file add up to about its size.
        payload: what :func:`mindspeed_llm.data.rows.read_rows` reads: the range of bytes in which the rows begin, whole
            lines, elements of an array, or cells.
    """

    path: str
    format: str
    first_row: int | None
    size: int
    payload: tuple[int, int] | bytes | list[bytes] | Cells


_stdin: InputStream | None = None
"""Standard input, of which the first bytes were looked at and can be read only here."""


def resolve_inputs(words: Sequence[str]) -> tuple[InputFile, ...]:
    """The files that the words of ``--input`` name, in the order in which they are read.

    A word is a file, a folder (all files below it, sorted; names that begin with a dot or an underscore are left out),
    a pattern such as ``data/**/*.jsonl.zst`` (sorted), or ``-`` for standard input. The suffix says the format; a file
    without one that is known, if not found in a folder, goes by its content.

    Raises:
        DataError: a file does not exist, is there twice, is not what its name says, or is nothing that is known.
    """
    files: list[InputFile] = []
    seen: dict[str, str] = {}
    for word in words:
        for path in _expand(word):
            other = seen.setdefault(STDIN if path == STDIN else os.path.realpath(path), path)
            if len(seen) == len(files):
                raise DataError("An input is given twice.", got=path, fix=f"--input; it is the same as {other}")
            files.append(_inspect(path))
    return tuple(files)


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
            whole. A row of uncompressed lines, a row group of parquet, a record batch of an Arrow file and any other
            file as a whole are in the part in which they begin.
        block_bytes: of the input as it is after decompression.
        keys: the columns that are wanted of tables (parquet, arrow, csv), which are then checked before the first
            block; None reads all that hold text.

    Raises:
        DataError: a file is damaged or cannot be read, or a column is missing.
    """
    index, count = shard
    if count > 1 and any(file.path == STDIN for file in inputs):
        raise DataError("Standard input cannot be read in parts.", got="--input -", fix="write it to a file first")
    total = sum(file.bytes for file in inputs)
    # Whatever has no bytes begins at the end of the last part, and belongs to it.
    begin, end = total * index // count, total * (index + 1) // count + (index + 1 == count)
    spans: list[tuple[InputFile, tuple[int, int]]] = []
    for file in inputs:
        if begin < max(file.bytes, 1) and end > 0:
            spans.append((file, (max(begin, 0), end)))
        begin, end = begin - file.bytes, end - file.bytes
    if keys is not None:
        for file, span in spans:
            if file.format in (CSV, PARQUET, ARROW) and file.path != STDIN:
                next(_table_blocks(file, span, 1, keys), None)
    for file, span in spans:
        yield from _file_blocks(file, span, block_bytes, keys)


def _file_blocks(
    file: InputFile, span: tuple[int, int], block_bytes: int, keys: Sequence[str] | None
) -> Iterator[Block]:
    if file.format in (PARQUET, ARROW, CSV):
        yield from _table_blocks(file, span, block_bytes, keys)
    elif file.format in (JSONL, TXT) and file.compression is None and file.path != STDIN:
        yield from _range_blocks(file, span, block_bytes)
    elif span[0] == 0:
        with _open(file) as stream:
            yield from (_element_blocks if file.format == JSON else _line_blocks)(file, stream, block_bytes)


def _range_blocks(file: InputFile, span: tuple[int, int], block_bytes: int) -> Iterator[Block]:
    """Ranges of a file of lines between two bytes; only the first has to know the number of its row."""
    begin, end = span[0], min(span[1], file.bytes)
    first_row = _rows_before(file.path, begin) + 1 if begin < end else None
    for start in range(begin, end, block_bytes):
        stop = min(start + block_bytes, end)
        yield Block(file.path, file.format, first_row, stop - start, (start, stop))
        first_row = None


def _rows_before(path: str, position: int) -> int:
    """How many rows begin before a byte: the first, and one behind each newline except the last byte's."""
    if position == 0:
        return 0
    rows, rest = 1, position - 1
    with InputStream(path, None) as stream:
        while rest and (piece := stream.read(min(rest, BLOCK_BYTES))):
            rows += piece.count(b"\n")
            rest -= len(piece)
    return rows


def _line_blocks(file: InputFile, stream: InputStream, block_bytes: int) -> Iterator[Block]:
    """Pieces of a stream that end at line ends; a longer line is a block of its own."""
    first_row, done = 1, 0
    pending: list[bytes] = []
    for piece in stream.pieces(block_bytes):
        cut = piece.rfind(b"\n") + 1
        if cut == 0:
            pending.append(piece)
            continue
        position = stream.consumed
        yield Block(file.path, file.format, first_row, position - done, b"".join([*pending, piece[:cut]]))
        first_row, done, pending = None, position, [piece[cut:]]
    data = b"".join(pending)
    if data:
        yield Block(file.path, file.format, first_row, stream.consumed - done, data)


def _element_blocks(file: InputFile, stream: InputStream, block_bytes: int) -> Iterator[Block]:
    first_row, done, size = 1, 0, 0
    elements: list[bytes] = []
    for element in array_elements(stream, block_bytes):
        elements.append(element)
        size += len(element)
        if size >= block_bytes:
            position = stream.consumed
            yield Block(file.path, file.format, first_row, position - done, elements)
            first_row, done, size, elements = first_row + len(elements), position, 0, []
    if elements:
        yield Block(file.path, file.format, first_row, stream.consumed - done, elements)


def _table_blocks(
    file: InputFile, span: tuple[int, int], block_bytes: int, keys: Sequence[str] | None
) -> Iterator[Block]:
    done = None
    for first_row, position, cells in _table_parts(file, span, block_bytes, keys):
        # A part of a file begins where its first row group or record batch does, which only the position tells.
        size = position - (done if done is not None else span[0])
        done = position
        yield Block(file.path, file.format, first_row, size, cells)


def _table_parts(
    file: InputFile, span: tuple[int, int], block_bytes: int, keys: Sequence[str] | None
) -> Iterator[Part]:
    if file.format == PARQUET:
        yield from parquet_parts(file.path, file.bytes, keys, span, block_bytes)
    elif file.format == ARROW:
        yield from arrow_parts(file.path, file.bytes, keys, span, block_bytes)
    elif span[0] == 0:
        with _open(file) as stream:
            delimiter = "\t" if ".tsv" in Path(file.path.lower()).suffixes else ","
            yield from csv_parts(stream, keys, delimiter, block_bytes)


def _open(file: InputFile) -> InputStream:
    global _stdin
    if file.path == STDIN and _stdin is not None:
        stream, _stdin = _stdin, None
        return stream
    return InputStream(file.path, file.compression)


def _expand(word: str) -> list[str]:
    """The files that a word names, sorted by the parts of their paths."""
    if word == STDIN or os.path.isfile(word):
        return [word]
    if os.path.isdir(word):
        paths = _files_below(word)
        strange = [path for path in paths if _suffixes(path)[0] is None or not os.path.isfile(path)]
        if strange:
            prepared = sorted(path.removesuffix(".idx") for path in strange if path.endswith(".idx"))
            raise DataError(
                "A folder of inputs holds other files.",
                got=", ".join(strange[:5]) + (f" and {len(strange) - 5} more" if strange[5:] else ""),
                allowed=_SUFFIXES,
                fix=f"for prepared data the prefix, for instance {prepared[0]}"
                if prepared
                else f"--input '{os.path.join(word, '**', '*.jsonl')}', or whatever pattern fits",
            )
    elif os.path.exists(word):
        raise DataError("An input is no regular file.", got=word, fix=f"--input - < {word}")
    else:
        paths = [path for path in glob.glob(word, recursive=True) if os.path.isfile(path)]
    if not paths:
        what = "A folder of inputs is empty." if os.path.isdir(word) else "An input file does not exist."
        raise DataError(what, got=word, allowed="files, folders, patterns, or - for standard input", fix="--input")
    return sorted(paths, key=lambda path: Path(path).parts)


def _files_below(folder: str) -> list[str]:
    def fail(error: OSError) -> None:
        raise DataError("A folder of inputs cannot be read.", got=f"{error.filename}: {error.strerror}", fix="--input")

    paths: list[str] = []
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        paths += [os.path.join(place, name) for name in names if not name.startswith((".", "_"))]
    return paths


def _suffixes(path: str) -> tuple[str | None, str | None]:
    """The format and the compression that a name says."""
    root, suffix = os.path.splitext(path.lower())
    compression = _COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(root)[1]
    return _FORMATS.get(suffix), compression


def _inspect(path: str) -> InputFile:
    """Look at the first bytes of a file.

    Raises:
        DataError: they are not what the name says, or nothing that is known.
    """
    global _stdin
    named, named_compression = _suffixes(path)
    stream = InputStream(path)
    with stream:
        size = 0 if path == STDIN else os.path.getsize(path)
        if not size and (named in _TABLES or named_compression):
            raise _misnamed(path, named_compression or str(named), "an empty file")
        if (named or named_compression) and stream.compression != named_compression:
            raise _misnamed(path, named_compression or "no compression", stream.compression or "no compression")
        head = stream.peek()
    if path == STDIN:
        _stdin = stream
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)) and named not in _TABLES:
        raise DataError("Text must be UTF-8.", got=f"{path}: UTF-16 or UTF-32", fix="iconv -f UTF-16 -t UTF-8")
    found = _sniff(head)
    if named is None and found is None:
        raise DataError("The format of an input is not known.", got=path, allowed=_SUFFIXES, fix="rename it")
    if named in _TABLES or found in _TABLES:
        if named not in (None, found):
            raise _misnamed(path, named, found or "something else")
        if path == STDIN or stream.compression:
            raise DataError(
                "Parquet and Arrow files are read as they are.",
                got=f"{path}: {found} in {stream.compression or 'a stream'}",
                fix="unpack it into a file; these formats compress by themselves",
            )
        named = found
    elif named == JSON:
        named = found if found == JSON else JSONL
    return InputFile(path, named or found or TXT, stream.compression, size)


def _misnamed(path: str, named: str, found: str) -> DataError:
    return DataError("An input is not what its name says.", got=f"{path}: {found}", allowed=named, fix="rename it")


def _sniff(head: bytes) -> str | None:
    """The format that the first bytes of an input say; None when they are no text either."""
    for table, marks in _TABLES.items():
        if head.startswith(marks):
            return table
    text = head.removeprefix(BOM).lstrip()
    if text[:1] in (b"{", b"["):
        return JSONL if text[:1] == b"{" else JSON
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return None
    return None if b"\0" in head else TXT
