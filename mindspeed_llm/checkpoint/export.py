"""Weights of a live, sharded model out into a Hugging Face folder: the inverse of
:mod:`~mindspeed_llm.checkpoint.engine`. Peak memory stays near the largest tensor.
"""

# pyright: basic
# torch.distributed has no types, and a module's attributes are Tensor | Module.

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.engine import Problems, cut_over, group_rank, group_size, live_tensors
from mindspeed_llm.checkpoint.hf_io import TensorInfo
from mindspeed_llm.checkpoint.layout import global_shape, unshard
from mindspeed_llm.checkpoint.names import NameTable, WeightEntry, compile_names
from mindspeed_llm.checkpoint.stacked import join, stored_name, stored_tensors
from mindspeed_llm.checkpoint.transforms import part_rows, split
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import CheckpointError
from mindspeed_llm.models.family import ModelFamily, Replicated, Shard, Vocab, values_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups an export talks over. None stands for a group of one.

    Args:
        tp: ranks that share the tensors of one stage.
        pp: ranks of the same place in all stages.
        dp: replicas (data and context parallel); the first writes.
        experts: ranks that share the experts of one stage, and the parts of each, first experts first.
        etp: those of them that share the same experts.
        edp: replicas of the same experts.
    """

    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None
    edp: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Whether whole tensors of its stage come together on this rank."""
        return group_rank(self.tp) == 0 and group_rank(self.experts) == 0

    @property
    def in_first_replica(self) -> bool:
        """Whether this rank holds something of the first replica: of the experts, or of the rest."""
        return group_rank(self.dp) == 0 or group_rank(self.edp) == 0


@dataclass(frozen=True)
class _Held:
    """Where a weight is, and what each tensor-parallel rank has of it."""

    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def placement(table: NameTable, live: Mapping[str, Tensor], groups: ParallelGroups) -> dict[str, _Held]:
    """Which pipeline stage holds each megatron-core tensor. Collective over ``groups.experts`` and ``groups.pp``.

    Raises:
        ConversionError: a tensor of the table is on no stage or on two, or a stage holds one that is not in the table.
    """
    stage = group_rank(groups.pp)
    mine = {name: _Held(stage, tuple(tensor.shape), tensor.dtype) for name, tensor in live.items()}
    for part in _gathered(mine, groups.experts):
        mine |= part
    stages = _gathered(mine, groups.pp)
    found: dict[str, _Held] = {}
    problems = Problems()
    for held in stages:
        problems.add("on two pipeline stages", *(name for name in held if name in found))
        problems.add(
            "in the model, but not in the family's table", *(name for name in held if name not in table.entries)
        )
        found.update(held)
    missing = [name for name, entry in table.entries.items() if entry.exported and name not in found]
    problems.add("on no pipeline stage", *missing)
    problems.check("the model cannot be exported")
    return found


def _gathered(mine: dict[str, _Held], group: dist.ProcessGroup | None) -> list[dict[str, _Held]]:
    if group is None:
        return [mine]
    parts: list[Any] = [None] * group_size(group)
    dist.all_gather_object(parts, mine, group=group)
    return parts


