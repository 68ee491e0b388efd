"""An input as one stream of bytes, whatever compresses it, whose memory does not grow with the input."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from mindspeed_llm.errors import DataError

STDIN = "-"
GZIP, ZSTD = "gzip", "zstd"
BOM = b"\xef\xbb\xbf"

_Value = TypeVar("_Value")

_BUFFER = 1 << 16
_ZSTD_STEP = 1024
"""Compressed bytes that are fed at once. Some twenty of them can be a block of 128 KiB, where text repeats itself."""


def compression_of(head: bytes) -> str | None:
    """What the first four bytes of an input say; a frame that decoders skip may come first in zstd."""
    if head.startswith(b"\x1f\x8b"):
        return GZIP
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
        return ZSTD
    return None


class InputStream:
    """Decompressed bytes of a file or of standard input.

    Members of gzip and frames of zstd that follow each other are one stream, as the tools of both have it.

    Args:
        path: of the file; ``-`` is standard input.
        compression: ``gzip``, ``zstd``, None, or ``auto`` to go by the first bytes.

    Raises:
        DataError: the file cannot be opened, or a library is missing. Every method raises it on a damaged file.
    """

    def __init__(self, path: str, compression: str | None = "auto") -> None:
        self.path = path
        self._damages: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
        self._source = self._guard(self._open_source)
        if compression == "auto":
            compression = compression_of(self._guard(self._source.peek)[:4])
        self.compression = compression
        self._counted = _Counted(self._source)
        self._stream = io.BufferedReader(self._decompressed(), _BUFFER)

    @property
    def consumed(self) -> int:
        """Bytes of the input, as it lies on the disk, that were read so far."""
        return self._counted.count

    def peek(self) -> bytes:
        """Some of the next bytes, at least one unless there are no more."""
        return self._guard(self._stream.peek)

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer at the end."""
        return self._guard(lambda: self._stream.read(size))

    def lines(self) -> Iterator[bytes]:
        """The lines with their ends, without the byte order mark of UTF-8."""
        line = self._guard(self._stream.readline)
        yield line.removeprefix(BOM)
        while line := self._guard(self._stream.readline):
            yield line

    def pieces(self, size: int) -> Iterator[bytes]:
        """Pieces of about ``size`` bytes, without the byte order mark of UTF-8."""
        piece = self.read(size + len(BOM)).removeprefix(BOM)
        while piece:
            yield piece
            piece = self.read(size)

    def __enter__(self) -> InputStream:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.path != STDIN:
            self._source.close()

    def _guard(self, read: Callable[[], _Value]) -> _Value:
        try:
            return read()
        except self._damages as error:
            if isinstance(error, OSError) and error.strerror:
                what, fix = "An input file cannot be read.", "--input"
            else:
                what, fix = "A compressed input is damaged or ends too early.", "make or fetch the file again"
            raise DataError(what, got=f"{self.path}: {getattr(error, 'strerror', None) or error}", fix=fix) from error

    def _open_source(self) -> io.BufferedReader:
        if self.path == STDIN:
            return cast(io.BufferedReader, sys.stdin.buffer)
        return open(self.path, "rb")

    def _decompressed(self) -> io.RawIOBase:
        if self.compression == GZIP:
            return cast(io.RawIOBase, self._gunzip())
        if self.compression == ZSTD:
            zstandard = _import_zstandard(self.path)
            self._damages = (*self._damages, zstandard.ZstdError)
            # Files made with --long need a window that the decoder would refuse by itself.
            decoder = zstandard.ZstdDecompressor(max_window_size=1 << 31)
            return _ZstdReader(self._counted, decoder.decompressobj)
        return self._counted

    def _gunzip(self) -> io.BufferedIOBase:
        try:
            from isal import igzip, igzip_lib
        except ImportError:
            return gzip.GzipFile(fileobj=cast(Any, self._counted))
        self._damages = (*self._damages, cast("type[Exception]", igzip_lib.IsalError))
        return igzip.IGzipFile(fileobj=cast(Any, self._counted))


class _Counted(io.RawIOBase):
    """A source that says how much of it was read."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        size: int = self.source.readinto(buffer)
        self.count += size
        return size


class _ZstdReader(io.RawIOBase):
    """Frames of zstd end to end.

    zstandard's own reader of streams takes an end within a frame for the end of the data, so that a truncated file
    would look whole; its object for single frames says whether the frame has ended.
    """

    def __init__(self, source: _Counted, new_frame: Callable[[], Any]) -> None:
        self.source = source
        self.new_frame = new_frame
        self.frame: Any = None
        self.compressed = b""
        self.data = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self.data and self._feed():
            pass
        size = min(len(buffer), len(self.data))
        buffer[:size] = self.data[:size]
        self.data = self.data[size:]
        return size

    def _feed(self) -> bool:
        """Decompress a little more; False at the end."""
        compressed = self.compressed or self.source.read(_ZSTD_STEP)
        if not compressed:
            if self.frame is not None:
                raise EOFError("the file ends within a frame")
            return False
        self.frame = self.frame or self.new_frame()
        self.data = memoryview(self.frame.decompress(compressed))
        self.compressed = b""
        if self.frame.eof:
            self.compressed, self.frame = self.frame.unused_data, None
        return True


def _import_zstandard(path: str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError("zstd needs a package that is not installed.", got=path, fix="pip install zstandard") from error
    return zstandard
