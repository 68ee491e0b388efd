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
    module, _, kind = name.rpartition(".")
    rows, columns = _sizes(module.rpartition(".")[2], module, values)
    return (rows,) if kind == "bias" or columns is None else (rows, columns)


def _sizes(module: str, path: str, values: Mapping[str, Any]) -> tuple[int, int | None]:
    """Rows, and columns of what is a matrix; modules that are not listed are norms over the hidden size."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    groups = values["num_query_groups"] or heads
    channels = values["kv_channels"] or hidden // heads
    ffn = values["ffn_hidden_size"]
    if path.startswith(("embedding.word_embeddings", "output_layer")) and "norm" not in path:
        return values["padded_vocab_size"], hidden
    if path == "embedding.position_embeddings":
        return values["max_position_embeddings"], hidden
    over_heads = values["qk_norm_over_heads"]
    sizes: dict[str, tuple[int, int | None]] = {
        "linear_qkv": ((heads + 2 * groups) * channels, hidden),
        "linear_proj": (hidden, heads * channels),
        "linear_fc1": ((2 if values["gated_linear_unit"] else 1) * ffn, hidden),
        "linear_fc2": (hidden, ffn),
        "q_layernorm": (heads * channels if over_heads else channels, None),
        "k_layernorm": (groups * channels if over_heads else channels, None),
    }
    return sizes.get(module, (hidden, None))
