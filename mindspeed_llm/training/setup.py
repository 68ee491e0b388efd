"""Builds a run: model, weights, data-parallel wrappers, optimizer, scheduler."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.build import build_chunks, optimizer_config, transformer_config, wrap_ddp
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.training.routing import Counts
from mindspeed_llm.training.schedule import build_scheduler
from mindspeed_llm.training.state import Progress, Run

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer

LoadWeights = Callable[[list[Any]], None]


def setup(cfg: RunConfig, load_weights: LoadWeights | None = None) -> Run:
    """A run ready for its first step; :func:`mindspeed_llm.training.initialize.initialize` came before.

    Args:
        cfg: the resolved configuration.
        load_weights: fills the bare chunks before the optimizer copies its main parameters from them.
    """
    config = transformer_config(cfg)
    chunks = build_chunks(cfg, config)
    if load_weights is not None:
        load_weights(chunks)
    chunks = wrap_ddp(cfg, config, chunks)
    optimizer = get_megatron_optimizer(optimizer_config(cfg), chunks, use_gloo_process_groups=False)
    _create_states(optimizer)
    scheduler = build_scheduler(cfg, optimizer)
    _connect(cfg, config, chunks, optimizer)
    counts = Counts(cfg) if cfg.transformer.moe_per_layer_logging else None
    if counts is not None:
        counts.watch(chunks)
    config.seal()
    return Run(cfg, config, chunks, optimizer, scheduler, Progress(), counts)


def _create_states(optimizer: Any) -> None:
    """Adam's means exist from the start, so that a run that took no step can be saved."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None and part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)


def _connect(cfg: RunConfig, config: SuiteTransformerConfig, chunks: list[Any], optimizer: Any) -> None:
    """The callbacks through which megatron-core's schedules reach data parallelism and loss scaling."""
    one = len(chunks) == 1
    # Declared as one callable, and with interleaved chunks read as a list of them.
    callbacks: Any = config
    # The run owns the optimizer. Owned by the model's configuration too, it would close a cycle through gradient
    # accumulators in C++, where the collector cannot look: neither model nor process groups and their threads would go.
    owned = weakref.proxy(optimizer)
    config.grad_scale_func = lambda loss: owned.scale_loss(loss)
    config.finalize_model_grads_func = finalize_model_grads
    if cfg.ddp.overlap_grad_reduce:
        callbacks.no_sync_func = chunks[0].no_sync if one else [chunk.no_sync for chunk in chunks]
        if not one:
            callbacks.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if cfg.value("overlap_param_gather") and cfg.ddp.align_param_gather:
        callbacks.param_sync_func = chunks[0].start_param_sync if one else [chunk.start_param_sync for chunk in chunks]
