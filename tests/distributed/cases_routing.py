"""What the ranks run to see how tokens are shared between experts: one step from a folder, and steps with a bias."""

# pyright: basic
# megatron-core's modules and parameters have attributes without types.

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_llm import api
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.core.transformer.experts import Router
from mindspeed_llm.tools.compare.run_ours import micro_batches
from mindspeed_llm.training.gradients import iter_gradients
from mindspeed_llm.training.initialize import initialize
from mindspeed_llm.training.objective import pretraining
from mindspeed_llm.training.setup import setup
from mindspeed_llm.training.step import evaluate, train_step
from tests.parity.layouts import RECIPE, parse_layout

from megatron.core import parallel_state

ROUTED: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 1,
    "max_position_embeddings": 32,
    "add_bias_linear": False,
    "moe_ffn_hidden_size": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.25,
    "moe_per_layer_logging": True,
}


def one_step(folder: Path, layout: str, tokens: torch.Tensor, flags: dict[str, Any]) -> dict[str, Any]:
    """Evaluate, then train one step from the folder: what it tells of its experts, and the gradients of its routers.

    Args:
        folder: a Hugging Face folder.
        layout: of the parity matrix.
        tokens: ``[sequences, s + 1]``.
        flags: field values beside those of the layout.
    """
    _, values = parse_layout(layout)
    sizes = {"micro_batch_size": 1, "global_batch_size": len(tokens), "seq_length": tokens.shape[1] - 1}
    run = api.load_hf(folder, **{**RECIPE, "train_iters": 1, "clip_grad": 0.0, **sizes, **values, **flags})
    size = run.cfg.training.micro_batch_size or 1
    gradients: dict[str, torch.Tensor] = {}
    step = run.optimizer.step

    def look_then_step() -> Any:
        gradients.update((name, one.clone()) for name, one in iter_gradients(run) if name.endswith(".gate.weight"))
        return step()

    run.optimizer.step = look_then_step  # type: ignore[method-assign]
    # What an evaluation does must not show in the step.
    evaluate(run, pretraining, [micro_batches(tokens.flip(1), size) for _ in run.chunks], 1)
    result = train_step(run, pretraining, [micro_batches(tokens, size) for _ in run.chunks])
    return {"loss": result.loss, "routing": result.routing, "gradients": gradients}


def biased(layout: str, tokens: torch.Tensor, experts: int, topk: int) -> dict[str, Any]:
    """Steps with a bias of experts, and what should have become of it by the routers' own inputs.

    Args:
        layout: of the parity matrix; there is one stage.
        tokens: ``[steps, sequences, s + 1]``.
        experts: of each layer.
        topk: of each token.
    """
    world, values = parse_layout(layout)
    sizes = {"micro_batch_size": 1, "global_batch_size": tokens.shape[1], "seq_length": tokens.shape[2] - 1}
    counts = {"num_moe_experts": experts, "moe_router_topk": topk}
    given = {**RECIPE, **ROUTED, **counts, "train_iters": len(tokens), **sizes, **values}
    cfg = from_values(given, world_size=world)
    initialize(cfg)
    run = setup(cfg)
    seen: dict[Any, list[torch.Tensor]] = {}
    routers: list[Any] = [module for chunk in run.chunks for module in chunk.modules() if isinstance(module, Router)]

    def look(router: Any, given: tuple[torch.Tensor, ...], _made: Any) -> None:
        scores = torch.sigmoid(given[0].detach().double().flatten(0, 1) @ router.weight.detach().double().t())
        _, chosen = (scores + router.expert_bias).topk(topk)
        seen.setdefault(router.layer_number, []).append(chosen.flatten().bincount(minlength=experts))

    for router in routers:
        router.register_forward_hook(look)
    wanted = torch.zeros(len(routers), experts)
    found: dict[str, Any] = {"tokens": [], "biases": [], "wanted": [], "counts": [], "unused": []}
    for batch in tokens:
        seen.clear()
        result = train_step(run, pretraining, [micro_batches(batch, 1)])
        load = torch.stack([torch.stack(seen[router.layer_number]).sum(0) for router in routers])
        dist.all_reduce(load)
        # DeepSeek-V3, section 2.1.2: down by the rate where the load is above the mean, up where it is below.
        wanted = wanted + cfg.transformer.moe_router_bias_update_rate * (load.double().mean(1, True) - load).sign()
        found["tokens"].append(result.routing and result.routing.tokens)
        found["counts"].append(load.clone())
        found["biases"].append(torch.stack([router.expert_bias for router in routers]).clone())
        found["wanted"].append(wanted.float())
        found["unused"].append(_gradients_without_tokens(run.chunks[0], load))
    return found


def _gradients_without_tokens(chunk: torch.nn.Module, load: torch.Tensor) -> dict[str, float]:
    """The largest gradient of each expert's weight that no token went to."""
    here = parallel_state.get_expert_model_parallel_rank()
    largest: dict[str, float] = {}
    for name, parameter in chunk.named_parameters():
        if ".experts.linear_fc" in name:
            layer = int(name.split("layers.")[1].split(".")[0])
            local = int(name.rsplit("weight", 1)[1])
            share = load.shape[1] // parallel_state.get_expert_model_parallel_world_size()
            if load[layer, here * share + local] == 0:
                largest[name] = float(parameter.main_grad.abs().max())  # pyright: ignore[reportAttributeAccessIssue]
    return largest
