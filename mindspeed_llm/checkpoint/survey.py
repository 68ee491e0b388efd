"""Checkpoints as they lie on disk, for tools: our saves and Hugging Face folders, read without process groups.

Both are a mapping of names to :class:`StoredTensor`, of which any box can be read. A tensor of a save is kept in pieces
as the ranks held it; a box is put together from those that touch it, so what is in memory is the box and one piece.
"""

# pyright: basic, reportMissingTypeStubs=false
# Metadata of torch's checkpoints, JSON and safetensors' handles have no types.

from __future__ import annotations

import io
import re
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.convert.legacy_folders import find_tree
from mindspeed_llm.checkpoint.convert.megatron_saves import is_release
from mindspeed_llm.checkpoint.folders import TRACKER, latest_iteration, require_save
from mindspeed_llm.checkpoint.trusted import read_common, read_metadata, read_object
from mindspeed_llm.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""

OPTIMIZER, RNG = "optimizer.", "rng_state/"
FLAT = "optimizer.distributed."
_PARAMETER_ALIGNMENT = 64
_CHAINED = re.compile(r"^chained_\d+\.")
"""What megatron-core puts before the names of an optimizer's state where there are several optimizers."""
_SAVE_NAME = re.compile(r"iter_\d{7,}(\..*)?")


@dataclass(frozen=True)
class Place:
    """Bytes ``start`` to ``start + length`` of ``file``."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and where it is; nowhere, when the save does not say."""

    box: Box
    place: Place | None


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor: what it is, and the pieces that it is stored in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def group(self) -> str:
        """``weights`` or ``optimizer``."""
        return "optimizer" if _CHAINED.sub("", self.name).startswith(OPTIMIZER) else "weights"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    def is_padding(self, piece: Piece) -> bool:
        """Whether nobody ever wrote what the piece holds.

        The flat buffers of a distributed optimizer have gaps between parameters. Parameters, and the shares of ranks,
        begin at multiples of 64 (megatron-core's ``param_and_grad_buffer``), so a piece that does not is a gap.
        """
        return self.name.startswith(FLAT) and piece.box[0][0] % _PARAMETER_ALIGNMENT != 0


class Checkpoint(Protocol):
    """Named tensors on disk."""

    @property
    def folder(self) -> Path:
        """Where it is."""
        ...

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """What there is, by name."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor.

        Raises:
            CheckpointError: a piece of it is damaged.
        """
        ...


class Save:
    """One of our saves: megatron-core's ``torch_dist`` format.

    Raises:
        CheckpointError: ``.metadata`` is missing or damaged, or names files outside the folder.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

        self.folder = folder
        metadata = read_metadata(folder / ".metadata")
        places: dict[Any, Place] = {}
        for index, info in (metadata.storage_data or {}).items():
            places[index] = Place(info.relative_path, info.offset, info.length)
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, Place | None] = {}
        for name, stored in sorted(metadata.state_dict_metadata.items()):
            if isinstance(stored, TensorStorageMetadata):
                pieces = tuple(
                    Piece((tuple(part.offsets), tuple(part.sizes)), places.get(MetadataIndex(name, part.offsets)))
                    for part in stored.chunks
                )
                self.tensors[name] = StoredTensor(name, tuple(stored.size), stored.properties.dtype, pieces)
            else:
                self.objects[name] = places.get(MetadataIndex(name))
        self._last: tuple[Place, Tensor] | None = None

    def common(self) -> dict[str, Any]:
        """Counters, schedule, layout, configuration.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return read_common(self.folder / "common.pt")

    def read(self, name: str, box: Box) -> Tensor:
        """See :meth:`Checkpoint.read`. What no piece covers is zero."""
        stored = self.tensors[name]
        same = next((piece for piece in stored.pieces if piece.box == box), None)
        if same is not None:
            return self.read_piece(stored, same)
        touching = [(piece, shared) for piece in stored.pieces if (shared := intersection(piece.box, box)) is not None]
        whole = torch.zeros(box[1], dtype=stored.dtype)
        for piece, shared in touching:
            part = self.read_piece(stored, piece)
            whole[_within(shared, box)] = part[_within(shared, piece.box)]
        return whole

    def read_piece(self, stored: StoredTensor, piece: Piece) -> Tensor:
        """One piece, proved by its checksums.

        Raises:
            CheckpointError: it is missing, damaged or another one than the metadata says.
        """
        if piece.place is None:
            raise CheckpointError(f"{stored.name} at {piece.box[0]}: .metadata does not say where it is")
        if self._last is not None and self._last[0] == piece.place:
            return self._last[1]
        what = f"{piece.place.file}: {stored.name} at {piece.box[0]}"
        content = self.read_bytes(piece.place, what)
        tensor = read_object(content, what)
        found = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        if found != (piece.box[1], stored.dtype):
            raise CheckpointError(f"{what} is not what .metadata says", got=found, allowed=(piece.box[1], stored.dtype))
        # Neighbouring boxes often want the same piece again.
        self._last = (piece.place, tensor)
        return tensor

    def read_bytes(self, place: Place, what: str) -> io.BytesIO:
        """What torch.save wrote at a place, with its checksums proved.

        Raises:
            CheckpointError: the bytes are not there, or not those that were written.
        """
        try:
            with (self.folder / place.file).open("rb") as file:
                file.seek(place.start)
                content = io.BytesIO(file.read(place.length))
        except OSError as error:
            raise CheckpointError(f"{what} cannot be read", got=error) from error
        if len(content.getbuffer()) != place.length:
            raise CheckpointError(f"{what} cannot be read", got="the file ends before it does")
        try:
            with zipfile.ZipFile(content) as archive:
                damaged = archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
            raise CheckpointError(f"{what} is damaged", got=error) from error
        if damaged is not None:
            raise CheckpointError(f"{what} is damaged", got="the checksum does not fit")
        content.seek(0)
        return content


