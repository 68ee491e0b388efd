"""megatron-core's GPTModel with scaled rotary frequencies and the loss that masks padded vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_llm.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
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
