"""Files of ``torch.save``, written tensor by tensor: what is in memory is the block that is being written.

The format (torch/serialization.py, ``_save``): a zip file without compression whose records begin at multiples of 64
bytes. ``data.pkl`` holds the object, in which each storage is a reference to a record ``data/<key>``.
"""

# pyright: basic, reportPrivateUsage=false
# What a pickle holds has no type.

from __future__ import annotations

import io
import pickle
import pkgutil
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from mindspeed_llm.checkpoint.durable import begin_sync, sync_file
from mindspeed_llm.checkpoint.hf_io import TensorInfo
from mindspeed_llm.errors import CheckpointError

ALIGNMENT = 64
"""Bytes, at a multiple of which records begin."""
_LOCAL_HEADER, _ZIP64_EXTRA, _EXTRA_HEADER = 30, 20, 4
_STORAGES: Mapping[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
# Only its name is written; the class belongs to the command line.
_NAMESPACE: Any = pkgutil.resolve_name("argparse:Namespace")


@dataclass(frozen=True, eq=False)
class Later:
    """Stands in an object for a tensor whose elements come later."""

    info: TensorInfo


@dataclass(frozen=True)
class _Storage:
    """The record that the elements of a tensor are in."""

    key: str
    dtype: torch.dtype
    elements: int


class _Pickler(pickle.Pickler):
    """As torch's: tensors refer to records. ``SimpleNamespace`` is written as ``argparse.Namespace``."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.keys: dict[Later, str] = {}

    def reducer_override(self, obj: Any, /) -> Any:
        if isinstance(obj, Later):
            key = self.keys.setdefault(obj, str(len(self.keys)))
            shape = obj.info.shape
            strides = torch.empty(shape, device="meta").stride()
            storage = _Storage(key, obj.info.dtype, torch.Size(shape).numel())
            return _rebuild_tensor_v2, (storage, 0, shape, strides, False, OrderedDict())
        if isinstance(obj, types.SimpleNamespace):
            return _NAMESPACE, (), vars(obj)
        return NotImplemented

    def persistent_id(self, obj: Any, /) -> Any:
        if isinstance(obj, _Storage):
            return "storage", _STORAGES[obj.dtype], obj.key, "cpu", obj.elements
        return None


class _Rest:
    """What is written to a file from now on, as a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._begin = file, file.tell()
        self.name, self.write, self.flush, self.close = file.name, file.write, file.flush, file.close
        self.fileno = file.fileno

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int) -> int:
        return self._file.seek(offset + self._begin) - self._begin


class TensorArchive:
    """One file. Records stand in the order in which tensors come.

    Args:
        path: of the file.
        content: what ``torch.load`` will give, with :class:`Later` in place of tensors.
        within: the open file itself, where it holds more: this one begins at its end, and others wait for the disk.

    Raises:
        OSError: the disk does not take it.
    """

    def __init__(self, path: Path, content: object, within: BinaryIO | None = None) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(content)
        self._root = path.stem
        self._todo = dict(pickler.keys)
        self._alone = within is None
        self._file: BinaryIO = path.open("wb") if within is None else cast("BinaryIO", _Rest(within))
        self._zip = zipfile.ZipFile(self._file, "w")
        self._entry: IO[bytes] | None = None
        self._current: Later | None = None
        self._left = 0
        try:
            self._put("data.pkl", buffer.getvalue())
            self._put("byteorder", sys.byteorder.encode())
        except OSError:
            self.abandon()
            raise

    def write(self, tensor: Later, rows: Tensor) -> None:
        """The next rows of ``tensor``, cast to its dtype; one tensor after the other.

        Raises:
            CheckpointError: another tensor is not complete, this one is, or the rows are not its own.
            OSError: the disk does not take it.
        """
        if self._current is None and tensor in self._todo:
            self._current = tensor
            self._left = torch.Size(tensor.info.shape).numel() * tensor.info.dtype.itemsize
            self._entry = self._open(f"data/{self._todo.pop(tensor)}", self._left)
        data = rows.detach().to(device="cpu", dtype=tensor.info.dtype).contiguous()
        fits = tuple(rows.shape[1:]) == tensor.info.shape[1:] and data.nbytes <= self._left
        if self._current is not tensor or self._entry is None or not fits:
            raise CheckpointError(f"{self._file.name}: rows out of plan", got=tuple(rows.shape), allowed=tensor.info)
        self._entry.write(data.reshape(-1).view(torch.uint8).numpy().data)
        begin_sync(self._file)
        self._left -= data.nbytes
        if not self._left:
            self._entry.close()
            self._entry = self._current = None

    def finish(self) -> None:
        """Completes the file and brings it to disk, if it is alone in it.

        Raises:
            CheckpointError: tensors are missing.
            OSError: the disk does not take it.
        """
        if self._todo or self._current is not None:
            raise CheckpointError(f"{self._file.name}: not every planned tensor was written")
        # The version of the format.
        self._put("version", b"3\n")
        self._zip.close()
        if self._alone:
            sync_file(self._file)
            self._file.close()

    def abandon(self) -> None:
        """Closes the file, whatever the disk says."""
        for part in (self._entry, self._zip, self._file):
            if part is not None:
                with suppress(OSError, ValueError):
                    part.close()

    def _put(self, name: str, data: bytes) -> None:
        with self._open(name, len(data)) as entry:
            entry.write(data)

    def _open(self, name: str, size: int) -> IO[bytes]:
        """A record whose data begin at a multiple of 64 bytes, by a filler in its header as torch has it."""
        entry = zipfile.ZipInfo(f"{self._root}/{name}")
        entry.file_size = size
        # zipfile's own measure.
        large = size * 1.05 > zipfile.ZIP64_LIMIT
        header = _LOCAL_HEADER + len(entry.filename) + _EXTRA_HEADER + large * _ZIP64_EXTRA
        filler = -(self._file.tell() + header) % ALIGNMENT
        entry.extra = b"FB" + filler.to_bytes(2, "little") + b"Z" * filler
        return self._zip.open(entry, "w", force_zip64=large)
