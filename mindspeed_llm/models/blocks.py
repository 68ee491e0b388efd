"""Groups of weights that more than one family uses."""

from __future__ import annotations

import dataclasses

from mindspeed_llm.models.family import Column, Drop, GateUp, ParamMap, QkvByGroup, Row, Vocab

EMBEDDING_AND_HEAD = (
    ParamMap("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shard=Vocab()),
    ParamMap("decoder.final_layernorm.weight", ("model.norm.weight",)),
    ParamMap("output_layer.weight", ("lm_head.weight",), shard=Vocab(), tied_to="embedding.word_embeddings.weight"),
)

_MCORE = "decoder.layers.{l}."
_HF = "model.layers.{l}."


def _qkv(kind: str) -> tuple[str, ...]:
    return tuple(f"{_HF}self_attn.{name}_proj.{kind}" for name in "qkv")


SPLIT_ATTENTION = (
    ParamMap(_MCORE + "self_attention.linear_qkv.weight", _qkv("weight"), QkvByGroup(), Column()),
    ParamMap(_MCORE + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), shard=Row()),
    Drop(_HF + "self_attn.rotary_emb.inv_freq", "computed from the config; old checkpoints stored it"),
)
"""q, k and v apart."""

SPLIT_GATED_MLP = (
    ParamMap(
        _MCORE + "mlp.linear_fc1.weight",
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        GateUp(),
        Column(parts=2),
    ),
    ParamMap(_MCORE + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), shard=Row()),
)
"""gate and up apart."""

DENSE_LAYERS_MLP = tuple(dataclasses.replace(weight, experts=False) for weight in SPLIT_GATED_MLP)
"""The same, in the layers of a mixture of experts that have none."""

FUSED_GATED_MLP = (
    # Gate rows, then up rows: megatron-core's order.
    ParamMap(_MCORE + "mlp.linear_fc1.weight", (_HF + "mlp.gate_up_proj.weight",), shard=Column(parts=2)),
    ParamMap(_MCORE + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), shard=Row()),
)

PRE_NORMS = (
    ParamMap(_MCORE + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
    ParamMap(_MCORE + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
)
"""The second is named for what stands before it."""

SANDWICH_NORMS = (
    ParamMap(_MCORE + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
    ParamMap(_MCORE + "post_attn_norm.weight", (_HF + "post_attention_layernorm.weight",)),
    ParamMap(_MCORE + "pre_mlp_layernorm.weight", (_HF + "pre_feedforward_layernorm.weight",)),
    ParamMap(_MCORE + "post_mlp_layernorm.weight", (_HF + "post_feedforward_layernorm.weight",)),
)
"""Around attention and around the MLP, by Gemma's names."""

QK_NORMS = (
    ParamMap(_MCORE + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",)),
    ParamMap(_MCORE + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",)),
)
"""One weight for all heads."""

PRE_NORM_BLOCK = (*PRE_NORMS, *SPLIT_ATTENTION, *SPLIT_GATED_MLP)

QKV_BIAS = ParamMap(
    _MCORE + "self_attention.linear_qkv.bias", _qkv("bias"), QkvByGroup(), Column(), when="add_qkv_bias"
)
LINEAR_BIASES = (
    ParamMap(_MCORE + "self_attention.linear_qkv.bias", _qkv("bias"), QkvByGroup(), Column(), when="add_bias_linear"),
    ParamMap(_MCORE + "self_attention.linear_proj.bias", (_HF + "self_attn.o_proj.bias",), when="add_bias_linear"),
    ParamMap(
        _MCORE + "mlp.linear_fc1.bias",
        (_HF + "mlp.gate_proj.bias", _HF + "mlp.up_proj.bias"),
        GateUp(),
        Column(parts=2),
        when="add_bias_linear",
    ),
    ParamMap(_MCORE + "mlp.linear_fc2.bias", (_HF + "mlp.down_proj.bias",), when="add_bias_linear"),
)
"""Biases on every linear layer of the block, as ``add_bias_linear`` makes them."""


def layer_norm(mcore: str, hf: str) -> tuple[ParamMap, ParamMap]:
    """Weight and bias of one norm."""
    return ParamMap(mcore + ".weight", (hf + ".weight",)), ParamMap(mcore + ".bias", (hf + ".bias",))