class HfModel:
    """A Hugging Face folder; files stay open as long as ``stack``.

    Raises:
        CheckpointError: no weights, a shard that is missing or broken, an index that names what is not there.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._source = hf_io.open_tensors(folder, stack)
        self.tensors = {
            name: StoredTensor(name, info.shape, info.dtype, (Piece(((0,) * len(info.shape), info.shape), None),))
            for name, info in sorted(self._source.tensors.items())
        }

    def read(self, name: str, box: Box) -> Tensor:
        """See :meth:`Checkpoint.read`."""
        offsets, sizes = box
        if not sizes:
            return self._source.read(name)
        rows = self._source.read(name, (offsets[0], offsets[0] + sizes[0]))
        return rows[(slice(None), *_within((offsets[1:], sizes[1:]), ((0,) * (len(sizes) - 1), ())))]


def tensor_files(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file of a Hugging Face folder; None where one file holds all.

    Raises:
        CheckpointError: see :func:`hf_io.indexed_files`.
    """
    for index, single in ((hf_io.SAFE_INDEX, hf_io.SAFE_SINGLE), (hf_io.BIN_INDEX, hf_io.BIN_SINGLE)):
        if (folder / index).is_file():
            return {name: path.name for name, path in hf_io.indexed_files(folder, index).items()}
        if (folder / single).is_file():
            break
    return None


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share; None where that is nothing."""
    starts = tuple(map(max, a[0], b[0]))
    ends = tuple(min(i + n, j + m) for i, n, j, m in zip(a[0], a[1], b[0], b[1], strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where ``box`` lies in a tensor that holds ``outer``."""
    return tuple(slice(i - j, i - j + n) for i, n, j in zip(box[0], box[1], outer[0], strict=True))


# Which folder is meant ----------------------------------------------------------------------------------------------


def is_save(folder: Path) -> bool:
    """Whether the folder is (meant as) one of our saves."""
    return _SAVE_NAME.fullmatch(folder.name) is not None or (folder / ".metadata").is_file()


def is_root(folder: Path) -> bool:
    """Whether the folder holds our saves."""
    ours = (folder / TRACKER).exists() or any(is_save(path) for path in folder.glob("iter_*"))
    return ours and find_tree(folder) is None


def find_save(folder: Path, step: int | None) -> Path | None:
    """The save that is meant by a folder of saves or of one save; None for a Hugging Face folder.

    Args:
        folder: what the user gave.
        step: which save of a folder of saves; None for the one that a resume takes.

    Raises:
        CheckpointError: the folder is none of these, holds no save, or not that one.
    """
    if not folder.is_dir():
        raise CheckpointError("not a folder", got=folder)
    if find_tree(folder, step) is not None:
        raise CheckpointError(
            f"{folder} is a per-rank checkpoint of Megatron-LM or MindSpeed-LLM",
            allowed="a save of this suite, or a Hugging Face folder",
            fix="convert it by convert_ckpt.py first",
        )
    # A folder of exports may hold iter_* folders of its own, so config.json comes first.
    if hf_io.is_hf_folder(folder) or is_save(folder):
        if step is not None:
            raise CheckpointError(
                "--ckpt-step chooses among the saves of a folder",
                got=folder,
                fix="leave it out, or give the --save folder",
            )
        return None if hf_io.is_hf_folder(folder) else folder
    if not is_root(folder):
        raise CheckpointError(
            f"{folder} is no checkpoint",
            got=sorted(path.name for path in folder.iterdir())[:8],
            allowed="a --save folder, one iter_* folder of it, or a Hugging Face folder with config.json",
        )
    if step is None and is_release(folder):
        return folder / "release"
    iteration = latest_iteration(folder) if step is None else step
    if iteration is None:
        raise CheckpointError(f"{folder} holds no complete save", fix="give a draft's own folder to look into it")
    return require_save(folder, iteration)


def open_checkpoint(folder: Path, step: int | None, stack: ExitStack) -> Save | HfModel:
    """The checkpoint that :func:`find_save` means.

    Raises:
        CheckpointError: see there, or it cannot be opened.
    """
    save = find_save(folder, step)
    return HfModel(folder, stack) if save is None else Save(save)
