"""megatron-core's GPTModel with the suite's rotary angles, embeddings and logits, and a loss that masks padded
vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from mindspeed_llm.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.core.transformer.norms import norm_type
from mindspeed_llm.core.transformer.rotary import ScaledRotaryEmbedding

from megatron.core.models.gpt import GPTModel


class SuiteGPTModel(GPTModel):
    """One pipeline chunk of a decoder-only language model."""

    config: SuiteTransformerConfig

    def __init__(self, config: SuiteTransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.position_embedding_type == "rope":
            self.rotary_pos_emb = ScaledRotaryEmbedding(
                config, kwargs.get("rotary_percent", 1.0), kwargs.get("rotary_base", 10000), self.pg_collection.cp
            )
        if hasattr(self, "embedding"):
            self._change_embeddings()
        if self.post_process:
            self._change_logits()

    def _change_embeddings(self) -> None:
        """Scale or norm what the embedding gives, wherever megatron-core calls it."""
        config = self.config
        norm = None
        if config.embedding_layernorm:
            norm = self.embedding.norm = norm_type(config)(config, config.hidden_size, config.layernorm_epsilon)

        def change(_module: Any, _args: Any, embedded: torch.Tensor) -> torch.Tensor:
            if norm is not None:
                embedded = norm(embedded)
            if config.embedding_multiplier != 1.0:
                # Gemma rounds the factor to the embeddings' number format.
                embedded = embedded * torch.tensor(config.embedding_multiplier, dtype=embedded.dtype)
            return embedded

        if norm is not None or config.embedding_multiplier != 1.0:
            self.embedding.register_forward_hook(change)

    def _change_logits(self) -> None:
        """Scale and cap the logits, wherever megatron-core computes them; they are the next numbers that are read."""
        multiplier, cap = self.config.output_multiplier, self.config.output_logit_softcapping

        def change(_module: Any, _args: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
            logits, bias = output
            if multiplier != 1.0:
                logits = logits * multiplier
            if cap is not None:
                logits = torch.tanh(logits / cap) * cap
            return logits, bias

        def normalise(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            weight = kwargs.get("weight")
            return args, {**kwargs, "weight": F.normalize(layer.weight if weight is None else weight)}

        if multiplier != 1.0 or cap is not None:
            self.output_layer.register_forward_hook(change)
        if self.config.normalize_output_weight:
            self.output_layer.register_forward_pre_hook(normalise, with_kwargs=True)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Loss of each token.

        Args:
            labels: ``[b, s]``.
            logits: ``[s, b, v]``, this tensor-parallel rank's part of the padded vocabulary.

        Returns:
            ``[b, s]`` float32, in nats.
        """
        loss = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1), self.config.true_vocab_size, self.pg_collection.tp
        )
        return loss.transpose(0, 1).contiguous()