def iter_hf_weights(
    chunks: Sequence[nn.Module], family: ModelFamily, cfg: RunConfig, *, groups: ParallelGroups, whole: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and whole tensors of a live sharded model, one after the other.

    Collective: every rank of ``groups.tp``, ``groups.pp`` and ``groups.experts`` must run it to its end. Vocabulary
    padding is cut off, a tied output layer is left out. A tensor may share memory with the model: copy it to keep it.

    Args:
        whole: the first rank (of these groups) yields every weight and the others nothing. Otherwise the first rank of
            each pipeline stage yields those of its stage, and nothing travels between stages.

    Raises:
        ConversionError: the stages together do not hold exactly the family's weights.
    """
    table = compile_names(family, values_of(cfg))
    return join(_planned_weights(chunks, table, cfg, groups, whole), table)


def _planned_weights(
    chunks: Sequence[nn.Module], table: NameTable, cfg: RunConfig, groups: ParallelGroups, whole: bool
) -> Iterator[tuple[str, Tensor]]:
    """The same by the names of the table, where each expert is by itself."""
    values = values_of(cfg)
    live = live_tensors(chunks)
    held = placement(table, live, groups)
    device = next(iter(live.values())).device
    stage, leads = group_rank(groups.pp), groups.leads
    for entry in table.entries.values():
        if not entry.exported:
            continue
        owner = held[entry.mcore]
        travels = whole and owner.stage != 0
        if owner.stage == stage:
            for name, tensor in _export_entry(entry, live, owner, values, groups):
                if travels and leads:
                    dist.send(tensor.contiguous(), group=groups.pp, group_dst=0)
                elif leads:
                    yield name, tensor
        elif travels and leads and stage == 0:
            for name, shape in _hf_shapes(entry, owner.shape, values, groups):
                tensor = torch.empty(shape, dtype=owner.dtype, device=device)
                dist.recv(tensor, group=groups.pp, group_src=owner.stage)
                yield name, tensor


def _export_entry(
    entry: WeightEntry, live: Mapping[str, Tensor], held: _Held, values: Mapping[str, Any], groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """What a weight becomes on disk, where its parts come together. Collective over the stage that holds it."""
    local = live[entry.mcore].detach() if entry.mcore in live else None
    if entry.expert is None:
        whole = _joined(entry.shard, local, groups.tp)
    else:
        device = next(iter(live.values())).device
        whole = _fetched(entry, _joined(entry.shard, local, groups.etp), held, device, values, groups)
    if whole is None:
        return
    if isinstance(entry.shard, Vocab):
        whole = whole[: values["vocab_size"]]
    for name, tensor in zip(entry.hf, split(entry.transform, whole, values), strict=True):
        yield name, tensor.t() if entry.transposed and tensor.dim() == 2 else tensor


def _joined(rule: Shard, local: Tensor | None, group: dist.ProcessGroup | None) -> Tensor | None:
    """The whole tensor on the first of the ranks that share it, None on the others and where there is nothing of it."""
    if local is None or group is None or group_size(group) == 1:
        return local
    if isinstance(rule, Replicated):
        return local if group_rank(group) == 0 else None
    # all_gather and not gather: Ascend's collectives do not have it everywhere.
    parts = [torch.empty_like(local) for _ in range(group_size(group))]
    dist.all_gather(parts, local.contiguous(), group=group)
    return unshard(rule, parts) if group_rank(group) == 0 else None


def _fetched(
    entry: WeightEntry,
    whole: Tensor | None,
    held: _Held,
    device: torch.device,
    values: Mapping[str, Any],
    groups: ParallelGroups,
) -> Tensor | None:
    """An expert's tensor on the first rank of ``groups.experts``, from the rank where it was joined."""
    parts = group_size(groups.etp)
    experts_of_a_rank = values["num_moe_experts"] * parts // group_size(groups.experts)
    source = (entry.expert or 0) // experts_of_a_rank * parts
    if source == 0:
        return whole
    if whole is not None:
        dist.send(whole.contiguous(), group=groups.experts, group_dst=0)
    elif group_rank(groups.experts) == 0:
        arrived = torch.empty(global_shape(entry.shard, held.shape, parts), dtype=held.dtype, device=device)
        dist.recv(arrived, group=groups.experts, group_src=source)
        return arrived
    return None


def _hf_shapes(
    entry: WeightEntry, local: Sequence[int], values: Mapping[str, Any], groups: ParallelGroups
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a weight becomes on disk, from the shape that each rank holds."""
    shape = global_shape(entry.shard, local, cut_over(entry, group_size(groups.tp), group_size(groups.etp)))
    if isinstance(entry.shard, Vocab):
        shape[0] = values["vocab_size"]
    rows = part_rows(entry.transform, shape[0], values)
    shapes = [(count, *shape[1:]) for count in rows]
    if entry.transposed:
        shapes = [shape[::-1] for shape in shapes]
    return list(zip(entry.hf, shapes, strict=True))


def check_export(
    family: ModelFamily,
    cfg: RunConfig,
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    source: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The config.json that :func:`save_hf` would write; call it before training to learn early what would be refused.

    Raises:
        CheckpointError: ``out_dir`` is the source, or holds something that is not an earlier export.
        ConversionError: a value of the run has no place in the family's config.json.
    """
    origin = Path(source) if source is not None else None
    hf_io.check_destination(Path(out_dir), origin)
    origin_config = hf_io.read_config(origin) if origin is not None else None
    return family.values_to_config(values_of(cfg), str(dtype).removeprefix("torch."), origin_config)


def save_hf(
    chunks: Sequence[nn.Module],
    family: ModelFamily,
    cfg: RunConfig,
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    groups: ParallelGroups,
    source: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = hf_io.DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads; it appears whole or not at all.

    Collective over all ranks. Each pipeline stage of the first replica writes its own files into a hidden folder beside
    ``out_dir``; the first rank renames it at the end. A previous export at the same place is replaced.

    Args:
        dtype: of the weights on disk, also written into config.json.
        source: the folder the run started from; its generation settings and token ids go along, and its tokenizer
            with the chat template unless ``tokenizer`` names the folder of another.

    Raises:
        CheckpointError: see :func:`check_export`; the stages do not see one file system, or a disk takes no more. On
            all ranks.
        ConversionError: the model is not what the family's table and config rules can express.
    """
    out = Path(out_dir)
    staging = hf_io.staging_folder(out)
    writes = groups.in_first_replica
    first = group_rank(groups.dp) == 0 and groups.leads and group_rank(groups.pp) == 0
    config: dict[str, Any] = {}
    _together(groups, out, lambda: config.update(check_export(family, cfg, out, dtype=dtype, source=source)))
    try:
        # One after the other: the first rank renames what a late one may still look at.
        _together(groups, out, lambda: hf_io.open_staging(out), here=first)
        _together(groups, out, lambda: _require_folder(staging), here=writes)
        _together(
            groups,
            out,
            lambda: _write_weights(chunks, family, cfg, staging, dtype, groups, max_shard_bytes),
            here=writes,
        )
        _together(groups, out, lambda: _complete(out, config, source, tokenizer or source), here=first)
    except CheckpointError:
        # It is of no use, and the disk may be full; but earlier exports may have moved there.
        if first and not hf_io.intermediate_exports(staging):
            shutil.rmtree(staging, ignore_errors=True)
        raise
    if first:
        logger.info("wrote %s weights of %s to %s", config["dtype"], family.name, out)


def _require_folder(staging: Path) -> None:
    if not staging.is_dir():
        raise CheckpointError(
            "a pipeline stage does not see the folder to export to", got=staging, fix="use a shared file system"
        )


def _complete(
    out: Path,
    config: Mapping[str, Any],
    source: str | os.PathLike[str] | None,
    words: str | os.PathLike[str] | None,
) -> None:
    """What stands beside the weights; then the export becomes visible."""
    staging = hf_io.staging_folder(out)
    hf_io.write_json(staging / hf_io.CONFIG, config)
    if source is not None:
        hf_io.copy_companions(Path(source), staging, [hf_io.GENERATION])
    if words is not None:
        hf_io.copy_companions(Path(words), staging, hf_io.TOKENIZER_FILES)
    hf_io.publish(out)


def _together(groups: ParallelGroups, out: Path, action: Callable[[], object], *, here: bool = True) -> None:
    """What goes wrong on one rank is an error on all, rather than a wait for the one that left. Collective.

    Args:
        groups: whose ranks come here.
        out: the folder that is being made.
        action: what this rank does.
        here: whether it does.

    Raises:
        CheckpointError: that of a rank that failed.
    """
    failure: CheckpointError | None = None
    try:
        if here:
            action()
    except CheckpointError as error:
        failure = error
    except OSError as error:
        where = "" if groups.dp is None else f"rank {dist.get_rank()} on {socket.gethostname()}: "
        failure = CheckpointError(
            f"the Hugging Face folder {out} cannot be written",
            got=f"{where}{error}",
            fix="the last checkpoint of --save exports with --train-iters 0 --save-hf",
        )
    # Passing each axis in turn reaches everyone.
    for group in (groups.tp, groups.pp, groups.dp):
        if group is not None:
            told: list[CheckpointError | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, failure, group=group)
            failure = next((error for error in told if error is not None), None)
    if failure is not None:
        raise failure


def _write_weights(
    chunks: Sequence[nn.Module],
    family: ModelFamily,
    cfg: RunConfig,
    staging: Path,
    dtype: torch.dtype,
    groups: ParallelGroups,
    max_shard_bytes: int,
) -> None:
    """This stage's files, and on the first rank the index of all.

    Raises:
        OSError: the disk does not take them. By then the other ranks have all that this one had to send.
    """
    values = values_of(cfg)
    table = compile_names(family, values)
    held = placement(table, live_tensors(chunks), groups)
    tensors: dict[str, TensorInfo] = {}
    writers: dict[str, int] = {}
    for entry in table.entries.values():
        if entry.exported:
            owner = held[entry.mcore]
            for name, shape in _hf_shapes(entry, owner.shape, values, groups):
                tensors[name], writers[stored_name(name)] = TensorInfo(shape, dtype), owner.stage
    stored = stored_tensors(tensors)
    plan = hf_io.plan_shards(stored, writers, max_shard_bytes)
    mine = [shard for writer, shard in plan if writer == group_rank(groups.pp)]
    writer = hf_io.ShardWriter(staging, mine, stored)
    failure: OSError | CheckpointError | None = None
    for name, tensor in iter_hf_weights(chunks, family, cfg, groups=groups, whole=False):
        try:
            if failure is None:
                writer.write(name, tensor)
        except (OSError, CheckpointError) as error:
            failure = error
    if failure is not None:
        writer.abandon()
        raise failure
    if groups.leads:
        writer.finish()
        if group_rank(groups.pp) == 0:
            hf_io.write_index(staging, [shard for _, shard in plan], stored)
