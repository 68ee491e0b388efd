"""The parity matrix: which models run in which layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.family import ModelFamily
from mindspeed_llm.models.registry import families
from mindspeed_llm.tools.compare import layouts
from tests.distributed.pool import MAX_WORLD_SIZE

RECIPE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "lr_decay_style": "constant",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


class Model(NamedTuple):
    """A model of :data:`tests.fixtures.MODELS`, changes of its config, and the layouts it runs in."""

    name: str
    changes: dict[str, Any]
    layouts: str


#: The families that run in every layout. Where tied embeddings matter (gradients meet from two places or stages), both
#: are here.
THOROUGH = {
    "qwen2": Model(
        "q25",
        {},
        "one one+mbs4 one+full tp2 tp2+full tp2+sp tp4 tp4+sp pp2+mbs2 pp4 pp2+vpp2+nop2p pp2+vpp2+p2p dp2+dist"
        " dp2+dist+reduce+gather dp4+reduce tp2+sp+pp2 pp2+dp2+vpp2+dist+reduce+gather tp2+pp2+dp2+dist+reduce+gather",
    ),
    "qwen2 tied": Model(
        "q25tied",
        {},
        "one+selective tp2 tp2+sp+selective+mbs2 tp4+sp pp2 pp4 pp2+vpp2+p2p dp2+dist+reduce+gather tp2+sp+pp2"
        " pp2+vpp2+dp2+dist+reduce pp2+dp2+dist+mbs2+block tp2+sp+pp2+dp2+dist+reduce+gather",
    ),
    "llama": Model(
        "llama31",
        {},
        "one one+mbs8 tp2+sp+full tp4 pp2+vpp2 dp2 dp2+reduce dp2+dist+reduce tp2+pp2"
        " tp2+sp+pp2+dp2+dist+reduce+gather",
    ),
    "mixtral": Model(
        "mixtral",
        {},
        "one tp2+sp tp2+sp+etp1 pp2 tp2+sp+pp2 dp2+ep2+alltoall dp2+ep2+dist+allgather dp4+ep4+dist+alltoall"
        " tp2+sp+pp2+etp1+ep2+alltoall",
    ),
    "deepseek_v3": Model(
        "deepseek_v3",
        {},
        "one+fixedbias tp2+sp+fixedbias pp2+fixedbias tp2+sp+pp2+fixedbias dp2+ep2+dist+allgather+fixedbias"
        " dp4+ep4+dist+alltoall+fixedbias tp2+sp+pp2+etp1+ep2+alltoall+fixedbias",
    ),
}


def _everywhere(family: ModelFamily) -> str:
    """Layouts in which most of the machinery works on a family. transformers never moves the bias of an expert."""
    values = family.config_to_values(family.tiny)
    layouts = ["one", "tp2+sp+pp2+etp1+ep2+alltoall" if values["num_moe_experts"] else "tp2+sp+pp2"]
    fixed = "+fixedbias" if values.get("moe_router_enable_expert_bias") else ""
    return " ".join(layout + fixed for layout in layouts)


#: Every other family, which joins by existing.
FAMILIES = {name: Model(name, {}, _everywhere(family)) for name, family in families().items() if name not in THOROUGH}
#: What makes other code run, in the layouts where it could go wrong.
SPECIAL = {
    "one KV head": Model("q25", {"num_key_value_heads": 1}, "tp2 tp4+sp+mbs2"),
    "no GQA": Model("llama31", {"num_key_value_heads": 4}, "tp2+sp"),
    "sliding window": Model("q25window", {}, "one tp2+sp+pp2"),
    "wide heads, tied": Model("llama32tied", {}, "tp2+sp pp2"),
    "linear rope": Model("llamalin", {}, "tp2"),
    "yarn rope": Model("llamayarn", {}, "tp2+pp2"),
    "dynamic rope": Model("llamadyn", {}, "tp2+sp"),
    "ALiBi, norm head": Model("baichuan13", {}, "one tp2+sp+pp2"),
    "biases": Model("llamabias", {}, "tp2+sp+pp2"),
    "no latent queries, no groups": Model("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}, "tp2+sp+pp2"),
    "padded vocabulary": Model("q25", {"vocab_size": 323}, "one+divisor128 tp2+sp+divisor128 tp2+pp2+divisor128"),
    "padded vocabulary, tied": Model("q25tied", {"vocab_size": 323}, "tp4+divisor128 tp2+sp+pp2+divisor128"),
    "eight layers": Model("q25tied", {"num_hidden_layers": 8}, "pp4+vpp2"),
    "twelve layers": Model("llama31", {"num_hidden_layers": 12}, "pp2+vpp3+full"),
}


def parse_layout(layout: str) -> tuple[int, dict[str, Any]]:
    """See :func:`layouts.parse_layout`; the layout fits into the pool."""
    world, values = layouts.parse_layout(layout)
    if world > MAX_WORLD_SIZE:
        raise ConfigError(f"the layout {layout} has too many processes", got=world, allowed=f"up to {MAX_WORLD_SIZE}")
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
