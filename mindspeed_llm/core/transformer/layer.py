"""megatron-core's decoder layer and self-attention with what some families add to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_llm.core.transformer.attention import CoreAttention, layer_window
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.core.transformer.norms import norm_type
from mindspeed_llm.core.transformer.rotary import LOCAL

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

Join = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
"""What joins a block's output (and its bias) to the residual, given the dropout."""


class SuiteSelfAttention(SelfAttention):
    """Self-attention that takes the rotary angles of its own kind, where a model has two."""

    def __init__(self, config: SuiteTransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rotary_kind = LOCAL if layer_window(config, self.layer_number) is not None else 0

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> Any:
        """As megatron-core's, with ``rotary_pos_emb`` ``[2, s, 1, 1, dim]``."""
        if rotary_pos_emb is not None:
            rotary_pos_emb = rotary_pos_emb[self.rotary_kind]
        return super().forward(hidden_states, *args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class NormedCoreAttention(CoreAttention):
    """A core attention that norms the queries and keys of each head first: by then they are rotated."""

    def __init__(self, config: SuiteTransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        norm, channels = norm_type(config), config.kv_channels
        assert channels is not None, "derived by now"
        # megatron-core knows by these names that each tensor-parallel rank has the gradient of its heads alone.
        self.q_layernorm = norm(config, channels, config.layernorm_epsilon)
        self.k_layernorm = norm(config, channels, config.layernorm_epsilon)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """See :meth:`CoreAttention.forward`."""
        return super().forward(self.q_layernorm(query), self.k_layernorm(key), value, *args, **kwargs)


class SuiteTransformerLayer(TransformerLayer):
    """A decoder layer that norms (``post_norm``) and scales (``residual_multiplier``) what each of its blocks gives."""

    def __init__(
        self, config: SuiteTransformerConfig, submodules: TransformerLayerSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        norms: list[torch.nn.Module | None] = [None, None]
        if config.post_norm:
            norms = [norm_type(config)(config, config.hidden_size, config.layernorm_epsilon) for _ in norms]
            # MindSpeed-LLM's names, so that its checkpoints are read.
            self.post_attn_norm, self.post_mlp_layernorm = norms
        self.self_attn_bda, self.mlp_bda = (self._joins(norm, config.residual_multiplier) for norm in norms)

    @staticmethod
    def _joins(norm: torch.nn.Module | None, multiplier: float) -> Callable[[bool, bool], Join]:
        def choose(training: bool, fused: bool) -> Join:
            add = get_bias_dropout_add(training, fused)

            def join(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
                output, bias = output_with_bias
                if bias is not None:
                    output = output + bias
                if norm is not None:
                    output = norm(output)
                if multiplier != 1.0:
                    output = output * multiplier
                return add((output, None), residual, dropout)

            return join

        return choose
