"""Parallel layouts in short: ``tp2+sp+pp2`` is what a command line says with three flags."""

from __future__ import annotations

import re
from typing import Any

from mindspeed_llm.errors import ConfigError

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
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
    "fixedbias": {"moe_router_bias_update_rate": 0.0},
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
}
_WORLD = ("tp", "pp", "dp")
_SIZED = re.compile(rf"({'|'.join([*_SIZES, 'dp'])})([1-9]\d*)")
GRAMMAR = f"{' '.join(f'{kind}N' for kind in [*_SIZES, 'dp'])} {' '.join(_SWITCHES)}, joined by +"


def is_layout(text: str) -> bool:
    """Whether ``text`` begins as a layout does."""
    first = text.split("+")[0]
    return first in _SWITCHES or _SIZED.fullmatch(first) is not None


def parse_layout(layout: str) -> tuple[int, dict[str, Any]]:
    """Number of processes and field values of a layout such as ``tp2+sp+pp2+vpp2+dp2+dist+reduce+gather``.

    Raises:
        ConfigError: a part is not known.
    """
    world, values = 1, {}
    for part in layout.split("+"):
        sized = _SIZED.fullmatch(part)
        if sized is None and part not in _SWITCHES:
            raise ConfigError(f"a part of the layout {layout} is not known", got=repr(part), allowed=GRAMMAR)
        if sized is None:
            values |= _SWITCHES[part]
            continue
        kind, size = sized[1], int(sized[2])
        if kind in _SIZES:
            values[_SIZES[kind]] = size
        if kind in _WORLD:
            world *= size
    return world, values
