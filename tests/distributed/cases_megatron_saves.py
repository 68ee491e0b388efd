"""What the ranks run to leave a ``torch_dist`` save as Megatron-LM does, from megatron-core's own model and writer."""

from __future__ import annotations

import io
import random
import signal
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import mindspeed_llm.core  # noqa: F401  brings megatron-core in behind its seam
from mindspeed_llm.checkpoint import engine, hf_io
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.build import optimizer_config, transformer_config, wrap_ddp
from mindspeed_llm.models.registry import family_for
from mindspeed_llm.training.initialize import initialize
from mindspeed_llm.training.schedule import build_scheduler
from mindspeed_llm.training.setup import _create_states
from tests.distributed.cases_hf_weights import configuration
from tests.distributed.cases_legacy import arguments

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.utils import unwrap_model

SHARDING = "distrib_optim_sharding_type"


def save(folder: Path, out: Path, *, fused: bool, release: bool = False, sharding: str, **flags: Any) -> None:
    """The weights of ``folder`` in megatron-core's model, and an optimizer, saved with what Megatron-LM core_v0.16.1's
    ``generate_state_dict`` and ``save_checkpoint`` put beside them.

    Args:
        folder: a Hugging Face folder.
        out: the folder of saves.
        fused: norms are named as TransformerEngine names them, as megatron-core's layers do by default, and layers
            have states as TransformerEngine leaves them.
        release: the tracker says "release", not the number.
        sharding: how the optimizer's state is cut.
        flags: the layout, and what else is not at its default.
    """
    cfg = configuration(folder, use_distributed_optimizer=True, **flags)
    initialize(cfg)
    chunks = wrap_ddp(cfg, transformer_config(cfg), [_model(folder, cfg, fused=fused)])
    optimizer: Any = get_megatron_optimizer(optimizer_config(cfg), chunks, use_gloo_process_groups=False)
    _create_states(optimizer)
    groups: Any = parallel_state
    metadata = {SHARDING: sharding, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    metadata |= {"dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True)}
    model = unwrap_model(chunks)[0].sharded_state_dict(metadata=metadata)
    if fused:
        for part in nested_values(model):
            if isinstance(part, ShardedObject):
                part.data = io.BytesIO(b"recipe")
    state: dict[str, Any] = {"args": _arguments(cfg), "checkpoint_version": 3.0, "iteration": 7, "model": model}
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    state["opt_param_scheduler"] = build_scheduler(cfg, optimizer).state_dict()
    state["rerun_state_machine"] = get_rerun_state_machine().state_dict(None, "torch_dist", force=True)
    state["rng_state"] = _generators()
    state["num_floating_point_operations_so_far"] = 0
    place = out / ("release" if release else "iter_0000007")
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
    dist.barrier()
    written = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    dist_checkpointing.save(state, str(place), content_metadata=written)
    if dist.get_rank() == 0:
        (out / "latest_checkpointed_iteration.txt").write_text("release" if release else "7")
    dist.barrier()


def _model(folder: Path, cfg: RunConfig, *, fused: bool) -> MegatronModule:
    t = cfg.transformer
    layer: Any = get_gpt_layer_local_spec(normalization=t.normalization, qk_layernorm=t.qk_layernorm)
    if not fused:
        layer.submodules.sharded_state_dict_keys_map = {}
    described: Any = cfg.model
    model = GPTModel(
        transformer_config(cfg),
        layer,
        vocab_size=described.padded_vocab_size,
        max_sequence_length=described.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not described.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=described.rotary_base,
    )
    tp_rank, tp_size = parallel_state.get_tensor_model_parallel_rank(), t.tensor_model_parallel_size
    family = family_for(hf_io.read_config(folder))
    engine.load_hf_weights([model], family, folder, tp_rank=tp_rank, tp_size=tp_size, cfg=cfg)
    return Float16Module(transformer_config(cfg), model) if t.bf16 else model


def _arguments(cfg: RunConfig) -> Any:
    """With the plain fields of megatron-core's configuration, which are flags of Megatron-LM, too."""
    plain = bool | int | float | str | list | Enum | torch.dtype | None
    given = {name: value for name, value in vars(transformer_config(cfg)).items() if isinstance(value, plain)}
    known = vars(arguments(cfg))
    others = {name: value for name, value in given.items() if name not in known}
    return arguments(
        cfg, **others, exit_signal=signal.SIGTERM, ckpt_format="torch_dist", tokenizer_type="NullTokenizer"
    )


def _generators() -> ShardedObject:
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tracker.get_states(),
    }
    groups: Any = parallel_state
    stages, parts = groups.get_pipeline_model_parallel_group(), groups.get_tensor_model_parallel_group()
    sizes, ranks = (stages.size(), parts.size()), (stages.rank(), parts.rank())
    return ShardedObject("rng_state", [state], sizes, ranks, replica_id=groups.get_data_parallel_rank())
