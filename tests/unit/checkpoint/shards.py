"""Stand-ins for model chunks: modules with the names and shapes of a sharded model, and nothing to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.models.family import ModelFamily
from mindspeed_llm.models.registry import family_for


def family_and_config(folder: Path, **changes: Any) -> tuple[ModelFamily, RunConfig]:
    """The family of a folder, and what it reads of a run's configuration."""
    hf_config = hf_io.read_config(folder)
    family = family_for(hf_config)
    values = {**family.config_to_values(hf_config), **changes}
    return family, with_values(values)


def with_values(values: Mapping[str, Any]) -> RunConfig:
    return cast(RunConfig, SimpleNamespace(model=SimpleNamespace(**values), transformer=SimpleNamespace()))


Shapes = dict[str, tuple[int, ...]]


def dense_shapes(cfg: RunConfig, *, layers: Sequence[int], first: bool, last: bool, tp: int = 1) -> Shapes:
    """Names (layers by their place in the chunk) and local shapes of a dense chunk, as megatron-core makes them."""
    v = vars(cfg.model)
    hidden, ffn, channels = v["hidden_size"], v["ffn_hidden_size"], v["kv_channels"]
    qkv = (v["num_attention_heads"] + 2 * v["num_query_groups"]) * channels // tp
    vocab = -(-v["vocab_size"] // (128 * tp)) * 128
    shapes: Shapes = {}
    if first:
        shapes["embedding.word_embeddings.weight"] = (vocab, hidden)
    for place in range(len(layers)):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attention.linear_qkv.weight": (qkv, hidden),
            "self_attention.linear_proj.weight": (hidden, v["num_attention_heads"] * channels // tp),
            "pre_mlp_layernorm.weight": (hidden,),
            "mlp.linear_fc1.weight": (2 * ffn // tp, hidden),
            "mlp.linear_fc2.weight": (hidden, ffn // tp),
        }
        if v["add_qkv_bias"]:
            layer["self_attention.linear_qkv.bias"] = (qkv,)
        shapes |= {f"decoder.layers.{place}.{name}": shape for name, shape in layer.items()}
    if last:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
    if last and (v["untie_embeddings_and_output_weights"] or not first):
        shapes["output_layer.weight"] = (vocab, hidden)
    return shapes


class _Node(nn.Module):
    layer_number: int


def chunk(shapes: Mapping[str, tuple[int, ...]], layers: Sequence[int] = ()) -> nn.Module:
    """A module tree with NaN parameters of ``shapes``; ``layers`` numbers its decoder layers, from 0."""
    root = _Node()
    for name, shape in shapes.items():
        node: nn.Module = root
        *path, leaf = name.split(".")
        for step in path:
            if step not in dict(node.named_children()):
                node.add_module(step, _Node())
            node = node.get_submodule(step)
        node.register_parameter(leaf, nn.Parameter(torch.full(shape, torch.nan)))
    for place, layer in enumerate(layers):
        cast(_Node, root.get_submodule(f"decoder.layers.{place}")).layer_number = layer + 1
    return root


def dense_chunk(
    cfg: RunConfig, *, tp: int = 1, first: bool = True, last: bool = True, layers: Sequence[int] | None = None
) -> nn.Module:
    """One chunk of a dense model; by default all of it."""
    layers = range(vars(cfg.model)["num_layers"]) if layers is None else layers
    return chunk(dense_shapes(cfg, layers=layers, first=first, last=last, tp=tp), layers)
