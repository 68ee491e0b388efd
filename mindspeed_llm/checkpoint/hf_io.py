"""Hugging Face folders: what they hold, parts of their tensors, and writing one that is complete or invisible."""

# pyright: basic
# JSON, pickles and safetensors' handles have no types.

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch
from torch import Tensor

from mindspeed_llm.checkpoint.durable import begin_sync, sync_file, sync_path
from mindspeed_llm.checkpoint.trusted import file_beside, read_tensors
from mindspeed_llm.errors import CheckpointError

logger = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"
SAFE_SINGLE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN_SINGLE, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""What a tokenizer may consist of, chat templates included."""

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorSource(Protocol):
    """Named tensors of which parts can be read."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What there is, by name."""
        ...

    def read(self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor:
        """Tensor ``name``, or rows (dim 0) and columns (dim 1) of it."""
        ...


def _cut(source: Any, dims: int, rows: tuple[int, int] | None, columns: tuple[int, int] | None) -> Tensor:
    if dims == 0:
        return source[...]
    row_slice = slice(*rows) if rows else slice(None)
    if dims < 2 or columns is None:
        return source[row_slice]
    return source[row_slice, slice(*columns)]


class _SafetensorsSource:
    def __init__(self, paths: Iterable[Path], stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        self.tensors: dict[str, TensorInfo] = {}
        self.files: dict[str, Path] = {}
        self._slices: dict[str, Any] = {}
        for path in paths:
            try:
                handle: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                names: list[str] = handle.keys()
                slices: dict[str, Any] = {name: handle.get_slice(name) for name in names}
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}", fix="fetch the file again") from error
            for name, part in slices.items():
                if name in self._slices:
                    raise CheckpointError("the same tensor stands in two files", got=f"{name}, again in {path}")
                if part.get_dtype() not in _DTYPES:
                    raise CheckpointError(f"{path}: unknown dtype of {name}", got=part.get_dtype())
                self.tensors[name] = TensorInfo(tuple(part.get_shape()), _DTYPES[part.get_dtype()])
            self._slices.update(slices)
            self.files.update(dict.fromkeys(slices, path))

    def read(self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor:
        return _cut(self._slices[name], len(self.tensors[name].shape), rows, columns)


class _PickledSource:
    def __init__(self, paths: Sequence[Path]) -> None:
        self._loaded: dict[str, Tensor] = {}
        self.files: dict[str, Path] = {}
        for path in paths:
            tensors = read_tensors(path)
            self._loaded.update(tensors)
            self.files.update(dict.fromkeys(tensors, path))
        self.tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self._loaded.items()}

    def read(self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor:
        return _cut(self._loaded[name], self._loaded[name].dim(), rows, columns)


class Turned:
    """A source in which some matrices are seen transposed.

    Args:
        source: the tensors as they stand.
        names: those that are turned; one-dimensional ones stay as they are.
    """

    def __init__(self, source: TensorSource, names: Iterable[str]) -> None:
        self._source = source
        self._names = {name for name in names if name in source.tensors and len(source.tensors[name].shape) == 2}
        self.tensors = dict(source.tensors)
        for name in self._names:
            info = source.tensors[name]
            self.tensors[name] = TensorInfo((info.shape[1], info.shape[0]), info.dtype)

    def read(self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor:
        """See :class:`TensorSource`."""
        if name not in self._names:
            return self._source.read(name, rows, columns)
        return self._source.read(name, columns, rows).t()


def is_hf_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether ``folder`` is meant as a Hugging Face model (it has a config.json)."""
    return (Path(folder) / CONFIG).is_file()


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """``config.json`` of a folder.

    Raises:
        CheckpointError: no folder, no config.json, or not JSON.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError("not a folder", got=root, fix="give the folder that holds config.json and the weights")
    if not is_hf_folder(root):
        raise CheckpointError(f"{root} has no {CONFIG}", fix="give a folder written by save_pretrained")
    return _read_json(root / CONFIG)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return cast("dict[str, Any]", content)


def open_tensors(folder: str | os.PathLike[str], stack: ExitStack) -> TensorSource:
    """The weights of a folder; files stay open as long as ``stack``.

    One safetensors file, shards with an index, or ``pytorch_model.bin`` in the same two forms.

    Raises:
        CheckpointError: no weights, a shard that is missing or broken, an index that names what is not there.
    """
    root = Path(folder)
    if (root / SAFE_INDEX).is_file():
        files = indexed_files(root, SAFE_INDEX)
        source: _SafetensorsSource | _PickledSource = _SafetensorsSource(sorted(set(files.values())), stack)
        _same_names(root / SAFE_INDEX, files, source.files)
    elif (root / SAFE_SINGLE).is_file():
        source = _SafetensorsSource([root / SAFE_SINGLE], stack)
    elif (root / BIN_INDEX).is_file():
        files = indexed_files(root, BIN_INDEX)
        source = _PickledSource(sorted(set(files.values())))
        _same_names(root / BIN_INDEX, files, source.files)
    elif (root / BIN_SINGLE).is_file():
        source = _PickledSource([root / BIN_SINGLE])
    else:
        raise CheckpointError(
            f"{root} has no weights",
            allowed=", ".join((SAFE_SINGLE, SAFE_INDEX, BIN_SINGLE, BIN_INDEX)),
            fix="fetch the weights too; a model with random weights is made by --hf-config instead of --load",
        )
    return source


def indexed_files(root: Path, index_name: str) -> dict[str, Path]:
    """Tensor name -> file, by an index; all of them are there.

    Raises:
        CheckpointError: the index cannot be read, or names files that are missing or elsewhere.
    """
    weight_map: Any = _read_json(root / index_name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{root / index_name} has no weight_map")
    files: dict[str, Path] = {}
    for name, shard in cast("dict[str, object]", weight_map).items():
        files[name] = file_beside(root / index_name, shard)
    missing = sorted({path.name for path in files.values() if not path.is_file()})
    if missing:
        raise CheckpointError(f"{root} lacks shards that {index_name} names", got=", ".join(missing))
    return files


def _same_names(index: Path, named: Mapping[str, Path], stored: Mapping[str, Path]) -> None:
    both = named.keys() & stored.keys()
    differs = {
        "named, but in no shard": named.keys() - both,
        "in a shard, but not named": stored.keys() - both,
        "in another shard than named": {name for name in both if named[name] != stored[name]},
    }
    problems = [
        f"{label}: {', '.join(sorted(names)[:5])} ({len(names)} in all)" for label, names in differs.items() if names
    ]
    if problems:
        raise CheckpointError(f"{index} does not fit its shards", got="; ".join(problems), fix="download them again")


# Writing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardPlan:
    """One file to write: its name and the tensors in it, in order."""

    file: str
    tensors: tuple[str, ...]


def plan_shards(
    tensors: Mapping[str, TensorInfo], writers: Mapping[str, int], max_bytes: int = DEFAULT_SHARD_BYTES
) -> list[tuple[int, ShardPlan]]:
    """Files for ``tensors`` (in this order), each written by one writer and no longer than ``max_bytes`` where it can.

    Every writer computes the same plan, so nobody has to rename or wait.

    Args:
        writers: the writer (pipeline stage) of each tensor.

    Returns:
        (writer, file) pairs, numbered in order; a single file is called ``model.safetensors``.
    """
    groups: list[tuple[int, list[str]]] = []
    filled: dict[int, int] = {}
    current: dict[int, list[str]] = {}
    for name, info in tensors.items():
        writer, size = writers[name], _nbytes(info)
        if writer not in current or filled[writer] + size > max_bytes:
            current[writer], filled[writer] = [], 0
            groups.append((writer, current[writer]))
        current[writer].append(name)
        filled[writer] += size
    if len(groups) == 1:
        return [(groups[0][0], ShardPlan(SAFE_SINGLE, tuple(groups[0][1])))]
    return [
        (writer, ShardPlan(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(names)))
        for number, (writer, names) in enumerate(groups, start=1)
    ]


def _nbytes(info: TensorInfo) -> int:
    return torch.Size(info.shape).numel() * info.dtype.itemsize


class ShardWriter:
    """Writes safetensors files tensor by tensor: nothing but the current tensor is in memory.

    ``write`` wants the tensors in the order of the plan, large ones in parts if need be.
    """

    def __init__(self, folder: Path, plans: Sequence[ShardPlan], tensors: Mapping[str, TensorInfo]) -> None:
        self._folder = folder
        self._tensors = tensors
        self._todo = [(plan, name) for plan in plans for name in plan.tensors]
        self._at = 0
        self._row = 0
        self._open: tuple[ShardPlan, BinaryIO] | None = None

    def write(self, name: str, tensor: Tensor, start: int = 0) -> None:
        """Appends ``tensor``, cast to the planned dtype: all of it, or its rows from ``start`` on."""
        plan, expected = self._todo[self._at]
        info = self._tensors[name]
        stop = start + tensor.shape[0] if tensor.dim() else 0
        whole = tuple(tensor.shape) == info.shape
        part = bool(info.shape) and tuple(tensor.shape[1:]) == info.shape[1:] and stop <= info.shape[0]
        if name != expected or start != self._row or not (whole or part):
            raise CheckpointError(
                f"tensor out of plan: {name} {tuple(tensor.shape)} from row {start}",
                allowed=f"{expected} {info.shape} from row {self._row}",
            )
        if self._open is None or self._open[0] is not plan:
            self.close()
            self._open = (plan, (self._folder / plan.file).open("wb"))
            self._open[1].write(self._header(plan))
        flat = tensor.detach().to(device="cpu", dtype=info.dtype).contiguous().reshape(-1)
        self._open[1].write(flat.view(torch.uint8).numpy().data)
        begin_sync(self._open[1])
        self._row = stop
        if whole or stop == info.shape[0]:
            self._at, self._row = self._at + 1, 0

    def close(self) -> None:
        """Brings the current file to disk."""
        if self._open is not None:
            sync_file(self._open[1])
            self._open[1].close()
            self._open = None

    def abandon(self) -> None:
        """Closes the current file, whatever the disk says to what it still has to take."""
        if self._open is not None:
            with suppress(OSError):
                self._open[1].close()

    def finish(self) -> None:
        """Closes, and proves that everything planned was written.

        Raises:
            CheckpointError: tensors are missing.
        """
        self.close()
        if self._at != len(self._todo):
            missing = [name for _, name in self._todo[self._at :]]
            raise CheckpointError("not every planned tensor was written", got=f"{len(missing)}, e.g. {missing[0]}")

    def _header(self, plan: ShardPlan) -> bytes:
        """Length, JSON padded to 8 bytes, then the data: https://github.com/huggingface/safetensors#format."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in plan.tensors:
            info = self._tensors[name]
            end = at + _nbytes(info)
            header[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def write_index(folder: Path, plans: Sequence[ShardPlan], tensors: Mapping[str, TensorInfo]) -> None:
    """``model.safetensors.index.json``, when there is more than one file."""
    if len(plans) > 1:
        weight_map = {name: plan.file for plan in plans for name in plan.tensors}
        total = sum(_nbytes(info) for info in tensors.values())
        parameters = sum(torch.Size(info.shape).numel() for info in tensors.values())
        index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
        write_json(folder / SAFE_INDEX, index)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """JSON as save_pretrained lays it out, on disk when this returns."""
    with path.open("wb") as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
        sync_file(file)


def copy_companions(source: Path, folder: Path, names: Sequence[str]) -> None:
    """Files and folders ``names`` of ``source``, those there are, as they are."""
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
        elif (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
        for path in _files_of(folder / name):
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (entry for entry in path.rglob("*") if entry.is_file())
    elif path.is_file():
        yield path


EXPORT_MARK = ".mindspeed_llm_export"
"""Stands in every folder that we wrote, so that a later export may replace it and nothing else."""


def staging_folder(out_dir: Path) -> Path:
    """Where an export is put together: beside its place, so that one rename makes it visible. Links are followed."""
    out_dir = out_dir.resolve()
    return out_dir.parent / f".{out_dir.name}.incomplete"


def check_destination(out_dir: Path, source: Path | None) -> None:
    """Refuses a place whose content an export would destroy.

    Raises:
        CheckpointError: it is the input folder or holds it, a file, or a folder of someone else.
    """
    if source is not None:
        out, given = out_dir.resolve(), source.resolve()
        if out == given or out in given.parents:
            raise CheckpointError("the export would overwrite its input", got=out_dir, fix="give another folder")
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise CheckpointError("the place to export to is a file", got=out_dir, fix="give a folder")
    if (out_dir / EXPORT_MARK).is_file():
        return
    # The hidden ones are what a crash left of an intermediate export.
    known = [*intermediate_exports(out_dir), *out_dir.glob(".iter_*")]
    if any(path not in known for path in out_dir.iterdir()):
        raise CheckpointError(
            "the folder to export to holds files that are not an earlier export of this suite",
            got=out_dir,
            fix="empty it, or give another folder",
        )


def intermediate_exports(out_dir: Path) -> list[Path]:
    """The folders ``iter_*`` that ``--save-hf-interval`` has written inside ``out_dir``."""
    return [path for path in sorted(out_dir.glob("iter_*")) if (path / EXPORT_MARK).is_file()]


def open_staging(out_dir: Path) -> Path:
    """A fresh staging folder; what a crashed export left in it is removed."""
    staging = staging_folder(out_dir)
    if staging.exists():
        logger.warning("removing what an interrupted export left: %s", staging)
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def publish(out_dir: Path) -> None:
    """Makes the staged export visible in one rename. An earlier export stays until then, intermediate ones for good."""
    out_dir, staging = out_dir.resolve(), staging_folder(out_dir)
    write_json(staging / EXPORT_MARK, {"format": 1})
    sync_path(staging)
    retired = out_dir.parent / f".{out_dir.name}.replaced"
    if retired.exists() and not out_dir.exists():
        # A crash between the two renames below: this is all there is of the earlier exports.
        retired.rename(out_dir)
    elif retired.exists():
        shutil.rmtree(retired)
    if out_dir.exists():
        out_dir.rename(retired)
        for kept in intermediate_exports(retired):
            kept.rename(staging / kept.name)
    staging.rename(out_dir)
    sync_path(out_dir.parent)
    if retired.exists():
        shutil.rmtree(retired)
