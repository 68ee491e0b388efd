"""Which module fills each slot of a layer."""

from __future__ import annotations

from mindspeed_llm.config.layers import layers_of_experts
from mindspeed_llm.core.transformer.attention import CoreAttention
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.core.transformer.experts import Mixture
from mindspeed_llm.core.transformer.latent import LatentAttentionSubmodules, LatentSelfAttention
from mindspeed_llm.core.transformer.layer import NormedCoreAttention, SuiteSelfAttention, SuiteTransformerLayer
from mindspeed_llm.core.transformer.norms import HeadsRMSNorm, KeyHeadsRMSNorm, LayerNorm, RMSNorm, norm_type

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)


class SuiteSpecProvider(LocalSpecProvider):
    """megatron-core's local modules, with the suite's attention and norms."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """The norm of every slot; unlike megatron-core's off CUDA, it works with sequence parallelism."""
        return RMSNorm if rms_norm else LayerNorm

    def core_attention(self) -> type:
        """The one core attention."""
        return CoreAttention


def _self_attention(config: SuiteTransformerConfig) -> ModuleSpec:
    backend = SuiteSpecProvider()
    core, projection, norm = backend.core_attention(), backend.row_parallel_linear(), norm_type(config)
    causal = {"attn_mask_type": AttnMaskType.causal}
    if config.kv_lora_rank is not None:
        latent = LatentAttentionSubmodules(core_attention=core, linear_proj=projection, norm=norm)
        return ModuleSpec(LatentSelfAttention, params=causal, submodules=latent)
    q_norm = k_norm = norm if config.qk_layernorm else IdentityOp
    if config.qk_norm_after_rotary:
        core, q_norm, k_norm = NormedCoreAttention, IdentityOp, IdentityOp
    if config.qk_norm_over_heads:
        q_norm, k_norm = HeadsRMSNorm, KeyHeadsRMSNorm
    return ModuleSpec(
        SelfAttention if config.rotary_base_local is None else SuiteSelfAttention,
        params=causal,
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=core,  # pyright: ignore[reportArgumentType]  of our configuration
            linear_proj=projection,
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )


def gpt_layer_spec(config: SuiteTransformerConfig, *, experts: bool = False) -> ModuleSpec:
    """A decoder layer: self-attention and MLP, or a mixture of experts, each with its norms and a residual."""
    backend = SuiteSpecProvider()
    norm = norm_type(config)
    pre_norm = norm if config.pre_norm else IdentityOp
    joins = config.post_norm or config.residual_multiplier != 1.0
    return ModuleSpec(
        module=SuiteTransformerLayer if joins else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=pre_norm,
            self_attention=_self_attention(config),
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]  a function, as upstream
            pre_mlp_layernorm=pre_norm,
            mlp=Mixture if experts else get_mlp_module_spec_for_backend(backend=backend),
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
        ),
    )


def gpt_block_spec(config: SuiteTransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers and the final norm of one pipeline chunk; needs ``parallel_state``."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    kinds = layers_of_experts(vars(config))[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    specs = {kind: gpt_layer_spec(config, experts=kind) for kind in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=norm_type(config))  # pyright: ignore
