"""Multi-head latent attention: keys, values and queries are made of a few channels that all heads share [DeepSeek-V2,
section 2.1].
"""

# pyright: basic
# megatron-core's modules take more than their annotations say.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.device import current

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule


class DownProjection(MegatronModule):
    """A linear map that every tensor-parallel rank has whole, for the tokens it holds: ``[..., in] -> [..., out]``."""

    def __init__(self, config: SuiteTransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__(config)
        device = "cpu" if config.use_cpu_initialization else current().torch_device
        self.weight = Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        # With sequence parallelism each rank sees some of the tokens: megatron-core sums their gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization and config.init_method is not None:
            config.init_method(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """The map."""
        return F.linear(tokens, self.weight)


@dataclass
class LatentAttentionSubmodules:
    """What fills the slots of :class:`LatentSelfAttention`."""

    core_attention: type
    linear_proj: type
    norm: type


class LatentSelfAttention(Attention):
    """Self-attention over latents, with megatron-core's names of tensors.

    A head's query and key are ``qk_pos_emb_head_dim`` rotated channels, of which all heads share the key's, before
    ``qk_head_dim`` others: megatron-core turns the first channels of a head, and scores do not depend on the order. Its
    own class turns the last ones and loses, on more than one tensor-parallel rank, part of the gradient of the shared
    key.
    """

    config: SuiteTransformerConfig

    def __init__(
        self,
        config: SuiteTransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", **kwargs)  # type: ignore[arg-type]
        heads, latent = config.num_attention_heads, config.kv_lora_rank
        assert latent is not None, "a rule demands it"
        channels = config.qk_pos_emb_head_dim + config.qk_head_dim
        norm = submodules.norm if config.qk_layernorm else IdentityOp
        # megatron-core looks at both before it fuses what it cannot fuse here.
        self.q_layernorm: Any = None
        self.k_layernorm = None
        if config.q_lora_rank is None:
            self.linear_q_proj = self._up(config.hidden_size, heads * channels)
        else:
            self.linear_q_down_proj = DownProjection(config, config.hidden_size, config.q_lora_rank)
            self.q_layernorm = norm(config, config.q_lora_rank, config.layernorm_epsilon)
            self.linear_q_up_proj = self._up(config.q_lora_rank, heads * channels)
        self.linear_kv_down_proj = DownProjection(config, config.hidden_size, latent + config.qk_pos_emb_head_dim)
        self.kv_layernorm = norm(config, latent, config.layernorm_epsilon)
        self.linear_kv_up_proj = self._up(latent, heads * (config.qk_head_dim + config.v_head_dim))

    def _up(self, input_size: int, output_size: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,  # type: ignore[arg-type]
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any = None, **_kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys ``[s, b, n, d]``, not yet rotated, and values ``[s, b, n, d_v]``, of this rank's heads.

        Args:
            hidden_states: ``[s, b, h]``, with sequence parallelism this rank's part of ``s``.
            key_value_states: None; of cross-attention.
        """
        config, heads = self.config, self.num_attention_heads_per_partition
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        query = query.unflatten(-1, (heads, -1))
        # Hugging Face's and megatron-core's weights have the rotated channels last.
        query = query.roll(config.qk_pos_emb_head_dim, dims=-1)
        latent, shared = self.linear_kv_down_proj(hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key, value = key_value.unflatten(-1, (heads, -1)).split([config.qk_head_dim, config.v_head_dim], dim=-1)
        # Each rank's heads give a part of the shared key's gradient: both sum them in backward.
        if config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
        key = torch.cat([shared.unsqueeze(-2).expand(*key.shape[:-1], -1), key], dim=-1)
        return query, key, value
