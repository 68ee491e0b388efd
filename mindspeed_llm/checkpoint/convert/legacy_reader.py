"""Whole tensors out of a per-rank tree, whose layout is found and not told.

Layers are numbered by counting: the chunks of a model follow each other, first chunk of each stage, second of each, and
so do the layers in them, wherever stages are uneven or places are empty. What the files say of themselves is compared
with that. Tensors stay on the disk until they are read.
"""

# pyright: basic
# What a pickle holds has no type.

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_llm.checkpoint.convert.legacy_args import noop_layers, recorded_values
from mindspeed_llm.checkpoint.convert.legacy_folders import rank_files
from mindspeed_llm.checkpoint.convert.legacy_layout import (
    EMBEDDING,
    EXPERT,
    FINAL_NORM,
    LAYER,
    OUTPUT,
    Place,
    layer_places,
    rank_folder,
    shards_of,
)
from mindspeed_llm.checkpoint.convert.legacy_spelling import grouped_name, local_name, require_megatron_core
from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.checkpoint.hf_io import TensorInfo
from mindspeed_llm.checkpoint.layout import global_shape, local_columns, local_rows
from mindspeed_llm.checkpoint.names import NameTable
from mindspeed_llm.checkpoint.trusted import read_legacy
from mindspeed_llm.errors import CheckpointError, ConversionError
from mindspeed_llm.models.family import Replicated, Row

_MODEL = re.compile(r"model(\d*)")
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AGAIN = "take the checkpoint from its source again; all of its files must be of one save"

Weights = Mapping[str, Tensor]
Rows = tuple[int, int]


