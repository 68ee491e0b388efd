"""Weights of a Hugging Face folder into a live, sharded model.

A load is planned first, from names and shapes alone: every tensor on either side is used exactly once, or the whole
thing is refused in one message. Only then are tensors read, and of each only the rows that this rank holds. Peak memory
stays near the largest tensor. The inverse is in :mod:`~mindspeed_llm.checkpoint.export`.
"""

# pyright: basic
# torch.distributed has no types, and a module's attributes are Tensor | Module.

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.hf_io import TensorInfo, TensorSource
from mindspeed_llm.checkpoint.layout import global_shape, local_columns, local_rows
from mindspeed_llm.checkpoint.names import NameTable, WeightEntry, compile_names
from mindspeed_llm.checkpoint.stacked import as_planned
from mindspeed_llm.checkpoint.transforms import part_rows, pieces, select
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import ModelFamily, Vocab, values_of

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(.*?\bdecoder\.layers\.)(\d+)((?:\..*)?)")
_LAYER_PREFIX = re.compile(r"(.*?\bdecoder\.layers\.\d+\.)")
_EXPERT = re.compile(r"(.*\.experts)(\.linear_fc[12]\.(?:weight|bias))(\d+)")
_SHOWN = 4


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's place in ``group``."""
    return 0 if group is None else dist.get_rank(group)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of processes in ``group``."""
    return 1 if group is None else dist.get_world_size(group)


# The live model -----------------------------------------------------------------------------------------------------


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside data-parallel and mixed-precision wrappers, which keep it as ``module``."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def global_name(model: nn.Module, name: str) -> str:
    """The name of a tensor or module of one chunk in the whole model, where layers and experts are counted from its
    start."""
    if (match := _EXPERT.fullmatch(name)) is not None:
        experts: Any = model.get_submodule(match[1])
        first = group_rank(experts.ep_group) * experts.num_local_experts
        return global_name(model, match[1]) + f"{match[2]}{first + int(match[3])}"
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer: Any = model.get_submodule(match[1] + match[2])
    return f"{match[1]}{int(layer.layer_number) - 1}{match[3]}"


def live_tensors(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank, by global name: layers counted over the whole model."""
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor) or name.endswith("_extra_state"):
                continue
            name = global_name(model, name)
            if name in found:
                raise ConversionError("two model chunks hold the same tensor", got=name)
            found[name] = tensor
    return found


# Planning -----------------------------------------------------------------------------------------------------------


