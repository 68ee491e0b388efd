"""What a checkpoint is, without reading its tensors."""

# pyright: basic, reportMissingTypeStubs=false
# What a save says about itself is plain dictionaries.

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.folders import TRACKER
from mindspeed_llm.checkpoint.survey import RNG, HfModel, Save, StoredTensor, is_root, open_checkpoint, tensor_files
from mindspeed_llm.checkpoint.verify import structure
from mindspeed_llm.config.resolve import ARCHITECTURE_FIELDS

SHARDING = "distrib_optim_sharding_type"
_LOADS = {
    "dp_reshardable": "loads at the same tensor and pipeline layout, at any data-parallel size",
    "fully_reshardable": "loads at any layout",
}


def summarize(folder: Path, step: int | None, *, listing: bool = False) -> dict[str, Any]:
    """Everything that is known of a checkpoint from names, shapes and counters; plain values for JSON.

    Args:
        folder: a folder of saves, one save, or a Hugging Face folder.
        step: which save; None for the one that a resume takes.
        listing: with every tensor.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be opened.
    """
    with ExitStack() as stack:
        opened = open_checkpoint(folder, step, stack)
        found = _of_save(opened) if isinstance(opened, Save) else _of_model(opened)
        tensors = list(opened.tensors.values())
        found["tensors"] = len(tensors)
        found["parameters"] = sum(tensor.numel for tensor in tensors if tensor.group == "weights")
        found["dtypes"] = {
            group: dict(Counter(_dtype(tensor) for tensor in tensors if tensor.group == group))
            for group in sorted({tensor.group for tensor in tensors}, reverse=True)
        }
        if listing:
            files = tensor_files(folder) if isinstance(opened, HfModel) else None
            found["listing"] = [_row(tensor, files) for tensor in tensors]
        return found


def list_saves(root: Path) -> dict[str, Any] | None:
    """All saves of a folder, what is unfinished there, and what the tracker says; None for another kind of folder."""
    if not is_root(root) or hf_io.is_hf_folder(root):
        return None
    folders = [path for path in sorted(root.glob("iter_*")) if path.is_dir()]
    whole = [path for path in folders if re.fullmatch(r"iter_\d{7,}(\.replaced)?", path.name)]
    saves = []
    for path in whole:
        problems = structure(path)
        saves.append({"name": path.name, "bytes": _size(path), "complete": not problems, "problems": problems})
    tracker = root / TRACKER
    return {
        "folder": str(root),
        "tracker": tracker.read_text(errors="replace").strip() if tracker.is_file() else None,
        "saves": saves,
        "drafts": [{"name": path.name, "bytes": _size(path)} for path in folders if path not in whole],
    }


def optimizer_form(common: dict[str, Any]) -> str | None:
    """``dp_reshardable``, ``fully_reshardable``, ``whole`` without the distributed optimizer, None without state."""
    if "optimizer" not in common:
        return None
    return common.get("content_metadata", {}).get(SHARDING) or "whole"


def _of_save(save: Save) -> dict[str, Any]:
    common = save.common()
    progress = common.get("progress", {})
    form = optimizer_form(common)
    stored = {name: value for part in common.get("config", {}).values() for name, value in part.items()}
    sizes = {"weights": 0, "optimizer": 0, "rng": 0}
    for tensor in save.tensors.values():
        sizes[tensor.group] += sum(piece.place.length for piece in tensor.pieces if piece.place)
    for name, place in save.objects.items():
        group = "rng" if name.startswith(RNG) else "optimizer" if name.startswith("optimizer.") else "weights"
        sizes[group] += place.length if place else 0
    sizes["common"] = sum(_size(save.folder / name) for name in ("common.pt", "metadata.json", ".metadata"))
    return {
        "kind": "save (torch_dist)",
        "folder": str(save.folder),
        "iteration": progress.get("iteration"),
        "consumed_samples": progress.get("consumed_samples"),
        "consumed_tokens": progress.get("consumed_tokens"),
        # Saves of earlier versions do not say how many data-parallel ranks there were.
        "layout": {**common.get("layout", {}), "data_parallel_size": common.get("data_parallel_size")},
        "optimizer": form and {"form": form, "loads": _LOADS.get(form, "loads at any layout")},
        "bytes": sizes,
        "architecture": {
            name: stored[name] for name in sorted(ARCHITECTURE_FIELDS) if stored.get(name) not in (None, False, ())
        },
    }


def _of_model(model: HfModel) -> dict[str, Any]:
    return {
        "kind": "Hugging Face model",
        "folder": str(model.folder),
        "bytes": {"weights": sum(tensor.nbytes for tensor in model.tensors.values())},
        "architecture": hf_io.read_config(model.folder),
    }


def _row(tensor: StoredTensor, files: dict[str, str] | None) -> dict[str, Any]:
    named = {files[tensor.name]} if files else {piece.place.file for piece in tensor.pieces if piece.place}
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": _dtype(tensor),
        "bytes": tensor.nbytes,
        "pieces": len(tensor.pieces),
        "files": sorted(named),
    }


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())
    return path.stat().st_size if path.is_file() else 0