class Rank(NamedTuple):
    """Whose file it is: tensor-parallel rank, pipeline stage, expert-parallel rank."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class _File:
    path: Path
    args: object
    iteration: object
    config: object
    chunks: tuple[Weights, ...]


class LegacyTree:
    """What a per-rank tree holds, before anything says how its tensors are cut.

    Args:
        folder: the one that the ``mp_rank_*`` folders are in; see :func:`~.legacy_folders.find_tree`.

    Attributes:
        target: the layout; sizes of chunks only where a :class:`Target` can say them.
        values: fields of the run configuration that the files record, and ``num_layers``, which is counted.
        iteration: of the save, as the files have it.
        parts: by global name, for each expert-parallel rank that holds it (all have copies of what is no expert's), the
            tensors of all tensor-parallel ranks.

    Raises:
        CheckpointError: ranks or layers are missing, or are of different saves; a file is damaged.
        ConversionError: not a megatron-core model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = _read_files(folder)
        sizes = _sizes(folder, files)
        first = files[min(files)]
        self.iteration, self.parts = first.iteration, dict[str, list[list[Tensor]]]()
        places: list[Place] = []
        order, mirrored = _chunk_order(files, sizes)
        for stage, chunk in order:
            places += self._add(files, sizes, stage, chunk, len(places))
        self.target = _target(folder, first.args, sizes, order, places, mirrored)
        self.values: dict[str, Any] = {**_values(first), "num_layers": len(places)}

    def _add(self, files: Mapping[Rank, _File], sizes: Rank, stage: int, chunk: int, before: int) -> list[Place]:
        """Take up one chunk, before which there are ``before`` layers."""
        held = [[files[Rank(tp, stage, ep)] for tp in range(sizes.tp)] for ep in range(sizes.ep)]
        keys = held[0][0].chunks[chunk].keys()
        for file in (file for copies in held for file in copies):
            if file.chunks[chunk].keys() != keys:
                differs = sorted(file.chunks[chunk].keys() ^ keys)
                raise CheckpointError(
                    f"{file.path} and {held[0][0].path} hold different tensors", got=", ".join(differs[:4]), fix=_AGAIN
                )
        slots = sorted({int(match[1]) for key in keys if (match := LAYER.fullmatch(key))})
        numbers = {slot: before + index for index, slot in enumerate(slots)}
        for key in keys:
            match = LAYER.fullmatch(key)
            name = key if match is None else f"decoder.layers.{numbers[int(match[1])]}.{match[2]}"
            for number, copies in _named(name, held, keys):
                if number in self.parts:
                    raise ConversionError(f"{number} is on two stages", got=held[0][0].path)
                self.parts[number] = [[file.chunks[chunk][key] for file in ranks] for ranks in copies]
        return [Place(stage, chunk, slot) for slot in slots]


def _named(name: str, held: Sequence[Sequence[_File]], keys: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Global names of a tensor, and the ranks that hold each: copies of one, or another expert on each."""
    match = EXPERT.fullmatch(name)
    if match is None:
        yield name, held
        return
    experts = 1 + max(int(found[2]) for key in keys if (found := EXPERT.fullmatch(key)))
    for rank, ranks in enumerate(held):
        yield f"{match[1]}{rank * experts + int(match[2])}", [ranks]


def _values(file: _File) -> dict[str, Any]:
    """What a conversion of ours kept beside the weights, as in ``torch_dist`` saves; else what ``args`` say."""
    if isinstance(file.config, dict) and all(isinstance(section, dict) for section in file.config.values()):
        return {name: value for section in file.config.values() for name, value in section.items()}
    return recorded_values(file.args)


# Finding the layout -------------------------------------------------------------------------------------------------


def _read_files(folder: Path) -> dict[Rank, _File]:
    paths = rank_files(folder)
    lengths = {len(numbers) for numbers in paths}
    missing = [str(path.parent.name) for path in paths.values() if not path.is_file()]
    if len(lengths) != 1 or missing:
        what = f"{folder} has ranks without their file" if missing else f"{folder} holds ranks of several layouts"
        raise CheckpointError(what, got=", ".join(missing or (path.parent.name for path in paths.values())), fix=_AGAIN)
    files = {numbers: _read_file(path) for numbers, path in paths.items()}
    if lengths == {2} and not _has_stages([*files.values()]):
        return {Rank(tp, 0, ep): file for (tp, ep), file in files.items()}
    return {Rank(*numbers, *(0,) * (3 - len(numbers))): file for numbers, file in files.items()}


def _has_stages(files: Sequence[_File]) -> bool:
    """Whether the second number is that of a stage: only a whole model has both ends."""
    stages, experts = (getattr(files[0].args, name, None) or 1 for name in _SIZES[1:])
    if (stages > 1) != (experts > 1):
        return stages > 1
    return any(name not in chunks for name in (EMBEDDING, FINAL_NORM) for chunks in ({*_names(f)} for f in files))


def _names(file: _File) -> Iterator[str]:
    for chunk in file.chunks:
        yield from chunk


def _read_file(path: Path) -> _File:
    content = read_legacy(path)
    models = {int(match[1] or 0): key for key in content if (match := _MODEL.fullmatch(str(key)))}
    if not models or sorted(models) != list(range(len(models))):
        raise CheckpointError(
            f"{path} holds no model",
            got=", ".join(sorted(map(str, content))[:8]),
            allowed="model, or model0, model1 ...",
        )
    chunks = tuple(_weights(path, content[models[number]]) for number in sorted(models))
    args = content.get("args") or SimpleNamespace()
    return _File(path, args, content.get("iteration"), content.get("config"), chunks)


def _weights(path: Path, model: object) -> Weights:
    """The weights of one chunk, as megatron-core's own layers call them."""
    if not isinstance(model, dict):
        raise CheckpointError(f"{path}: the model is not a mapping", got=type(model).__name__)
    require_megatron_core(path, [str(key) for key in model])
    named = {grouped_name(name): value for key, value in model.items() if (name := local_name(str(key))) is not None}
    strange = [name for name, value in named.items() if not isinstance(value, Tensor)]
    if strange:
        raise ConversionError(f"{path}: not a tensor", got=", ".join(strange[:4]))
    return named


def _sizes(folder: Path, files: Mapping[Rank, _File]) -> Rank:
    """The sizes of the layout, for which every rank is there and says the same.

    Raises:
        CheckpointError: it is not so.
    """
    found = Rank(*(max(numbers) + 1 for numbers in zip(*files, strict=True)))
    told = {file.path: _told(file) for file in files.values()}
    first = told[files[min(files)].path]
    for path, said in told.items():
        if said != first:
            raise CheckpointError(
                f"{path} is not of the same save as the other ranks", got=said, allowed=first, fix=_AGAIN
            )
    recorded = Rank(*(size or number for size, number in zip(first[:3], found, strict=True)))
    layout = Target(max(recorded.tp, found.tp), max(recorded.pp, found.pp), max(recorded.ep, found.ep))
    every = {Rank(*rank) for rank in product(range(layout.tp), range(layout.pp), range(layout.ep))}
    missing = [rank_folder(layout, *rank) for rank in sorted(every - files.keys())]
    if missing or recorded != found:
        more = f", and {len(missing) - 6} more" if len(missing) > 6 else ""
        raise CheckpointError(
            f"{folder} does not hold exactly the ranks of its layout",
            got=f"missing: {', '.join(missing[:6])}{more}" if missing else f"{len(files)} ranks",
            allowed=f"TP {recorded.tp} x PP {recorded.pp} x EP {recorded.ep}",
            fix=_AGAIN,
        )
    chunks = {len(file.chunks) for file in files.values()}
    if len(chunks) > 1:
        raise CheckpointError(f"{folder}: ranks hold different numbers of model chunks", got=sorted(chunks), fix=_AGAIN)
    return found


def _told(file: _File) -> tuple[Any, ...]:
    """What all ranks of one save say alike."""
    return (*(getattr(file.args, name, None) for name in (*_SIZES, "num_layers")), f"iteration {file.iteration}")


def _chunk_order(files: Mapping[Rank, _File], sizes: Rank) -> tuple[list[tuple[int, int]], bool]:
    """Stage and number of each chunk in the order of the model, and whether every second row of chunks runs backwards
    (MindSpeed-LLM's ``dualpipev``): then the model ends on the first stage."""
    chunks = len(files[min(files)].chunks)
    mirrored = sizes.pp > 1 and FINAL_NORM in _names(files[min(files)])
    order = [
        (sizes.pp - 1 - stage if mirrored and chunk % 2 else stage, chunk)
        for chunk in range(chunks)
        for stage in range(sizes.pp)
    ]
    return order, mirrored


def _target(
    folder: Path, args: object, sizes: Rank, order: Sequence[tuple[int, int]], places: Sequence[Place], mirrored: bool
) -> Target:
    """The layout with the sizes of chunks.

    Raises:
        CheckpointError: layers are not where the files say, or some are missing.
    """
    noop, recorded = noop_layers(args), getattr(args, "num_layers", None)
    counts = [sum((place.stage, place.chunk) == chunk for place in places) for chunk in order]
    shown = f"{len(places)} layers on {len(order)} chunks: {', '.join(map(str, counts))}"
    if recorded is not None and recorded != len(places) + len(noop):
        raise CheckpointError(
            f"{folder} does not hold the layers that it says",
            got=shown,
            allowed=f"args.num_layers {recorded}" + (f", {len(noop)} of them empty" if noop else ""),
            fix=_AGAIN,
        )
    several = len(order) > sizes.pp
    if noop or len(set(counts)) == 1:
        size = (len(places) + len(noop)) // len(order)
        target = Target(*sizes, layers_per_virtual_stage=size if several else None, noop_layers=noop)
    else:
        target = Target(*sizes, layer_list=None if several else tuple(counts))
    if noop and not mirrored:
        wanted = set(layer_places(target, len(places)))
    else:
        wanted = {Place(*chunk, slot) for chunk, count in zip(order, counts, strict=True) for slot in range(count)}
    if not mirrored and wanted != set(places):
        lacking = sorted(wanted - set(places))
        raise CheckpointError(
            f"{folder} lacks layers, or has them where they do not belong",
            got=shown,
            allowed="; ".join(f"stage {p.stage}, chunk {p.chunk}: decoder.layers.{p.slot}" for p in lacking[:4]),
            fix=_AGAIN,
        )
    return target


# Tensors ------------------------------------------------------------------------------------------------------------


class LegacySource:
    """Whole tensors of a tree; ranks that should hold the same are compared as they are read.

    Args:
        tree: the files.
        table: the weights of the model, which says how they are cut. Of a tied output layer the last stage may hold a
            copy, which must be equal.

    Raises:
        ConversionError: tensors that are not in ``table``, or parts that are not alike.
    """

    def __init__(self, tree: LegacyTree, table: NameTable) -> None:
        shards = shards_of(table)
        self.target: Target | None = tree.target
        self.values: Mapping[str, Any] = tree.values
        self.tensors: dict[str, TensorInfo] = {}
        self._folder, self._shards = tree.folder, shards
        self._copies = dict(tree.parts)
        self._tied = OUTPUT in self._copies and OUTPUT not in shards
        problems: list[str] = []
        if self._tied and EMBEDDING in self._copies:
            self._copies[EMBEDDING] = [*self._copies[EMBEDDING], *self._copies.pop(OUTPUT)]
        for name, copies in self._copies.items():
            infos = {TensorInfo(tuple(part.shape), part.dtype) for parts in copies for part in parts}
            if name not in shards:
                problems.append(f"{name}: not a tensor of this model")
            elif len(infos) > 1:
                problems.append(f"{name}: on different ranks {', '.join(f'{list(i.shape)} {i.dtype}' for i in infos)}")
            else:
                (info,) = infos
                shape = global_shape(shards[name], info.shape, tree.target.tp)
                self.tensors[name] = TensorInfo(tuple(shape), info.dtype)
        if problems:
            more = [f"and {len(problems) - 6} more"] if len(problems) > 6 else []
            raise ConversionError("\n  ".join([f"{tree.folder} does not hold this model", *problems[:6], *more]))

    def read(self, name: str, rows: Rows | None = None, columns: Rows | None = None) -> Tensor:
        """See :class:`~mindspeed_llm.checkpoint.hf_io.TensorSource`. What one rank holds is not copied.

        Raises:
            CheckpointError: ranks that hold the same tensor hold different values.
        """
        rule, shape = self._shards[name], self.tensors[name].shape
        copies = self._copies[name]
        if isinstance(rule, Replicated):
            found = [_cut(part, rows, columns) for parts in copies for part in parts]
        elif isinstance(rule, Row):
            held = [[local_columns(rule, shape[1], rank, len(copies[0])) or (0, 0)] for rank in range(len(copies[0]))]
            blocks = _select(held, columns or (0, shape[1]))
            found = [_join([_cut(parts[rank], rows, part) for rank, part in blocks], 1) for parts in copies]
        else:
            held = [local_rows(rule, shape[0], rank, len(copies[0])) for rank in range(len(copies[0]))]
            blocks = _select(held, rows or (0, shape[0]))
            found = [_join([_cut(parts[rank], part, columns) for rank, part in blocks], 0) for parts in copies]
        if not all(_same(found[0], other) for other in found[1:]):
            tied = name == EMBEDDING and self._tied
            raise CheckpointError(
                f"{self._folder}: ranks hold different copies of {name}" + (" (output_layer.weight is tied)" * tied),
                fix="a model with an output layer of its own needs a configuration that says so" if tied else _AGAIN,
            )
        return found[0]


def _select(held: Sequence[Sequence[Rows]], wanted: Rows) -> list[tuple[int, Rows]]:
    """Which rank has which part of the range ``wanted``, in order, as a range of what that rank holds.

    Args:
        held: for each rank the ranges of the whole that it has, one after the other.
    """
    found: list[tuple[int, int, Rows]] = []
    for rank, ranges in enumerate(held):
        at = 0
        for start, stop in ranges:
            low, high = max(start, wanted[0]), min(stop, wanted[1])
            if low < high:
                found.append((low, rank, (at + low - start, at + high - start)))
            at += stop - start
    return [(rank, part) for _, rank, part in sorted(found)] or [(0, (0, 0))]


def _cut(tensor: Tensor, rows: Rows | None, columns: Rows | None) -> Tensor:
    if rows is not None:
        tensor = tensor[rows[0] : rows[1]]
    return tensor if columns is None or tensor.dim() < 2 else tensor[:, columns[0] : columns[1]]


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit."""
    bits = _BITS[left.dtype.itemsize]
    return torch.equal(left.view(bits), right.view(bits))
