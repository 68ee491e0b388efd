"""Runs inside the ranks of the pool: three training steps of a Hugging Face folder in some layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from mindspeed_llm import api
from mindspeed_llm.checkpoint.engine import iter_hf_weights, live_tensors
from mindspeed_llm.core.groups import data_group
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.training.objective import Batch, pretraining
from mindspeed_llm.training.step import train_step
from mindspeed_llm.training.weights import family_of, parallel_groups
from tests.parity.reference import RECIPE, Reference, Trace

from megatron.core import parallel_state

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "mbs": "micro_batch_size",
    "divisor": "make_vocab_size_divisible_by",
}
_SWITCHES: dict[str, dict[str, Any]] = {
    "one": {},
    "sp": {"sequence_parallel": True},
    "dist": {"use_distributed_optimizer": True},
    "reduce": {"overlap_grad_reduce": True},
    "gather": {"overlap_param_gather": True},
    "p2p": {"overlap_p2p_comm": True},
    "nop2p": {"overlap_p2p_comm": False},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
}


def parse_layout(layout: str) -> tuple[int, dict[str, Any]]:
    """World size and field values of a layout such as ``tp2+sp+pp2+vpp2+dp2+dist+reduce+gather``.

    Raises:
        ConfigError: a part is not known.
    """
    world, values = 1, {}
    for part in layout.split("+"):
        sized = re.fullmatch(r"(tp|pp|vpp|dp|mbs|divisor)([1-9]\d*)", part)
        if sized is None and part not in _SWITCHES:
            allowed = f"tpN ppN vppN dpN mbsN divisorN {' '.join(_SWITCHES)}, joined by +"
            raise ConfigError(f"a part of the layout {layout} is not known", got=repr(part), allowed=allowed)
        if sized is None:
            values |= _SWITCHES[part]
            continue
        kind, size = sized[1], int(sized[2])
        if kind != "dp":
            values[_SIZES[kind]] = size
        if kind in ("tp", "pp", "dp"):
            world *= size
    return world, values


def training_values(layout: str, tokens: torch.Tensor) -> dict[str, Any]:
    """Field values of a training run over ``tokens [steps, batch, s + 1]``."""
    return {
        **RECIPE,
        "seq_length": tokens.shape[2] - 1,
        "micro_batch_size": 1,
        "global_batch_size": tokens.shape[1],
        "train_iters": tokens.shape[0],
        "make_vocab_size_divisible_by": 1,
        **parse_layout(layout)[1],
    }


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


def _gather_sharded_gradients(run: api.Run) -> None:
    """With the distributed optimizer each replica has reduced only its share of a bucket."""
    group = data_group()
    for chunk in run.chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def iter_gradients(run: api.Run) -> Iterator[tuple[str, torch.Tensor]]:
    """The reduced gradients under Hugging Face names: exported as if they were the weights. Run it to its end."""
    if run.cfg.value("use_distributed_optimizer"):
        _gather_sharded_gradients(run)
    parameters = [tensor for tensor in live_tensors(run.chunks).values() if tensor.requires_grad]
    weights = [p.data for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad  # type: ignore[attr-defined]
    # Not through the API, which would first bring parameters up to date, and to the next forward pass they would be so.
    yield from iter_hf_weights(run.chunks, family_of(run.cfg), run.cfg, groups=parallel_groups())
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight


def gradient_errors(run: api.Run, file: str) -> dict[str, float]:
    """max|d| / max|reference| of each gradient that this rank gets, against those in ``file``."""
    errors: dict[str, float] = {}
    with safe_open(file, framework="pt") as references:
        for name, gradient in iter_gradients(run):
            reference = references.get_tensor(name)
            errors[name] = ((gradient - reference).abs().max() / reference.abs().max()).item()
    return errors


def train(reference: Reference, layout: str) -> Trace:
    """Losses, gradient norms, and what this rank knows of the first step's gradients."""
    values = training_values(layout, reference.tokens)
    run = api.load_hf(reference.folder, **values)
    trace = Trace()
    step = run.optimizer.step

    def compare_then_step() -> Any:
        if not trace.losses:
            trace.errors.update(gradient_errors(run, str(reference.gradients)))
        return step()

    run.optimizer.step = compare_then_step  # type: ignore[method-assign]
    batches = [micro_batches(reference.tokens, values["micro_batch_size"]) for _ in run.chunks]
    for _ in reference.tokens:
        result = train_step(run, pretraining, batches)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
    return trace
