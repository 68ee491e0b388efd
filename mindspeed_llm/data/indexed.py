"""Megatron's indexed dataset files: a ``.bin`` of token ids and an ``.idx`` that says where each sequence lies.

Format (``megatron/core/datasets/indexed_dataset.py``): magic, version (``<Q``), dtype code (``<B``), sequence count and
document boundary count (``<Q`` each), lengths (int32), byte offsets (int64), boundaries (int64). megatron-core's own
builder writes the same bytes but imports torch; a test compares the two.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import struct
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from mindspeed_llm.errors import DataError

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 8 + 1 + 8 + 8
DTYPE_CODES: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_CODES.items()}
_UINT16_VOCAB_LIMIT = 65500
"""Below this vocabulary size Megatron stores ids as uint16."""
_PARTIAL = ".partial"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What some network file systems answer where they are mounted without locks."""
_COPY_BYTES = 1 << 24
_INDEX_PART = 1 << 20
"""Documents whose places are computed at once when an index is written."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which Megatron stores the ids of a vocabulary of ``vocab_size`` tokens."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_VOCAB_LIMIT else np.int32)


def bin_path(prefix: str | Path) -> Path:
    """``<prefix>.bin``."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """``<prefix>.idx``."""
    return Path(f"{prefix}.idx")


def open_alone(path: Path) -> BinaryIO:
    """An empty file that only this process writes, until it is closed. What a killed process left is of no use.

    Raises:
        DataError: another process is writing it.
    """
    while True:
        stream = open(path, "ab")  # noqa: SIM115 - the caller closes it
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.close()
            raise DataError(
                "Another process is writing this dataset.",
                got=str(path).removesuffix(_PARTIAL),
                fix="wait for it, or another --output-prefix",
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                stream.close()
                raise
            logger.warning("%s: this file system has no locks (%s); prepare once at a time", path, error.strerror)
        # Between opening and locking, its writer may have given it its final name, or removed it.
        if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            stream.truncate(0)
            return stream
        stream.close()


def discard(stream: BinaryIO, path: Path) -> None:
    """Remove a file of :func:`open_alone`, and only then let go of it."""
    path.unlink(missing_ok=True)
    with suppress(OSError):  # what is not written yet may find no room, and is not wanted
        stream.close()


class IndexedWriter:
    """Writes one dataset, complete or not at all.

    The data goes to ``*.partial`` files; :meth:`commit` renames them, the index last, because a dataset without an
    index is one that readers refuse. Leaving the ``with`` block without a commit removes everything.

    Args:
        prefix: path without suffix.
        dtype: what ids are stored as, see :func:`token_dtype`.
        split: documents have several sequences (sentences); otherwise each is one.

    Raises:
        DataError: another process is writing this dataset.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype, *, split: bool = False) -> None:
        self.prefix = Path(prefix)
        self.dtype = dtype
        self._lengths = array("i")
        self._boundaries = array("q", [0]) if split else None
        self._tokens = 0
        self._partial_bin = Path(f"{prefix}.bin{_PARTIAL}")
        self._partial_idx = Path(f"{prefix}.idx{_PARTIAL}")
        self._complete = False
        self._stream = open_alone(self._partial_bin)

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths) if self._boundaries is None else len(self._boundaries) - 1

    @property
    def tokens(self) -> int:
        """Tokens added so far."""
        return self._tokens

    def add_documents(self, ids: bytes, lengths: bytes, sequences: bytes | None = None) -> None:
        """Append documents.

        Args:
            ids: the ids of all of them, end to end, as bytes of ``dtype``.
            lengths: the tokens in each sequence, as bytes of int32.
            sequences: the sequences in each document, as bytes of int32; needed when documents are split.
        """
        first = len(self._lengths)
        self._stream.write(ids)
        self._lengths.frombytes(lengths)
        added = sum(self._lengths[first:])
        if added * self.dtype.itemsize != len(ids):
            raise ValueError(f"{len(ids)} bytes of ids, but lengths add up to {added} tokens of {self.dtype}")
        self._tokens += added
        if self._boundaries is not None and sequences is not None:
            counts = np.frombuffer(sequences, dtype=np.int32)
            self._boundaries.frombytes((self._boundaries[-1] + np.cumsum(counts, dtype=np.int64)).tobytes())
        if self._boundaries is not None and self._boundaries[-1] != len(self._lengths):
            raise ValueError(f"{len(self._lengths)} sequences, but documents have {self._boundaries[-1]} of them")

    def add_dataset(self, prefix: str) -> None:
        """Append all documents of another dataset of the same dtype.

        Raises:
            DataError: the dataset is missing, damaged or of another dtype.
        """
        other = read_index(prefix)
        if other.dtype != self.dtype:
            raise DataError("Datasets of different dtypes cannot be merged.", got=f"{prefix}: {other.dtype}",
                            allowed=str(self.dtype), fix="prepare them with the same tokenizer")  # fmt: skip
        first = len(self._lengths)
        with open(bin_path(prefix), "rb") as stream:
            shutil.copyfileobj(stream, self._stream, _COPY_BYTES)
        self._lengths.frombytes(other.lengths.tobytes())
        self._tokens += other.tokens
        boundaries = other.boundaries
        if self._boundaries is not None:
            self._boundaries.frombytes((first + boundaries[1:]).tobytes())
        elif len(boundaries) != len(other.lengths) + 1:
            raise DataError("A dataset of split documents cannot be merged with one of whole documents.", got=prefix)

    def complete(self) -> None:
        """Write all that is left to write, so that :meth:`commit` only gives names."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        with open(self._partial_idx, "wb") as stream:
            self._write_index(stream)
            stream.flush()
            os.fsync(stream.fileno())
        self._complete = True

    def commit(self) -> None:
        """Make the dataset visible under its final names."""
        if not self._complete:
            self.complete()
        idx_path(self.prefix).unlink(missing_ok=True)
        self._partial_bin.replace(bin_path(self.prefix))
        self._partial_idx.replace(idx_path(self.prefix))
        # Only now: closing gives up the lock, and the next writer would truncate what is not renamed yet.
        self._stream.close()

    def _write_index(self, stream: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        count = len(lengths)
        stream.write(MAGIC)
        stream.write(struct.pack("<QB", VERSION, _CODE_OF_DTYPE[self.dtype]))
        boundaries = None if self._boundaries is None else np.frombuffer(self._boundaries, np.int64)
        stream.write(struct.pack("<QQ", count, count + 1 if boundaries is None else len(boundaries)))
        lengths.tofile(stream)
        # In parts: whole, the two arrays would take five times the memory of the lengths.
        before = 0
        for first in range(0, count, _INDEX_PART):
            part = lengths[first : first + _INDEX_PART]
            ends = before + np.cumsum(part, dtype=np.int64)
            ((ends - part) * self.dtype.itemsize).tofile(stream)
            before = int(ends[-1])
        if boundaries is not None:
            boundaries.tofile(stream)
            return
        for first in range(0, count + 1, _INDEX_PART):
            np.arange(first, min(first + _INDEX_PART, count + 1), dtype=np.int64).tofile(stream)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._stream.closed:  # after a commit these names may be those of the next writer
            self._partial_idx.unlink(missing_ok=True)
            discard(self._stream, self._partial_bin)


@dataclass(frozen=True)
class IndexSummary:
    """What the index of a dataset says, without its tokens.

    Attributes:
        prefix: path without suffix.
        dtype: what ids are stored as.
        lengths: ``[sequences]`` int32, memory mapped: tokens in each sequence.
        boundaries: ``[documents + 1]`` int64, memory mapped: the sequence with which each document begins, and the end.
        bin_bytes: size of the ``.bin``.
    """

    prefix: str
    dtype: np.dtype
    lengths: np.ndarray
    boundaries: np.ndarray
    bin_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens in the dataset."""
        return self.bin_bytes // self.dtype.itemsize


