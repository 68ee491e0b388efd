"""The plan of a conversion: which checkpoint, of which model, becomes what.

The plan comes from names, shapes and configuration: before a tensor is read it is proved that each on either side is
used exactly once. ``convert.execution`` does what was planned.
"""

# pyright: basic
# Configurations on disk have no types.

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.convert.legacy_folders import find_tree
from mindspeed_llm.checkpoint.convert.legacy_reader import LegacySource, LegacyTree
from mindspeed_llm.checkpoint.convert.record import Record, described_model, origin_of, recorded_model, shortened
from mindspeed_llm.checkpoint.convert.shapes import planned_shapes
from mindspeed_llm.checkpoint.convert.streams import MegatronSource, Target
from mindspeed_llm.checkpoint.convert.target import check_target
from mindspeed_llm.checkpoint.convert.torch_dist import TorchDistSource
from mindspeed_llm.checkpoint.convert.views import HuggingFace, Megatron, Repadded
from mindspeed_llm.checkpoint.engine import Problems, check_ties, plan_load
from mindspeed_llm.checkpoint.hf_io import TensorInfo, TensorSource
from mindspeed_llm.checkpoint.names import NameTable, compile_names
from mindspeed_llm.checkpoint.stacked import as_planned, as_stored
from mindspeed_llm.checkpoint.survey import find_save
from mindspeed_llm.config.derive import padded_vocab_size
from mindspeed_llm.errors import CheckpointError, ConfigError
from mindspeed_llm.models.family import ModelFamily, Vocab

