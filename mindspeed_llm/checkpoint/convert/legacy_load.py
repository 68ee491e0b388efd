"""Weights that Megatron-LM saved straight into a live, sharded model, whatever layouts the two have."""

# pyright: basic
# torch.distributed has no types.

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed_llm.checkpoint.convert.conversion import open_megatron
from mindspeed_llm.checkpoint.convert.legacy_reader import LegacySource, LegacyTree
from mindspeed_llm.checkpoint.convert.views import Repadded
from mindspeed_llm.checkpoint.engine import Problems, cut_over, live_tensors
from mindspeed_llm.checkpoint.layout import global_shape, local_columns, local_rows
from mindspeed_llm.checkpoint.names import compile_names
from mindspeed_llm.config.resolve import ARCHITECTURE_FIELDS
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import CheckpointError
from mindspeed_llm.models.family import ModelFamily, values_of

logger = logging.getLogger(__name__)


@torch.no_grad()
def load_megatron_weights(
    chunks: Sequence[nn.Module],
    family: ModelFamily,
    folder: Path,
    *,
    tp_rank: int,
    tp_size: int,
    cfg: RunConfig,
    etp: tuple[int, int],
) -> None:
    """Fills a live model in place and in the dtype of its parameters; each rank reads by itself, only what it holds.

    Args:
        chunks: this rank's model chunks, wrapped or not.
        folder: the save: a per-rank tree, or a ``torch_dist`` folder.
        tp_rank: which part of a tensor is this rank's.
        tp_size: over how many ranks a tensor is cut.
        etp: the same two for tensors of experts.

    Raises:
        CheckpointError: the save is damaged, or of another model.
        ConversionError: its tensors do not fit the model; nothing was written then.
    """
    values = values_of(cfg)
    _, opened = open_megatron(folder, None)
    _require_model(folder, opened.values, values)
    table = compile_names(family, values)
    source, live = LegacySource(opened, table) if isinstance(opened, LegacyTree) else opened, live_tensors(chunks)
    original = {entry.hf: name for name, entry in table.entries.items() if entry.exported}
    stored = {name: original[table.entries[name].hf] for name in live if name in table.entries}
    problems = Problems()
    problems.add("in the model, but made of nothing", *(name for name in live if name not in stored))
    problems.add("missing in the checkpoint", *(name for name in original.values() if name not in source.tensors))
    problems.check(f"{folder} does not fit the model")
    padded = Repadded(table, source, values)
    for name, target in live.items():
        entry = table.entries[name]
        wanted = tuple(global_shape(entry.shard, target.shape, cut_over(entry, tp_size, etp[1])))
        if wanted != padded.tensors[stored[name]].shape:
            problems.add("other shape than the model's", f"{name} {list(padded.tensors[stored[name]].shape)}")
    problems.check(f"{folder} does not fit the model")
    for name, target in live.items():
        rule, shape = table.entries[name].shard, padded.tensors[stored[name]].shape
        rank, size = (tp_rank, tp_size) if table.entries[name].expert is None else etp
        columns = local_columns(rule, shape[-1], rank, size)
        at = 0
        for start, stop in local_rows(rule, shape[0], rank, size):
            target.data[at : at + stop - start].copy_(padded.read(stored[name], (start, stop), columns))
            at += stop - start
    logger.info("loaded %d tensors of %s, as Megatron-LM saved them in %s", len(live), family.name, folder)


def _require_model(folder: Path, recorded: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """A model that computes something else would load every tensor that happens to fit."""
    differs = [
        name
        for name in sorted(ARCHITECTURE_FIELDS & recorded.keys())
        if name != "vocab_size" and recorded[name] != values[name]
    ]
    if differs:
        raise CheckpointError(
            f"the checkpoint {folder} is of another model",
            got=", ".join(f"{name} {values[name]}" for name in differs),
            allowed=", ".join(f"{name} {recorded[name]}" for name in differs),
            fix="give the --hf-config, or the architecture flags, of the run that saved it",
        )
