"""Whole tensors in and out of ``torch_dist`` folders, without megatron-core and without process groups.

A tensor of a layer stands in a stack of all layers, ``decoder.layers.mlp.linear_fc1.weight [l, ...]``, unless layers
differ (``TransformerBlock.sharded_state_dict``), and one of an expert in a stack of all experts of its layer. Each
piece is a file of ``torch.save`` within a ``.distcp`` file; its elements are read by their place in the file, so that
memory holds no more than was asked for.
"""

# pyright: basic, reportMissingTypeStubs=false, reportPrivateUsage=false
# Metadata of torch's checkpoints has no types.

from __future__ import annotations

import io
import json
import mmap
import pickle
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata as ObjectMetadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed_llm.checkpoint.convert.legacy_archive import ALIGNMENT, Later, TensorArchive
from mindspeed_llm.checkpoint.convert.legacy_args import kept_values
from mindspeed_llm.checkpoint.convert.legacy_spelling import local_name
from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.checkpoint.durable import sync_file
from mindspeed_llm.checkpoint.hf_io import TensorInfo
from mindspeed_llm.checkpoint.survey import Piece, Save, StoredTensor, intersection
from mindspeed_llm.checkpoint.trusted import read_object
from mindspeed_llm.checkpoint.verify import structure
from mindspeed_llm.errors import CheckpointError

_LAYERS = "decoder.layers."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERTS, _GROUPED = ".mlp.experts.experts.", ".mlp.experts."
"""Where all experts of a layer stand in one stack, and where each is a tensor of a number."""
_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")
_LINEAR = re.compile(r"((?!.*\.experts\.experts\.).*\.linear_(?!\w*down_proj)\w+)\.weight")
"""Of megatron-core's own linear layers; experts and the down-projections of latents are ours."""
Lead = tuple[int, ...]
"""Places of a tensor in the dimensions before its own: its layer's, its expert's."""
_FILE_BYTES = 2**30


# Reading ------------------------------------------------------------------------------------------------------------


