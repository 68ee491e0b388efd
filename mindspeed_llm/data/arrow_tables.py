"""Parquet and Arrow's files and streams as rows of bytes.

They are read in one pass by the process that deals out the work: only the wanted columns, a few rows at a time.
"""
# pyarrow has no types.
# pyright: basic

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mindspeed_llm.data.tables import CHUNK_ROWS, Cells, Part, wanted_columns
from mindspeed_llm.errors import DataError

ARROW_FILE = b"ARROW1"


def parquet_parts(
    path: str, size: int, keys: Sequence[str] | None, span: tuple[int, int], block_bytes: int
) -> Iterator[Part]:
    """Read the row groups that begin within ``span``, where each stands for as many bytes of the file as any other."""
    pool = _import_arrow(path).default_memory_pool()
    import pyarrow.parquet as parquet

    # Without buffering ahead: pyarrow would read row groups whole, and often a file is one row group.
    with _arrow_errors(path), parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        names = wanted_columns(path, _columns(file.schema_arrow), keys)
        groups, row = file.num_row_groups, 1
        for index in range(groups):
            group = file.metadata.row_group(index)
            begin, end = size * index // groups, size * (index + 1) // groups
            if span[0] <= begin < span[1]:
                rows, done = _chunk_rows(group.num_rows, group.total_byte_size, block_bytes), 0
                for batch in file.iter_batches(rows, row_groups=[index], columns=names, use_threads=False):
                    first_row, done = row + done, done + batch.num_rows
                    cells = _cells(batch, names)
                    del batch
                    # Else the allocator keeps ever more pages that are nearly empty.
                    pool.release_unused()
                    yield first_row, begin + (end - begin) * done // group.num_rows, cells
            row += group.num_rows


def arrow_parts(
    path: str, size: int, keys: Sequence[str] | None, span: tuple[int, int], block_bytes: int
) -> Iterator[Part]:
    """Read the record batches that begin within ``span``, where each stands for as many bytes as any other.

    A stream does not say how many there are; it is read whole, by whom its beginning belongs to.
    """
    arrow = _import_arrow(path)
    with _arrow_errors(path), arrow.memory_map(path) as source:
        if source.read(len(ARROW_FILE)) != ARROW_FILE:
            source.seek(0)
            if span[0] <= 0 < span[1]:
                yield from _arrow_stream_parts(arrow.ipc.open_stream(source), path, source.tell, keys, block_bytes)
            return
        # Not with its option to read some fields only: that copies them, where a mapped batch takes no memory.
        file = arrow.ipc.open_file(source)
        names = wanted_columns(path, _columns(file.schema), keys)
        count, row = file.num_record_batches, 1
        for index in range(count):
            begin = size * index // count
            if begin >= span[1]:
                return
            batch = file.get_batch(index)
            if begin >= span[0]:
                width = size * (index + 1) // count - begin
                for done, chunk in _chunks(batch, block_bytes):
                    yield row + done, begin + width * (done + chunk.num_rows) // batch.num_rows, _cells(chunk, names)
            row += batch.num_rows


def _arrow_stream_parts(
    stream: Any, path: str, position: Any, keys: Sequence[str] | None, block_bytes: int
) -> Iterator[Part]:
    names = wanted_columns(path, _columns(stream.schema), keys)
    row = 1
    for batch in stream:
        for done, chunk in _chunks(batch, block_bytes):
            yield row + done, position(), _cells(chunk, names)
        row += batch.num_rows


def _chunks(batch: Any, block_bytes: int) -> Iterator[tuple[int, Any]]:
    """Slices of a batch, each with the number of its first row."""
    rows = _chunk_rows(batch.num_rows, batch.nbytes, block_bytes)
    for begin in range(0, batch.num_rows, rows):
        yield begin, batch.slice(begin, rows)


def _chunk_rows(rows: int, size: int, block_bytes: int) -> int:
    """Rows that are about ``block_bytes``."""
    return max(1, min(CHUNK_ROWS, rows * block_bytes // max(size, 1)))


def _columns(schema: Any) -> dict[str, bool]:
    """Names, and whether each holds text; a name that is there twice does not."""
    import pyarrow.types as types

    def is_text(kind: Any) -> bool:
        if types.is_dictionary(kind):
            kind = kind.value_type
        # A column of nulls only: its rows are bad ones, as if the type were that of its neighbours.
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)

    return {field.name: is_text(field.type) and schema.names.count(field.name) == 1 for field in schema}


def _cells(batch: Any, names: list[str]) -> Cells:
    import pyarrow as arrow

    columns: dict[str, list[bytes | None]] = {}
    batch.validate()
    for name in names:
        # As bytes: Arrow does not check that text is UTF-8, and one bad cell must not spoil the others.
        column = batch.column(name).cast(arrow.large_binary())
        column.validate(full=True)
        columns[name] = column.to_pylist()
    return Cells(columns, range(batch.num_rows), [], batch.num_rows)


@contextmanager
def _arrow_errors(path: str) -> Generator[None]:
    """Turn what pyarrow raises into one error that names the file."""
    arrow = _import_arrow(path)
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(
            "A table is damaged or cannot be read.", got=f"{path}: {reason}", fix="fetch it again"
        ) from error


def _import_arrow(path: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError("Parquet and Arrow need a package.", got=path, fix="pip install pyarrow") from error
    return pyarrow