class Problems:
    """Everything wrong with a conversion, shown in one table: what, how many, a few names."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, kind: str, *names: str) -> None:
        """Note that ``names`` are wrong in this way."""
        if names:
            self._found.setdefault(kind, []).extend(names)

    def check(self, what: str, fix: str | None = None) -> None:
        """Raises ConversionError if anything was noted."""
        if not self._found:
            return
        lines = []
        for kind, names in self._found.items():
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"  {len(names):6d}  {kind}: {', '.join(names[:_SHOWN])}{more}")
        raise ConversionError("\n".join([what, *lines]), fix=fix)


def check_heads(values: Mapping[str, Any], tp_size: int, flag: str = "--tensor-model-parallel-size") -> None:
    """Refuses head counts that tensor parallelism cannot cut, as megatron-core's attention does.

    Args:
        values: fields of the run configuration that describe the model.
        tp_size: tensor-parallel ranks.
        flag: that gave them.

    Raises:
        ConversionError: with heads, KV heads and TP.
    """
    heads = values["num_attention_heads"]
    groups = values["num_query_groups"] or heads
    if heads % tp_size or (groups % tp_size and tp_size % groups):
        raise ConversionError(
            "attention heads cannot be cut over the tensor-parallel ranks",
            got=f"{heads} heads, {groups} KV heads, {flag.removeprefix('--')} {tp_size}",
            allowed="heads a multiple of it, and KV heads a multiple or a divisor of it",
            fix=f"change {flag}",
        )


def plan_load(
    table: NameTable,
    live: Mapping[str, Sequence[int]],
    stored: Mapping[str, TensorInfo],
    values: Mapping[str, Any],
    tp_size: int,
    etp_size: int | None = None,
) -> list[WeightEntry]:
    """What this rank has to fill, after proving that the whole checkpoint and this rank's tensors fit one another.

    Args:
        live: shapes of this rank's tensors by global megatron-core name.
        stored: what the checkpoint holds.
        etp_size: ranks that share an expert; None: ``tp_size``.

    Raises:
        ConversionError: one table of everything that does not fit.
    """
    check_heads(values, tp_size)
    problems = Problems()
    expected = table.hf_names()
    known = set(expected)
    problems.add("missing in the checkpoint", *(name for name in expected if name not in stored))
    unmapped = [name for name in stored if name not in known and name not in table.tied and not table.is_dropped(name)]
    problems.add("in the checkpoint, but not in the model", *unmapped)
    problems.add("in the model, but made of nothing", *(name for name in live if name not in table.entries))
    held = {match[1] for name in live if (match := _LAYER_PREFIX.match(name))}
    experts = {None, *(table.entries[name].expert for name in live if name in table.entries)}
    lacking = [
        name
        for name, entry in table.entries.items()
        if _in_layers(name, held) and entry.expert in experts and name not in live
    ]
    problems.add("in the family's table, but not in the model", *lacking)
    used = [name for name in expected if name in stored]
    problems.add(
        "not plain floating point",
        *(f"{name} {stored[name].dtype}" for name in used if not _castable(stored[name].dtype)),
    )
    entries = [entry for name, entry in table.entries.items() if name in live]
    for entry in entries:
        if all(name in stored for name in entry.hf):
            problems.add(
                "other shape than the model's",
                *_shape_faults(entry, live[entry.mcore], stored, values, cut_over(entry, tp_size, etp_size)),
            )
    problems.check("the checkpoint does not fit the model", fix="check that config.json belongs to these weights")
    return entries


def cut_over(entry: WeightEntry, tp_size: int, etp_size: int | None) -> int:
    """Over how many ranks a tensor is cut."""
    return tp_size if entry.expert is None or etp_size is None else etp_size


def _in_layers(name: str, layers: set[str]) -> bool:
    match = _LAYER_PREFIX.match(name)
    return match is not None and match[1] in layers


def _castable(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _shape_faults(
    entry: WeightEntry,
    local: Sequence[int],
    stored: Mapping[str, TensorInfo],
    values: Mapping[str, Any],
    tp_size: int,
) -> list[str]:
    whole = global_shape(entry.shard, local, tp_size)
    if isinstance(entry.shard, Vocab):
        if whole[0] < values["vocab_size"]:
            return [f"{entry.mcore} has {whole[0]} rows for a vocabulary of {values['vocab_size']}"]
        whole[0] = values["vocab_size"]
    try:
        rows = part_rows(entry.transform, whole[0], values)
    except ConversionError as error:
        return [f"{entry.mcore}: {error.what}"]
    faults = []
    for name, count in zip(entry.hf, rows, strict=True):
        wanted = (count, *whole[1:])
        if stored[name].shape != wanted:
            faults.append(f"{name} {list(stored[name].shape)} (model: {list(wanted)})")
    return faults


# Loading ------------------------------------------------------------------------------------------------------------


def load_hf_weights(
    chunks: Sequence[nn.Module],
    family: ModelFamily,
    folder: str | os.PathLike[str],
    *,
    tp_rank: int,
    tp_size: int,
    cfg: RunConfig,
    etp: tuple[int, int] | None = None,
) -> None:
    """Fills a live model from a Hugging Face folder, in place and in the dtype of its parameters.

    Each rank reads by itself, only what it holds. Optimizers with fp32 copies must be made, or told to reload, after.

    Args:
        chunks: this rank's model chunks, wrapped or not; which layers and experts they hold is read from them.
        tp_rank: which part of a tensor is this rank's.
        tp_size: over how many ranks a tensor is cut.
        etp: the same two for tensors of experts; None: as the others.

    Raises:
        CheckpointError: the folder is missing, incomplete or broken.
        ConversionError: its tensors do not fit the model; nothing was written then.
    """
    values = values_of(cfg)
    table = compile_names(family, values)
    live = live_tensors(chunks)
    with ExitStack() as stack:
        source = as_planned(hf_io.open_tensors(folder, stack), table)
        shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
        etp = etp or (tp_rank, tp_size)
        entries = plan_load(table, shapes, source.tensors, values, tp_size, etp[1])
        check_ties(table, source)
        for entry in entries:
            rank, size = (tp_rank, tp_size) if entry.expert is None else etp
            fill(live[entry.mcore], entry, source, values, tp_rank=rank, tp_size=size)
    logger.info("loaded %d tensors of %s from %s", len(entries), family.name, folder)


@torch.no_grad()
def fill(
    target: Tensor,
    entry: WeightEntry,
    source: TensorSource,
    values: Mapping[str, Any],
    *,
    tp_rank: int,
    tp_size: int,
) -> None:
    """Copies this rank's part of one weight into ``target`` piece by piece; rows of vocabulary padding become zero."""
    rows = [source.tensors[name].shape[0] for name in entry.hf]
    total = sum(rows)
    if isinstance(entry.shard, Vocab):
        wanted = local_rows(entry.shard, target.shape[0] * tp_size, tp_rank, tp_size)
        wanted = [(min(start, total), min(stop, total)) for start, stop in wanted]
    else:
        wanted = local_rows(entry.shard, total, tp_rank, tp_size)
    shape = source.tensors[entry.hf[0]].shape
    columns = local_columns(entry.shard, shape[1], tp_rank, tp_size) if len(shape) > 1 else None
    at = 0
    for piece in select(pieces(entry.transform, rows, values), wanted):
        count = piece.stop - piece.start
        target.data[at : at + count].copy_(source.read(entry.hf[piece.part], (piece.start, piece.stop), columns))
        at += count
    target.data[at:].zero_()


def check_ties(table: NameTable, source: TensorSource) -> None:
    """A tied weight may stand on disk too, but only with the values of what it is tied to.

    Raises:
        ConversionError: config.json says tied and the file says otherwise.
    """
    for name, original in table.tied.items():
        if name in source.tensors and not torch.equal(source.read(name), source.read(original)):
            raise ConversionError(
                f"config.json ties {name} to {original}, but the checkpoint holds two different tensors",
                fix='set "tie_word_embeddings": false in config.json, or remove the tensor',
            )
