"""Floating-point operations of a training step, as model FLOPs utilisation counts them."""

from __future__ import annotations

from mindspeed_llm.config.run import RunConfig


def flops_per_token(cfg: RunConfig) -> float:
    """Forward and backward operations per token of a dense decoder.

    Two per weight and token for each matrix multiplication, and for attention two products of ``s / 2`` (causal)
    keys per query; the backward pass costs twice the forward pass [Narayanan et al. 2021, appendix]. Recomputation
    does not count.
    """
    shape = cfg.transformer
    head: int = shape.kv_channels  # pyright: ignore[reportAssignmentType]  derived by now, as the others
    groups: int = shape.num_query_groups  # pyright: ignore[reportAssignmentType]
    ffn: int = shape.ffn_hidden_size  # pyright: ignore[reportAssignmentType]
    hidden: int = shape.hidden_size  # pyright: ignore[reportAssignmentType]
    heads: int = shape.num_attention_heads  # pyright: ignore[reportAssignmentType]
    layers: int = shape.num_layers  # pyright: ignore[reportAssignmentType]
    length: int = cfg.training.seq_length  # pyright: ignore[reportAssignmentType]
    vocabulary: int = cfg.model.padded_vocab_size  # pyright: ignore[reportAssignmentType]
    attention_weights = hidden * head * (2 * heads + 2 * groups)
    scores = heads * head * length  # scores and values, each over half of the keys, two operations per product
    mlp_weights = hidden * ffn * (3 if shape.gated_linear_unit else 2)
    forward = layers * (2 * (attention_weights + mlp_weights) + 2 * scores) + 2 * hidden * vocabulary
    return 3.0 * forward