Kind = Literal["hf", "mg"]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What is to be done.

    Args:
        load, save: folders.
        load_kind, save_kind: Hugging Face or megatron-core.
        family: name of the model family; by default that of the configuration.
        hf_config: a Hugging Face folder with config.json and tokenizer for what is written.
        save_format: of a megatron-core checkpoint.
        target: layout of a megatron-core checkpoint; None where no flag gives one.
        num_layers: write only the first ones.
        transformer_impl: whose names the tensors of per-rank files have.
        vocab_multiple: the vocabulary is padded to a multiple of this times ``target.tp``.
        dtype: of the floating point weights written; as they are by default.
        step: which save of ``load``; the one that a resume takes by default.
        workers: threads that read ahead of the writer.
    """

    load: Path
    save: Path
    load_kind: Kind
    save_kind: Kind
    family: str | None = None
    hf_config: Path | None = None
    save_format: Literal["torch_dist", "legacy"] = "torch_dist"
    target: Target | None = None
    num_layers: int | None = None
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    vocab_multiple: int = 1
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    step: int | None = None
    workers: int = 2


@dataclass(frozen=True)
class Plan:
    """A conversion that is proved and not begun.

    Attributes:
        tensors: what will be written, in order.
        source: gives them, block by block.
        values: the model, as fields of the run configuration.
        record: what is kept beside a megatron-core checkpoint.
        notices: what the user should know.
    """

    settings: Settings
    family: ModelFamily
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    source: TensorSource
    record: Record
    notices: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors to be written."""
        return sum(torch.Size(info.shape).numel() * info.dtype.itemsize for info in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        counted: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            counted[info.dtype] += torch.Size(info.shape).numel()
        return counted.most_common(1)[0][0]


# Planning -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given:
    """What the input is: proved tensors of one side, and the model they are of."""

    family: ModelFamily
    values: Mapping[str, Any]
    tensors: TensorSource
    record: Record
    notices: tuple[str, ...]


def plan(settings: Settings, stack: ExitStack) -> Plan:
    """What a conversion will write, proved from names, shapes and configuration.

    Args:
        stack: files of the source stay open as long.

    Raises:
        SuiteError: whatever does not fit; nothing was written.
    """
    given = _read_hf(settings, stack) if settings.load_kind == "hf" else _read_megatron(settings)
    values, notices = dict(given.values), list(given.notices)
    if settings.save_kind == "mg":
        target = settings.target or Target()
        check_target(target, values)
        values["make_vocab_size_divisible_by"] = settings.vocab_multiple
        values["padded_vocab_size"] = padded_vocab_size(values["vocab_size"], settings.vocab_multiple, target.tp)
        if settings.target is not None and settings.save_format == "torch_dist":
            notices.append("torch_dist files have no layout: they load at any; --save-format legacy cuts them")
    source = _view(given, values, settings)
    dtype = DTYPES[settings.dtype] if settings.dtype else None
    tensors = {
        name: TensorInfo(info.shape, dtype if dtype and info.dtype.is_floating_point else info.dtype)
        for name, info in source.tensors.items()
    }
    return Plan(settings, given.family, values, tensors, source, given.record, tuple(notices))


def _view(given: _Given, values: Mapping[str, Any], settings: Settings) -> TensorSource:
    """The tensors as the other side has them."""
    table = compile_names(given.family, values)
    if settings.load_kind == "mg" and settings.save_kind == "mg":
        return Repadded(table, given.tensors, values)
    seen = given.tensors if settings.load_kind == "mg" else Megatron(table, as_planned(given.tensors, table), values)
    return seen if settings.save_kind == "mg" else as_stored(HuggingFace(table, seen, values), table)


def _read_hf(settings: Settings, stack: ExitStack) -> _Given:
    """A Hugging Face folder, proved against its config.json."""
    folder, notices = settings.load, list[str]()
    hf_config = hf_io.read_config(folder)
    family, values = described_model(hf_config, settings.family, folder)
    table = compile_names(family, values)
    stored = hf_io.open_tensors(folder, stack)
    planned = as_planned(stored, table)
    shapes = planned_shapes(table, values)
    plan_load(table, shapes, planned.tensors, values, 1)
    check_ties(table, planned)
    dropped = sorted(name for name in stored.tensors if table.is_dropped(name))
    if dropped:
        notices.append(f"{len(dropped)} tensors that nobody needs are left out, such as {dropped[0]}")
    layers, keep = values["num_layers"], settings.num_layers
    if keep is not None and keep != layers:
        hf_config = shortened(hf_config, family, layers, keep)
        family, values = described_model(hf_config, settings.family, folder)
        notices.append(f"only the first {keep} of {layers} layers are taken (--num-layers)")
    words = settings.hf_config or folder
    if not words.is_dir():
        raise CheckpointError("--hf-cfg-dir is not a folder", got=words)
    return _Given(
        family,
        values,
        stored,
        Record(str(folder.resolve()), family.name, hf_config, str(words.resolve())),
        tuple(notices),
    )


def _read_megatron(settings: Settings) -> _Given:
    """A megatron-core checkpoint, proved against the model that it records or that a config.json describes."""
    folder, opened = open_megatron(settings.load, settings.step)
    notices = ["weights alone are converted: no optimizer state, no counters"]
    if settings.save_kind == "hf" and settings.target is not None and opened.target is None:
        notices.append("torch_dist files have no layout: the flags of one have no effect")
    given = hf_io.read_config(settings.hf_config) if settings.hf_config is not None else None
    family, values = recorded_model(opened.values, given, settings.family, folder)
    _check_flags(settings, folder, opened.target, values)
    table = compile_names(family, values)
    source = LegacySource(opened, table) if isinstance(opened, LegacyTree) else opened
    _check_stored(folder, table, source, values)
    hf_config, words = origin_of(folder) or (None, None)
    if settings.hf_config is not None:
        hf_config, words = given, str(settings.hf_config.resolve())
    if settings.save_kind == "hf" and (words is None or not Path(words).is_dir()):
        where = f"{words} is not there any more" if words else "the checkpoint does not say where it was"
        notices.append(f"no tokenizer is written: {where}; --hf-cfg-dir names its folder")
        words = None
    return _Given(family, values, source, Record(str(folder.resolve()), family.name, hf_config, words), tuple(notices))


def open_megatron(folder: Path, step: int | None) -> tuple[Path, MegatronSource | LegacyTree]:
    """The save that is meant by a folder of saves or of one, and what it holds.

    Raises:
        CheckpointError: the folder holds no megatron-core checkpoint, or a damaged one.
        ConversionError: it is of a model that is not converted.
    """
    tree = find_tree(folder, step)
    if tree is not None:
        return tree, LegacyTree(tree)
    save = find_save(folder, step)
    if save is None:
        raise CheckpointError("the folder to load is a Hugging Face folder", got=folder, fix="--load-model-type hf")
    return save, TorchDistSource(save)


def _check_flags(settings: Settings, folder: Path, layout: Target | None, values: Mapping[str, Any]) -> None:
    given = settings.target
    if settings.save_kind == "hf" and given is not None and layout is not None:
        # What is at its default is the layout of what is written: one process.
        names = [field.name for field in fields(Target) if getattr(given, field.name) != field.default]
        differs = [name for name in names if getattr(given, name) != getattr(layout, name)]
        if differs:
            raise ConfigError(
                f"the layout of {folder} is not that of the flags",
                got=", ".join(f"{name} {getattr(given, name)}" for name in differs),
                allowed=", ".join(f"{name} {getattr(layout, name)}" for name in differs),
                fix="leave out the flags of a layout: it is read from the checkpoint",
            )
    if settings.num_layers not in (None, values["num_layers"]):
        raise ConfigError(
            f"--num-layers is not that of {folder}", got=settings.num_layers, allowed=values["num_layers"]
        )


def _check_stored(folder: Path, table: NameTable, source: MegatronSource, values: Mapping[str, Any]) -> None:
    """Every tensor is there, none is left over, and all have the shapes of the model."""
    problems = Problems()
    exported = {name: entry for name, entry in table.entries.items() if entry.exported}
    problems.add("missing in the checkpoint", *(name for name in exported if name not in source.tensors))
    unknown = (name for name in source.tensors if name not in table.entries)
    problems.add("in the checkpoint, but not in the model", *unknown)
    wanted = planned_shapes(table, {**values, "padded_vocab_size": values["vocab_size"]})
    for name, entry in exported.items():
        if name in source.tensors:
            stored = source.tensors[name].shape
            seen = stored
            if isinstance(entry.shard, Vocab) and stored[0] >= values["vocab_size"]:
                seen = (values["vocab_size"], *stored[1:])
            if seen != wanted[name]:
                problems.add("other shape than the model's", f"{name} {list(stored)} (model: {list(wanted[name])})")
    problems.check(f"{folder} does not fit the model", fix="--hf-cfg-dir with the folder of the model")
