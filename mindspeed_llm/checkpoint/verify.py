"""Whether a checkpoint is whole: every byte is read, nothing is changed."""

# pyright: basic, reportMissingTypeStubs=false
# JSON and safetensors' handles have no types.

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.convert.megatron_saves import is_release
from mindspeed_llm.checkpoint.folders import (
    TRACKER,
    complete_iterations,
    iteration_folder,
    named_iteration,
    require_save,
)
from mindspeed_llm.checkpoint.survey import (
    Box,
    HfModel,
    Place,
    Save,
    StoredTensor,
    find_save,
    intersection,
    is_root,
    is_save,
)
from mindspeed_llm.checkpoint.trusted import read_with_stand_ins
from mindspeed_llm.errors import CheckpointError


def verify(folder: Path, step: int | None) -> Iterator[str]:
    """Every problem of a checkpoint, one line each; none when it is whole.

    Args:
        folder: a folder of saves, one save, or a Hugging Face folder.
        step: which save; None for the newest.

    Raises:
        CheckpointError: the folder is no checkpoint at all.
    """
    one = is_save(folder) or is_release(folder) or hf_io.is_hf_folder(folder)
    if step is None and folder.is_dir() and is_root(folder) and not one:
        yield from _tracker(folder)
        complete = complete_iterations(folder)
        if not complete:
            yield f"{folder} holds no complete save"
            return
        save: Path | None = require_save(folder, complete[-1])
    else:
        save = find_save(folder, step)
    if save is None:
        yield from _model(folder)
        return
    problems = structure(save)
    yield from problems
    try:
        opened = Save(save)
    except CheckpointError:
        # structure() has said so.
        return
    yield from _contents(opened, _broken_files(opened))


def structure(folder: Path) -> list[str]:
    """What is wrong with a save, as far as names, sizes and counters show."""
    problems = list(_marks(folder))
    try:
        save = Save(folder)
    except CheckpointError as error:
        return [*problems, line(error)]
    try:
        save.common()
    except CheckpointError as error:
        problems.append(line(error))
    problems += [problem for _, problem in sorted(_broken_files(save).items())]
    problems += _unplaced(save)
    for stored in save.tensors.values():
        problems += _coverage_problems(stored)
    return problems


def line(error: CheckpointError) -> str:
    """An error on one line."""
    got = "" if error.got is None else f": {error.got}"
    return " ".join(f"{error.what}{got}".split())


# Our saves ----------------------------------------------------------------------------------------------------------


def _tracker(root: Path) -> Iterator[str]:
    tracker, complete = root / TRACKER, complete_iterations(root)
    if not tracker.is_file():
        yield f"{tracker} is missing"
        return
    text = tracker.read_text(errors="replace").strip()
    iteration = named_iteration(text)
    if iteration is None:
        yield f"{tracker} does not name an iteration: {text[:40]!r}"
    elif iteration not in complete:
        yield f"{tracker} names iteration {iteration}, of which there is no complete save"
    elif iteration < complete[-1]:
        newest = iteration_folder(root, complete[-1]).name
        yield f"{tracker} names iteration {iteration}, and there is a newer {newest}"


def _marks(folder: Path) -> Iterator[str]:
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{path} cannot be read: {type(error).__name__}: {error}"
        return
    if backend != "torch_dist":
        yield f"{path} says that this is no torch_dist checkpoint: {backend}"


def _places(save: Save) -> Iterator[tuple[str, Place]]:
    for stored in save.tensors.values():
        for piece in stored.pieces:
            if piece.place is not None:
                yield f"{stored.name} at {piece.box[0]}", piece.place
    for name, place in save.objects.items():
        if place is not None:
            yield name, place


def _broken_files(save: Save) -> dict[str, str]:
    """Files that are missing, too short, or in which two things share bytes, and what to say of each."""
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    # A piece that is listed twice is no clash of bytes; coverage() finds it.
    for name, place in dict.fromkeys(_places(save)):
        by_file.setdefault(place.file, []).append((place.start, place.start + place.length, name))
    found: dict[str, str] = {}
    for file, ranges in by_file.items():
        path, end = save.folder / file, max(stop for _, stop, _ in ranges)
        ranges.sort()
        if not path.is_file():
            found[file] = f"{file} is missing: {len(ranges)} pieces are in it, such as {ranges[0][2]}"
        elif path.stat().st_size < end:
            cut = [name for _, stop, name in ranges if stop > path.stat().st_size]
            found[file] = f"{file} has {path.stat().st_size} of {end} bytes: {len(cut)} pieces lack, such as {cut[0]}"
        elif ranges[0][0] < 0 or any(stop <= start for start, stop, _ in ranges):
            found[file] = f"{file}: .metadata names bytes that cannot be"
        else:
            shared = next((two[2] for one, two in pairwise(ranges) if two[0] < one[1]), None)
            if shared is not None:
                found[file] = f"{file}: .metadata puts {shared} where something else is"
    return found


