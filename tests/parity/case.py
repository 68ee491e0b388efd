"""Runs inside the ranks of the pool: three training steps of a Hugging Face folder in some layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.engine import iter_hf_weights, load_hf_weights
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.core.groups import data_group
from mindspeed_llm.models.registry import family_for
from mindspeed_llm.training.initialize import initialize
from mindspeed_llm.training.objective import Batch, pretraining
from mindspeed_llm.training.setup import setup
from mindspeed_llm.training.state import Run
from mindspeed_llm.training.step import train_step
from mindspeed_llm.training.weights import parallel_groups
from tests.parity.reference import RECIPE, Trace

from megatron.core import parallel_state

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
}
_SWITCHES: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "dist": {"use_distributed_optimizer": True},
    "reduce": {"overlap_grad_reduce": True},
    "gather": {"overlap_param_gather": True},
    "p2p": {"overlap_p2p_comm": True},
    "nop2p": {"overlap_p2p_comm": False},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
    "one": {},
}


def parse_layout(layout: str) -> tuple[int, dict[str, Any]]:
    """World size and flags of a layout such as ``tp2 sp pp2 vpp2 dp2 dist reduce gather``."""
    world, values = 1, {}
    for word in layout.split():
        sized = re.fullmatch(r"(tp|pp|vpp|dp|mbs)(\d+)", word)
        if sized is None:
            values |= _SWITCHES[word]
            continue
        size = int(sized[2])
        if sized[1] == "mbs":
            values["micro_batch_size"] = size
        elif sized[1] != "dp":
            values[_SIZES[sized[1]]] = size
        if sized[1] in ("tp", "pp", "dp"):
            world *= size
    return world, values


def micro_batches(tokens: torch.Tensor, size: int) -> Iterator[Batch]:
    """This data-parallel rank's micro-batches of ``tokens [steps, batch, s + 1]``, dealt out as Megatron does."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for batch in tokens:
        for start in range(rank * size, batch.shape[0], ranks * size):
            part = batch[start : start + size]
            inputs = part[:, :-1].contiguous()
            yield {
                "tokens": inputs,
                "labels": part[:, 1:].contiguous(),
                "loss_mask": torch.ones(inputs.shape),
                "position_ids": torch.arange(inputs.shape[1]).expand_as(inputs),
            }


def open_run(folder: str, values: dict[str, Any]) -> Run:
    """A run of the folder's model and weights."""
    hf_config = hf_io.read_config(folder)
    family = family_for(hf_config)
    cfg = from_values({**family.config_to_values(hf_config), **values}, world_size=dist.get_world_size())
    initialize(cfg)

    def load(chunks: list[Any]) -> None:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        tp_size = cfg.transformer.tensor_model_parallel_size
        load_hf_weights(chunks, family, folder, tp_rank=tp_rank, tp_size=tp_size, cfg=cfg)

    return setup(cfg, load)


def _gather_sharded_gradients(run: Run) -> None:
    """With the distributed optimizer each replica has reduced only its share of a bucket."""
    group = data_group()
    for chunk in run.chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def gradients(run: Run, folder: str) -> dict[str, torch.Tensor]:
    """This stage's reduced gradients under Hugging Face names: exported as if they were the weights."""
    if run.cfg.value("use_distributed_optimizer"):
        _gather_sharded_gradients(run)
    parameters = [p for chunk in run.chunks for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad.clone()
    family = family_for(hf_io.read_config(folder))
    found = {name: g.clone() for name, g in iter_hf_weights(run.chunks, family, run.cfg, groups=parallel_groups())}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return found


def train(folder: str, layout: str, tokens: torch.Tensor, **more: Any) -> Trace:
    """Losses, gradient norms, and this rank's share of the first step's gradients."""
    _, values = parse_layout(layout)
    values = {
        **RECIPE,
        "seq_length": tokens.shape[2] - 1,
        "micro_batch_size": 1,
        "global_batch_size": tokens.shape[1],
        "train_iters": tokens.shape[0],
        "make_vocab_size_divisible_by": 1,
        **values,
        **more,
    }
    run = open_run(folder, values)
    trace = Trace([], [], {})
    step = run.optimizer.step

    def capture_then_step() -> Any:
        if not trace.losses:
            trace.gradients.update(gradients(run, folder))
        return step()

    run.optimizer.step = capture_then_step  # type: ignore[method-assign]
    batches = [micro_batches(tokens, values["micro_batch_size"]) for _ in run.chunks]
    for _ in range(tokens.shape[0]):
        result = train_step(run, pretraining, batches)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
    return trace
