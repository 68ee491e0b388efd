"""Weights between Hugging Face folders and a live, sharded model.

A load is planned first, from names and shapes alone: every tensor on either side is used exactly once, or the whole
thing is refused in one message. Only then are tensors read, and of each only the rows that this rank holds. An export
is the inverse. Peak memory stays near the largest tensor.
"""

# pyright: basic
# torch.distributed has no types, and a module's attributes are Tensor | Module.

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.hf_io import TensorInfo, TensorSource
from mindspeed_llm.checkpoint.layout import global_shape, local_columns, local_rows, unshard
from mindspeed_llm.checkpoint.names import NameTable, WeightEntry, compile_names
from mindspeed_llm.checkpoint.transforms import part_rows, pieces, select, split
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import CheckpointError, ConversionError
from mindspeed_llm.models.family import ModelFamily, Replicated, Vocab, values_of

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(.*?\bdecoder\.layers\.)(\d+)((?:\..*)?)")
_LAYER_PREFIX = re.compile(r"(.*?\bdecoder\.layers\.\d+\.)")
_SHOWN = 4


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups an export talks over. None stands for a group of one.

    Args:
        tp: ranks that share the tensors of one stage.
        pp: ranks of the same place in all stages.
        dp: replicas (data and context parallel); the first writes.
    """

    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None


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
    """The name of a tensor or module of one chunk in the whole model, where layers are counted from its start."""
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
) -> list[WeightEntry]:
    """What this rank has to fill, after proving that the whole checkpoint and this rank's tensors fit one another.

    Args:
        live: shapes of this rank's tensors by global megatron-core name.
        stored: what the checkpoint holds.

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
    lacking = [name for name in table.entries if _in_layers(name, held) and name not in live]
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
                "other shape than the model's", *_shape_faults(entry, live[entry.mcore], stored, values, tp_size)
            )
    problems.check("the checkpoint does not fit the model", fix="check that config.json belongs to these weights")
    return entries


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
) -> None:
    """Fills a live model from a Hugging Face folder, in place and in the dtype of its parameters.

    Each rank reads by itself, only what it holds. Optimizers with fp32 copies must be made, or told to reload, after.

    Args:
        chunks: this rank's model chunks, wrapped or not; which layers they hold is read from them.

    Raises:
        CheckpointError: the folder is missing, incomplete or broken.
        ConversionError: its tensors do not fit the model; nothing was written then.
    """
    values = values_of(cfg)
    table = compile_names(family, values)
    live = live_tensors(chunks)
    with ExitStack() as stack:
        source = hf_io.Turned(hf_io.open_tensors(folder, stack), table.turned())
        shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
        entries = plan_load(table, shapes, source.tensors, values, tp_size)
        check_ties(table, source)
        for entry in entries:
            fill(live[entry.mcore], entry, source, values, tp_rank=tp_rank, tp_size=tp_size)
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


# Export -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """Where a weight is, and what each tensor-parallel rank has of it."""

    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def placement(table: NameTable, live: Mapping[str, Tensor], pp: dist.ProcessGroup | None) -> dict[str, _Held]:
    """Which pipeline stage holds each megatron-core tensor. Collective over ``pp``.

    Raises:
        ConversionError: a tensor of the table is on no stage or on two, or a stage holds one that is not in the table.
    """
    mine = {name: _Held(group_rank(pp), tuple(tensor.shape), tensor.dtype) for name, tensor in live.items()}
    stages: list[Any] = [mine]
    if pp is not None:
        stages = [None] * group_size(pp)
        dist.all_gather_object(stages, mine, group=pp)
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


def iter_hf_weights(
    chunks: Sequence[nn.Module], family: ModelFamily, cfg: RunConfig, *, groups: ParallelGroups, whole: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and whole tensors of a live sharded model, one after the other.

    Collective: every rank of ``groups.tp`` and ``groups.pp`` must run it to its end. Vocabulary padding is cut off, a
    tied output layer is left out. A tensor may share memory with the model: copy it to keep it.

    Args:
        whole: the first rank (of both groups) yields every weight and the others nothing. Otherwise the first rank of
            each pipeline stage yields those of its stage, and nothing travels between stages.

    Raises:
        ConversionError: the stages together do not hold exactly the family's weights.
    """
    values = values_of(cfg)
    table = compile_names(family, values)
    live = live_tensors(chunks)
    held = placement(table, live, groups.pp)
    device = next(iter(live.values())).device
    stage, leads = group_rank(groups.pp), group_rank(groups.tp) == 0
    for entry in table.entries.values():
        if not entry.exported:
            continue
        owner = held[entry.mcore]
        travels = whole and owner.stage != 0
        if owner.stage == stage:
            for name, tensor in _export_entry(entry, live[entry.mcore].detach(), values, groups.tp):
                if travels and leads:
                    dist.send(tensor.contiguous(), group=groups.pp, group_dst=0)
                elif leads:
                    yield name, tensor
        elif travels and leads and stage == 0:
            for name, shape in _hf_shapes(entry, owner.shape, values, group_size(groups.tp)):
                tensor = torch.empty(shape, dtype=owner.dtype, device=device)
                dist.recv(tensor, group=groups.pp, group_src=owner.stage)
                yield name, tensor


def _export_entry(
    entry: WeightEntry, local: Tensor, values: Mapping[str, Any], tp: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    whole = local
    if tp is not None and group_size(tp) > 1 and not isinstance(entry.shard, Replicated):
        # all_gather and not gather: Ascend's collectives do not have it everywhere.
        parts = [torch.empty_like(local) for _ in range(group_size(tp))]
        dist.all_gather(parts, local.contiguous(), group=tp)
        if group_rank(tp) != 0:
            return
        whole = unshard(entry.shard, parts)
    if isinstance(entry.shard, Vocab):
        whole = whole[: values["vocab_size"]]
    for name, tensor in zip(entry.hf, split(entry.transform, whole, values), strict=True):
        yield name, tensor.t() if entry.transposed and tensor.dim() == 2 else tensor


def _hf_shapes(
    entry: WeightEntry, local: Sequence[int], values: Mapping[str, Any], tp_size: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a weight becomes on disk, from the shape that each rank holds."""
    shape = global_shape(entry.shard, local, tp_size)
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
    writes = group_rank(groups.dp) == 0
    first = writes and group_rank(groups.tp) == 0 and group_rank(groups.pp) == 0
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
    held = placement(table, live_tensors(chunks), groups.pp)
    tensors: dict[str, TensorInfo] = {}
    writers: dict[str, int] = {}
    for entry in table.entries.values():
        if entry.exported:
            owner = held[entry.mcore]
            for name, shape in _hf_shapes(entry, owner.shape, values, group_size(groups.tp)):
                tensors[name], writers[name] = TensorInfo(shape, dtype), owner.stage
    plan = hf_io.plan_shards(tensors, writers, max_shard_bytes)
    mine = [shard for writer, shard in plan if writer == group_rank(groups.pp)]
    writer = hf_io.ShardWriter(staging, mine, tensors)
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
    if group_rank(groups.tp) == 0:
        writer.finish()
        if group_rank(groups.pp) == 0:
            hf_io.write_index(staging, [shard for _, shard in plan], tensors)