def read_index(prefix: str) -> IndexSummary:
    """Read and check the header of ``<prefix>.idx`` against the size of ``<prefix>.bin``.

    Raises:
        DataError: when a file is missing, is not an indexed dataset, or the two do not belong together.
    """
    index, data = idx_path(prefix), bin_path(prefix)
    for path in (index, data):
        if not path.is_file():
            raise DataError("A file of the dataset is missing.", got=f"{path} does not exist", fix=_missing_fix(prefix))
    with open(index, "rb") as stream:
        header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise DataError("The file is not an index of Megatron's format.", got=index, fix="prepare the data again")
    _, code, count, boundaries = struct.unpack("<QBQQ", header[len(MAGIC) :])
    expected = HEADER_BYTES + count * (4 + 8) + boundaries * 8
    if code not in DTYPE_CODES or index.stat().st_size < expected:
        raise DataError(
            "The index is damaged.",
            got=f"{index}: {index.stat().st_size} bytes, dtype code {code}",
            allowed=f"at least {expected} bytes, dtype code 1 to {max(DTYPE_CODES)}",
            fix="prepare the data again",
        )
    dtype = DTYPE_CODES[code]
    if count == 0:
        lengths = np.zeros(0, dtype=np.int32)
        end = 0
    else:
        lengths = np.memmap(index, dtype=np.int32, mode="r", offset=HEADER_BYTES, shape=(count,))
        last_offset = np.memmap(index, dtype=np.int64, mode="r", offset=HEADER_BYTES + count * 4, shape=(count,))[-1]
        end = int(last_offset) + int(lengths[-1]) * dtype.itemsize
    if data.stat().st_size != end:
        raise DataError(
            "The .bin and the .idx do not belong together.",
            got=f"{data}: {data.stat().st_size} bytes",
            allowed=f"{end} bytes, as {index.name} says",
            fix="prepare the data again",
        )
    offset = HEADER_BYTES + count * (4 + 8)
    ends = np.memmap(index, dtype=np.int64, mode="r", offset=offset, shape=(boundaries,))
    if not boundaries or ends[0] != 0 or ends[-1] != count:
        raise DataError(
            "The index is damaged.",
            got=f"{index}: its documents have {ends[-1] if boundaries else 0} of {count} sequences",
            fix="prepare the data again",
        )
    return IndexSummary(prefix, dtype, lengths, ends, end)


def _missing_fix(prefix: str) -> str:
    """Names beside ``prefix`` that the caller may have meant."""
    path = Path(prefix)
    if path.parent.is_dir():
        near = sorted(str(found.with_suffix("")) for found in path.parent.glob(f"{path.name}*_document.idx"))
        if near:
            return f"give the prefix with its key, for instance {near[0]}"
    return "give the path without .bin or .idx, as preprocess_data.py printed it, or a raw file or folder that exists"
