"""Shapes of whole megatron-core tensors, from the configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.checkpoint.names import NameTable

Shape = tuple[int, ...]


def planned_shapes(table: NameTable, values: Mapping[str, Any]) -> dict[str, Shape]:
    """The shape of every tensor of ``table``, vocabulary padding (``padded_vocab_size``) included."""
    return {name: whole_shape(name, values) for name in table.entries}


def whole_shape(name: str, values: Mapping[str, Any]) -> Shape:
    """The shape that megatron-core gives the tensor ``name`` of a model, all tensor-parallel parts together.

    Args:
        values: fields of the run configuration that describe the model.
    """
    path, _, kind = name.rpartition(".")
    module = path.rpartition(".")[2]
    sizes = _mlp(module, path, values) if ".mlp." in f"{path}." else _attention(module, values)
    rows, columns = sizes or _other(path, values)
    return (rows,) if kind.startswith(("bias", "expert_bias")) or columns is None else (rows, columns)


Sizes = tuple[int, int | None]
"""Rows, and columns of what is a matrix."""


def _other(path: str, values: Mapping[str, Any]) -> Sizes:
    """Tables of the vocabulary and of positions; what is not listed anywhere is a norm over the hidden size."""
    hidden = values["hidden_size"]
    if path.startswith(("embedding.word_embeddings", "output_layer")) and "norm" not in path:
        return values["padded_vocab_size"], hidden
    if path == "embedding.position_embeddings":
        return values["max_position_embeddings"], hidden
    return hidden, None


def _mlp(module: str, path: str, values: Mapping[str, Any]) -> Sizes | None:
    hidden, experts = values["hidden_size"], values["num_moe_experts"] or 0
    width = values["ffn_hidden_size"]
    if ".experts." in path:
        width = values["moe_ffn_hidden_size"]
    elif ".shared_experts." in path:
        width = values["moe_shared_expert_intermediate_size"]
    sizes: dict[str, Sizes] = {
        "linear_fc1": ((2 if values["gated_linear_unit"] else 1) * width, hidden),
        "linear_fc2": (hidden, width),
        "router": (experts, hidden),
        "shared_experts": (1, hidden),
    }
    return sizes.get(module)


def _attention(module: str, values: Mapping[str, Any]) -> Sizes | None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if values["multi_latent_attention"]:
        return _latent_attention(module, values)
    groups = values["num_query_groups"] or heads
    channels = values["kv_channels"] or hidden // heads
    over_heads = values["qk_norm_over_heads"]
    sizes: dict[str, Sizes] = {
        "linear_qkv": ((heads + 2 * groups) * channels, hidden),
        "linear_proj": (hidden, heads * channels),
        "core_attention": (heads, None),
        "q_layernorm": (heads * channels if over_heads else channels, None),
        "k_layernorm": (groups * channels if over_heads else channels, None),
    }
    return sizes.get(module)


def _latent_attention(module: str, values: Mapping[str, Any]) -> Sizes | None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    latent, queries = values["kv_lora_rank"], values["q_lora_rank"] or 0
    plain, rotated, value = values["qk_head_dim"], values["qk_pos_emb_head_dim"], values["v_head_dim"]
    sizes: dict[str, Sizes] = {
        "linear_q_proj": (heads * (plain + rotated), hidden),
        "linear_q_down_proj": (queries, hidden),
        "q_layernorm": (queries, None),
        "linear_q_up_proj": (heads * (plain + rotated), queries),
        "linear_kv_down_proj": (latent + rotated, hidden),
        "kv_layernorm": (latent, None),
        "linear_kv_up_proj": (heads * (plain + value), latent),
        "linear_proj": (hidden, heads * value),
    }
    return sizes.get(module)