def _unplaced(save: Save) -> Iterator[str]:
    """Pieces and objects of which ``.metadata`` does not say where they are."""
    for stored in save.tensors.values():
        lacking = [piece.box[0] for piece in stored.pieces if piece.place is None]
        if lacking:
            yield f"{stored.name}: .metadata does not say where {len(lacking)} pieces are, such as that at {lacking[0]}"
    yield from (f"{name}: .metadata does not say where it is" for name, place in save.objects.items() if place is None)


def _coverage_problems(stored: StoredTensor) -> Iterator[str]:
    whole = ((0,) * len(stored.shape), stored.shape)
    boxes = [piece.box for piece in stored.pieces]
    outside = [box for box in boxes if 0 not in box[1] and intersection(box, whole) != box]
    if outside:
        yield f"{stored.name} {stored.shape}: {len(outside)} pieces lie outside, such as {outside[0]}"
        return
    missing, double = coverage(boxes, stored.shape)
    if missing:
        yield f"{stored.name} {stored.shape}: {missing} elements are in no piece"
    if double:
        yield f"{stored.name} {stored.shape}: {double} elements are in more than one piece"


def coverage(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[int, int]:
    """How many elements of ``shape`` are in none of the boxes, and how many in more than one.

    The first dimension is cut wherever a box begins or ends; within each slab the question has a dimension less.
    """
    if not shape:
        return int(not boxes), int(len(boxes) > 1)
    edges = {0, shape[0]}
    for offsets, sizes in boxes:
        edges |= {offsets[0], offsets[0] + sizes[0]}
    cuts = sorted(edges)
    slabs: list[list[Box]] = [[] for _ in cuts[1:]]
    for offsets, sizes in boxes:
        inner = (offsets[1:], sizes[1:])
        for slab in slabs[bisect_left(cuts, offsets[0]) : bisect_left(cuts, offsets[0] + sizes[0])]:
            slab.append(inner)
    missing = double = 0
    for (start, stop), slab in zip(pairwise(cuts), slabs, strict=True):
        inner_missing, inner_double = coverage(slab, shape[1:])
        missing += (stop - start) * inner_missing
        double += (stop - start) * inner_double
    return missing, double


def _contents(save: Save, broken: dict[str, str]) -> Iterator[str]:
    """What reading shows, but for files of which it is already known that they are broken."""
    for stored in save.tensors.values():
        bad = [0, 0]
        for piece in stored.pieces:
            if piece.place is None or piece.place.file in broken:
                continue
            try:
                tensor = save.read_piece(stored, piece)
            except CheckpointError as error:
                yield line(error)
                continue
            if not stored.is_padding(piece):
                bad = [total + more for total, more in zip(bad, _not_finite(tensor), strict=True)]
        yield from _say_not_finite(stored.name, bad)
    for name, place in save.objects.items():
        if place is not None and place.file not in broken:
            try:
                what = f"{place.file}: {name}"
                read_with_stand_ins(save.read_bytes(place, what), what)
            except CheckpointError as error:
                yield line(error)


def _not_finite(tensor: Tensor) -> tuple[int, int]:
    """NaN, and positive or negative infinities."""
    if not tensor.is_floating_point():
        return 0, 0
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    return int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())


def _say_not_finite(name: str, bad: Sequence[int]) -> Iterator[str]:
    if any(bad):
        yield f"{name} holds {bad[0]} NaN and {bad[1]} infinite values"


# Hugging Face folders -----------------------------------------------------------------------------------------------


def _model(folder: Path) -> Iterator[str]:
    index = folder / hf_io.SAFE_INDEX
    if index.is_file():
        problems = list(_index(folder, index))
        if problems:
            yield from problems
            return
    try:
        hf_io.read_config(folder)
        with ExitStack() as stack:
            model = HfModel(folder, stack)
            yield from _total(index, sum(stored.nbytes for stored in model.tensors.values()))
            for name, stored in model.tensors.items():
                yield from _say_not_finite(name, _not_finite(model.read(name, stored.pieces[0].box)))
    except CheckpointError as error:
        yield line(error)


def _index(folder: Path, index: Path) -> Iterator[str]:
    """Each shard by itself, and whether the index says of each what is in it."""
    from safetensors import SafetensorError, safe_open

    try:
        named = {name: path.name for name, path in hf_io.indexed_files(folder, index.name).items()}
    except CheckpointError as error:
        yield line(error)
        return
    for file in sorted(set(named.values())):
        expected = {name for name, place in named.items() if place == file}
        try:
            with safe_open(folder / file, framework="pt") as handle:
                stored = set(handle.keys())
        except (SafetensorError, OSError) as error:
            yield f"{file} cannot be read: {error}"
            continue
        yield from (f"{index.name} says that {name} is in {file}, and it is not" for name in sorted(expected - stored))
        yield from (f"{file} holds {name}, which {index.name} does not say" for name in sorted(stored - expected))


def _total(index: Path, size: int) -> Iterator[str]:
    if index.is_file():
        stated = (json.loads(index.read_text()).get("metadata") or {}).get("total_size")
        if stated is not None and int(stated) != size:
            yield f"{index.name} says {stated} bytes in all, and the tensors have {size}"