class TorchDistSource:
    """The weights of one save, by global name.

    Args:
        folder: the ``iter_*`` folder.

    Raises:
        CheckpointError: files are missing or too short, or the pieces of a tensor leave gaps.
    """

    target: Target | None = None

    def __init__(self, folder: Path) -> None:
        problems = structure(folder)
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise CheckpointError(f"{folder} is not whole", got="; ".join(problems[:3]) + more)
        self._save = Save(folder)
        self._elements: dict[Piece, tuple[str, int] | None] = {}
        self._maps: dict[str, mmap.mmap] = {}
        # What a pickle may name is a setting of the whole process.
        self._unpickling = threading.Lock()
        self._stacks: dict[str, tuple[StoredTensor, Lead, list[Piece]]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for stored in self._save.tensors.values():
            if stored.group == "weights":
                self._add(stored)

    def _add(self, stored: StoredTensor) -> None:
        layered = stored.name.startswith(_LAYERS) and not _LAYER.fullmatch(stored.name)
        experts = _EXPERTS in stored.name
        held: dict[Lead, list[Piece]] = {}
        for piece in stored.pieces:
            ranges = zip(*(sides[: layered + experts] for sides in piece.box), strict=True)
            for lead in product(*(range(first, first + count) for first, count in ranges)):
                held.setdefault(lead, []).append(piece)
        for lead, pieces in held.items():
            name = f"{_LAYERS}{lead[0]}.{stored.name.removeprefix(_LAYERS)}" if layered else stored.name
            name = f"{name.replace(_EXPERTS, _GROUPED)}{lead[-1]}" if experts else local_name(name) or name
            self._stacks[name] = (stored, lead, pieces)
            self.tensors[name] = TensorInfo(stored.shape[len(lead) :], stored.dtype)

    @property
    def values(self) -> Mapping[str, Any]:
        """See :class:`MegatronSource`."""
        return kept_values(self._save.common(), self.tensors)

    def read(self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor:
        """See :class:`TensorSource`.

        Raises:
            CheckpointError: a piece is damaged.
        """
        stored, lead, pieces = self._stacks[name]
        shape = self.tensors[name].shape
        given = (rows, columns)[: len(shape)]
        ranges = [part or (0, size) for part, size in zip(given, shape, strict=False)]
        ranges += [(0, size) for size in shape[len(given) :]]
        ranges = [*((place, place + 1) for place in lead), *ranges]
        box = tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges)
        touching = [(piece, shared) for piece in pieces if (shared := intersection(piece.box, box)) is not None]
        if len(touching) == 1 and touching[0][1] == box:
            return self._read_box(stored, touching[0][0], box).reshape(box[1][-len(shape) :] if shape else ())
        whole = torch.empty(box[1], dtype=stored.dtype)
        for piece, shared in touching:
            slices = (slice(i - j, i - j + n) for i, n, j in zip(*shared, box[0], strict=True))
            whole[tuple(slices)] = self._read_box(stored, piece, shared)
        return whole.reshape(box[1][len(lead) :])

    def _read_box(self, stored: StoredTensor, piece: Piece, box: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
        """A box within one piece: whole rows are read, and columns cut from them."""
        begin = self._begin(stored, piece)
        if begin is None or not box[1]:
            with self._unpickling:
                whole = self._save.read_piece(stored, piece)
            return whole[tuple(slice(i - j, i - j + n) for i, n, j in zip(*box, piece.box[0], strict=True))]
        # Dimensions before `axis` have one index; along it the elements of the rows are contiguous.
        axis = next((i for i, n in enumerate(box[1]) if n > 1), len(box[1]) - 1)
        strides = _strides(piece.box[1])
        first = sum((i - j) * stride for i, j, stride in zip(box[0][: axis + 1], piece.box[0], strides, strict=False))
        count = box[1][axis] * strides[axis]
        file_name, start = begin
        read = _mapped(self._maps[file_name], start + first * stored.dtype.itemsize, count, stored.dtype)
        read = read.view(*(1,) * axis, box[1][axis], *piece.box[1][axis + 1 :])
        inner = zip(box[0][axis + 1 :], box[1][axis + 1 :], piece.box[0][axis + 1 :], strict=True)
        return read[(slice(None),) * (axis + 1) + tuple(slice(i - j, i - j + n) for i, n, j in inner)]

    def _begin(self, stored: StoredTensor, piece: Piece) -> tuple[str, int] | None:
        """The file of a piece and where its elements begin, proved by their checksum; None where they are not plain."""
        with self._unpickling:
            if piece not in self._elements:
                self._elements[piece] = self._locate(stored, piece)
            return self._elements[piece]

    def _locate(self, stored: StoredTensor, piece: Piece) -> tuple[str, int] | None:
        place = piece.place
        if place is None or not stored.numel:
            return None
        what = f"{place.file}: {stored.name} at {piece.box[0]}"
        with (self._save.folder / place.file).open("rb") as file:
            if place.file not in self._maps:
                # Nothing is written to it; torch warns of memory that it could not write to.
                self._maps[place.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            view = io.BufferedReader(_Window(file, place.start, place.length))
            found = _located(view, stored, piece, what)
        if found is None:
            return None
        begin, entry = place.start + found[0], found[1]
        with memoryview(self._maps[place.file]) as content:
            if zlib.crc32(content[begin : begin + entry.file_size]) != entry.CRC:
                raise CheckpointError(f"{what} is damaged", got="the checksum does not fit")
        return place.file, begin


def _strides(sizes: tuple[int, ...]) -> list[int]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def _mapped(mapped: mmap.mmap, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` elements from byte ``begin`` on, without a copy where they are aligned."""
    if begin % dtype.itemsize == 0:
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=count * dtype.itemsize, offset=begin).clone().view(dtype)


def _located(view: BinaryIO, stored: StoredTensor, piece: Piece, what: str) -> tuple[int, zipfile.ZipInfo] | None:
    """Where in a piece's own file its elements begin, and the record that they are; None where they are not plain."""
    with torch.serialization.skip_data():
        seen = read_object(view, what)
    if not isinstance(seen, Tensor) or (tuple(seen.shape), seen.dtype) != (piece.box[1], stored.dtype):
        raise CheckpointError(f"{what} is not what .metadata says", allowed=(piece.box[1], stored.dtype))
    try:
        entries = [entry for entry in zipfile.ZipFile(view).infolist() if re.search(r"(^|/)data/\d+$", entry.filename)]
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise CheckpointError(f"{what} is damaged", got=error) from error
    nbytes = seen.numel() * seen.dtype.itemsize
    plain = len(entries) == 1 and entries[0].compress_type == zipfile.ZIP_STORED and entries[0].file_size == nbytes
    if not plain or seen.storage_offset() or not seen.is_contiguous():
        return None
    view.seek(entries[0].header_offset + 26)
    return entries[0].header_offset + 30 + sum(struct.unpack("<HH", view.read(4))), entries[0]


class _Window(io.RawIOBase):
    """Bytes ``start`` to ``start + length`` of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        content = self._file.read(count)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


# Writing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A planned tensor's place in what is stored: the name there, its shape, and offsets before the tensor's own."""

    key: str
    shape: tuple[int, ...]
    lead: tuple[int, ...]


class TorchDistSink:
    """Writes one save, in megatron-core's names, from whole tensors.

    Args:
        folder: empty; the ``iter_*`` folder to be.
        tensors: all weights of the model, by global name.
        num_layers: of the model.
        homogeneous: whether layers stand in stacks; see :func:`homogeneous`.
        common: what is kept beside the tensors.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, TensorInfo], *, num_layers: int, homogeneous: bool, common: Any
    ) -> None:
        self._folder, self._tensors, self._common = folder, tensors, common
        experts = 1 + max((int(match[3]) for name in tensors if (match := _EXPERT.fullmatch(name))), default=-1)
        self._plan = {
            name: _placed(name, info, num_layers if homogeneous else None, experts) for name, info in tensors.items()
        }
        self._order = list(tensors)
        self._at, self._row = 0, 0
        self._file: BinaryIO | None = None
        self._files = 0
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._pieces: dict[str, list[ChunkStorageMetadata]] = {}

    def write(self, name: str, tensor: Tensor, start: int = 0) -> None:
        """See :class:`TensorSink`."""
        expected = self._order[self._at] if self._at < len(self._order) else None
        info = self._tensors.get(name)
        if name != expected or info is None or start != self._row or tuple(tensor.shape[1:]) != info.shape[1:]:
            raise CheckpointError(
                f"tensor out of plan: {name} {tuple(tensor.shape)} at {start}", allowed=f"{expected} at {self._row}"
            )
        stored = self._plan[name]
        offsets = torch.Size((*stored.lead, start, *(0 for _ in info.shape[1:])))
        tensor = tensor.to(info.dtype).reshape((*(1 for _ in stored.lead), *tensor.shape))
        self._append(MetadataIndex(stored.key, offsets), tensor)
        self._pieces.setdefault(stored.key, []).append(ChunkStorageMetadata(offsets, tensor.shape))
        self._row += tensor.shape[len(stored.lead)]
        if self._row >= info.shape[0]:
            self._at, self._row = self._at + 1, 0

    def _append(self, index: MetadataIndex, content: Any) -> None:
        if self._file is None:
            self._file = (self._folder / f"__0_{self._files}.distcp").open("wb")
            self._files += 1
        # Within itself an archive keeps its tensors at multiples of 64 bytes; now they are in the file, too.
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        begin = self._file.tell()
        if isinstance(content, Tensor):
            later = Later(TensorInfo(tuple(content.shape), content.dtype))
            archive = TensorArchive(Path("archive.pt"), later, self._file)
            try:
                archive.write(later, content)
                archive.finish()
            except OSError:
                archive.abandon()
                raise
        else:
            torch.save(content, self._file)
        end = self._file.tell()
        self._places[index] = _StorageInfo(Path(self._file.name).name, begin, end - begin)
        if end > _FILE_BYTES:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            sync_file(self._file)
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """See :class:`TensorSink`."""
        if self._at != len(self._order):
            raise CheckpointError("not every planned tensor was written", got=self._order[self._at])
        described: dict[str, Any] = {}
        for name, stored in self._plan.items():
            properties = TensorProperties(dtype=self._tensors[name].dtype)
            described[stored.key] = TensorStorageMetadata(
                properties, torch.Size(stored.shape), self._pieces[stored.key]
            )
            if (linear := _LINEAR.fullmatch(stored.key)) is not None and stored.key.startswith(_LAYERS):
                # megatron-core's linear layers ask for a state of their own, which is empty.
                part = f"{stored.lead[0]}_{stored.shape[0]}" if stored.lead else "0_1"
                key = f"{linear[1]}._extra_state/shard_{part}"
                self._append(MetadataIndex(key), [None])
                described[key] = ObjectMetadata()
        self._close()
        with (self._folder / "common.pt").open("wb") as file:
            torch.save(self._common, file)
            sync_file(file)
        with (self._folder / ".metadata").open("wb") as file:
            pickle.dump(Metadata(described, storage_data=self._places), file)
            sync_file(file)
        with (self._folder / "metadata.json").open("wb") as file:
            file.write(json.dumps(DESCRIPTION).encode())
            sync_file(file)

    def abandon(self) -> None:
        """See :class:`TensorSink`."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


DESCRIPTION = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What megatron-core looks at first: ``dist_checkpointing.core.CheckpointingConfig``."""


def homogeneous(values: Mapping[str, Any]) -> bool:
    """Whether megatron-core stacks the layers of a model (``TransformerBlock.sharded_state_dict``)."""
    frequencies = (values["moe_layer_freq"], values.get("linear_attention_freq"))
    return all(freq is None or freq == 1 for freq in frequencies)


def _placed(name: str, info: TensorInfo, stack_of: int | None, experts: int) -> _Stored:
    sizes, lead = [], []
    if (layer := _LAYER.fullmatch(name)) is not None and stack_of is not None:
        name = f"{_LAYERS}{layer[2]}"
        sizes, lead = [stack_of], [int(layer[1])]
    if (expert := _EXPERT.fullmatch(name)) is not None:
        name = f"{expert[1]}experts.{expert[2]}"
        sizes, lead = [*sizes, experts], [*lead, int(expert[3])]
    return _Stored(name, (*sizes, *info.shape), tuple(lead))
