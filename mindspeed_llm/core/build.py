"""From a run's configuration to megatron-core's configuration objects and model chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from mindspeed_llm.config.model import ModelConfig
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.core.transformer.model import SuiteGPTModel
from mindspeed_llm.core.transformer.specs import gpt_block_spec
from mindspeed_llm.device import current

from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}

T = TypeVar("T")


def model_dtype(cfg: RunConfig) -> torch.dtype:
    """The dtype of the parameters that the layers compute with."""
    if cfg.transformer.bf16:
        return torch.bfloat16
    return torch.float16 if cfg.transformer.fp16 else torch.float32


def _fill(kind: type[T], cfg: RunConfig, **given: Any) -> T:
    """``kind`` with every field that the run configures, and ``given``."""
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.init and field.name not in given:
            try:
                value = cfg.value(field.name)
            except KeyError:
                continue
            # Our sections are frozen, down to their sequences; megatron-core asks for lists, except of a window.
            values[field.name] = list(value) if isinstance(value, tuple) and field.name != "window_size" else value
    return kind(**values, **given)


def transformer_config(cfg: RunConfig) -> SuiteTransformerConfig:
    """megatron-core's configuration of the model and its parallel layout; not sealed yet."""
    dtype = model_dtype(cfg)
    model = cfg.model
    scaled = {}
    if model.rope_scaling_type is not None:
        scaled = {
            "rope_scaling_factor": model.rope_scaling_factor,
            "rope_scaling_low_freq_factor": model.low_freq_factor,
            "rope_scaling_high_freq_factor": model.high_freq_factor,
            "rope_scaling_original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings
            or model.max_position_embeddings,
            "rope_scaling_beta_fast": model.beta_fast,
            "rope_scaling_beta_slow": model.beta_slow,
        }
    if model.rope_scaling_type in ("yarn", "longrope"):
        scaled |= _rotary_temperature(model)
    given: dict[str, Any] = {}
    if model.init_method_xavier_uniform:
        given = {
            "init_method": torch.nn.init.xavier_uniform_,
            "output_layer_init_method": torch.nn.init.xavier_uniform_,
        }
    return _fill(
        SuiteTransformerConfig,
        cfg,
        **scaled,
        **given,
        activation_func=ACTIVATIONS[model.activation_func],
        # megatron-core's own is not used: core/transformer/latent.py says why.
        multi_latent_attention=False,
        alibi=model.position_embedding_type == "alibi",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        true_vocab_size=model.vocab_size,
    )


def _rotary_temperature(model: ModelConfig) -> dict[str, Any]:
    """megatron-core's three numbers whose ``t(mscale) / t(mscale_all_dim)``, with ``t(m) = 0.1 m ln(factor) + 1``, is
    the factor of cos and sin [Peng et al. 2023, section 3.4]; that of longrope is
    ``sqrt(1 + ln(factor) / ln(trained context))`` [Ding et al. 2024, section 3.3]."""
    factor = model.rope_scaling_factor or 1.0
    mscale, mscale_all_dim = model.rope_scaling_mscale, model.rope_scaling_mscale_all_dim
    attention_factor = model.rope_scaling_attention_factor
    if model.rope_scaling_type == "longrope" and attention_factor is None:
        trained = model.rope_scaling_original_max_position_embeddings or model.max_position_embeddings
        attention_factor = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(trained or 1))
    if attention_factor is not None:
        # Of a factor of 1 megatron-core always makes 1; it reads these three for nothing else.
        factor, mscale, mscale_all_dim = math.e, 10.0 * (attention_factor - 1.0), 0.0
    elif not (mscale and mscale_all_dim):
        # Hugging Face takes the pair only when neither is zero.
        mscale = mscale_all_dim = None
    return {"yarn_rotary_scaling_factor": factor, "yarn_mscale": mscale, "yarn_mscale_all_dim": mscale_all_dim}


def build_chunks(cfg: RunConfig, config: SuiteTransformerConfig) -> list[MegatronModule]:
    """The chunks of the model that this pipeline rank holds, in order; needs ``parallel_state``.

    Chunks of bf16 and fp16 runs come wrapped in megatron-core's ``Float16Module``.
    """
    stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(stages) if stages else [None]:
        # What was initialised on the CPU (norms, or all of it by --use-cpu-initialization) joins the rest.
        chunk = _build_chunk(cfg, config, stage).to(current().torch_device)
        if config.bf16 or config.fp16:
            chunk = Float16Module(config, chunk)
        chunks.append(chunk)
    return chunks


def _build_chunk(cfg: RunConfig, config: SuiteTransformerConfig, stage: int | None) -> SuiteGPTModel:
    model = cfg.model
    return SuiteGPTModel(
        config,
        gpt_block_spec(config, stage),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        vp_stage=stage,
    )


def wrap_ddp(cfg: RunConfig, config: SuiteTransformerConfig, chunks: list[MegatronModule]) -> list[Any]:
    """``chunks`` with their gradients in flat buffers that data-parallel ranks reduce."""
    # megatron-core's look at the gradients raises in the ranks that hold a NaN and leaves the others waiting in a
    # reduction. The loop looks at their norm instead, which every rank knows.
    ddp_config = _fill(DistributedDataParallelConfig, cfg, check_for_nan_in_grad=False)
    return [
        # As in Megatron-LM: a later chunk's reduction overlaps with other chunks' computation, whole as it is.
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def optimizer_config(cfg: RunConfig) -> OptimizerConfig:
    """megatron-core's configuration of the optimizer."""
    return _fill(OptimizerConfig, cfg, params_dtype=model_dtype(cfg))
