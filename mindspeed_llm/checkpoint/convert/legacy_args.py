"""The ``args`` inside Megatron-LM's checkpoints: its command line as it was, with flag names as attributes."""

# pyright: basic
# Attributes of a namespace have no types.

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.config.option import names
from mindspeed_llm.config.resolve import ARCHITECTURE_FIELDS
from mindspeed_llm.config.schema import field_table
from mindspeed_llm.config.spelled import as_flag, read_settings
from mindspeed_llm.config.values import convert
from mindspeed_llm.errors import ConfigError, ConversionError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_RENAMED: Mapping[str, str] = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "beta_fast": "rope_scaling_beta_fast",
    "beta_slow": "rope_scaling_beta_slow",
    "rope_scaling_original_max_position_embeddings": "original_max_position_embeddings",
}
"""Fields of ours that Megatron-LM or MindSpeed-LLM keeps under another name."""
_SIZES = ("padded_vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings", "group_query_attention")
_SWITCHES = ("swiglu", "squared_relu", "quick_geglu", "gelu_tanh", "use_rope_scaling", "add_rmsnorm_offset")
"""Attributes that mean other fields than their own, as the spellings of the command line do."""
_SCALING = names(
    """rope_scaling_factor rope_scaling_original_max_position_embeddings low_freq_factor high_freq_factor beta_fast
    beta_slow rope_scaling_mscale rope_scaling_mscale_all_dim rope_scaling_attention_factor"""
)
_ACTIVATIONS: Mapping[tuple[str, bool], str] = {
    ("silu", True): "swiglu",
    ("squared_relu", False): "squared_relu",
    ("quick_gelu", True): "quick_geglu",
    ("gelu_tanh", True): "gelu_tanh",
    ("gelu", True): "geglu",
}
"""Activation and whether it is gated -> the attribute that says so."""


def recorded_values(args: object) -> dict[str, Any]:
    """Fields of the run configuration that describe the model, as far as ``args`` gives them.

    ``num_layers`` is not among them, as Megatron's counts places without a layer too, and ``vocab_size`` is not: there
    it is that of a tokenizer.

    Raises:
        ConversionError: an attribute has a value that its field cannot have.
    """
    given = vars(args) if isinstance(args, SimpleNamespace) else {}
    attributes = {name: value for name, value in given.items() if value is not None}
    wanted = {*ARCHITECTURE_FIELDS, *_SIZES} - {"num_layers", "vocab_size"}
    if not attributes.get("use_rope_scaling") and "rope_scaling_type" not in attributes:
        # Megatron-LM's flags of scaling have defaults that say nothing then.
        wanted.difference_update(_SCALING)
    if not attributes.get("group_query_attention", True):
        wanted.discard("num_query_groups")
    found = dict(
        read_settings([(as_flag(name), True) for name in _SWITCHES if attributes.get(name) is True], "args").values
    )
    for name in sorted(wanted):
        theirs = _RENAMED.get(name, name)
        if theirs not in attributes:
            continue
        try:
            found[name] = convert(field_table()[name], attributes[theirs])
        except ConfigError as error:
            raise ConversionError(f"args.{theirs}: {error.what}", got=error.got, allowed=error.allowed) from error
    if found.get("mtp_num_layers") == 0:
        del found["mtp_num_layers"]
    if "num_attention_heads" in found:
        found.setdefault("num_query_groups", found["num_attention_heads"])
    return found


def kept_values(common: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Fields of the run configuration that ``common.pt`` gives: in our own saves all, in those of Megatron-LM what
    :func:`recorded_values` finds in ``args``, and ``num_layers``, which is counted.

    Args:
        common: its content.
        names: of the weights.

    Raises:
        ConversionError: see there.
    """
    if "args" not in common:
        return {name: value for section in common.get("config", {}).values() for name, value in section.items()}
    layers = {match[1] for name in names if (match := _LAYER.match(name))}
    return {**recorded_values(common["args"]), "num_layers": len(layers)}


def noop_layers(args: object) -> tuple[int, ...]:
    """Places without a layer, as MindSpeed-LLM keeps them: text, a set or a list.

    Raises:
        ConversionError: not numbers.
    """
    given = getattr(args, "noop_layers", None)
    try:
        parts = given.split(",") if isinstance(given, str) else given or ()
        return tuple(sorted(int(part) for part in parts if str(part).strip()))
    except (TypeError, ValueError) as error:
        raise ConversionError("args.noop_layers does not name places", got=repr(given)) from error


def namespace(
    values: Mapping[str, Any], target: Target, *, dtype: torch.dtype, chunks: int, transformer_impl: str, iteration: int
) -> SimpleNamespace:
    """What Megatron-LM compares and takes over when it loads (``check_checkpoint_args``, ``load_args_from_checkpoint``
    in megatron/training/checkpointing.py), and what MindSpeed-LLM's converters read.

    Args:
        values: the model, as fields of the run configuration.
        target: the layout.
        dtype: of the weights.
        chunks: of each stage.
        transformer_impl: ``local`` or ``transformer_engine``.
        iteration: of the save.
    """
    kept = {*ARCHITECTURE_FIELDS, *_SIZES} & values.keys()
    args = {_RENAMED.get(name, name): _plain(values[name]) for name in sorted(kept)}
    gated = values["gated_linear_unit"]
    for (activation, needs_gate), attribute in _ACTIVATIONS.items():
        args[attribute] = activation == values["activation_func"] and gated == needs_gate
    rotary = values["position_embedding_type"] == "rope"
    groups, heads = values["num_query_groups"] or values["num_attention_heads"], values["num_attention_heads"]
    args |= {
        "num_layers": values["num_layers"] + len(target.noop_layers),
        "noop_layers": ",".join(map(str, target.noop_layers)) or None,
        "num_layer_list": ",".join(map(str, target.layer_list)) if target.layer_list else None,
        "tensor_model_parallel_size": target.tp,
        "pipeline_model_parallel_size": target.pp,
        "expert_model_parallel_size": target.ep,
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": target.layers_per_virtual_stage,
        "world_size": target.tp * target.pp,
        "seq_length": values["max_position_embeddings"],
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": rotary,
        "attention_dropout": values["attention_dropout"],
        "hidden_dropout": values["hidden_dropout"],
        "apply_query_key_layer_scaling": values.get("apply_query_key_layer_scaling", False),
        "num_experts": values.get("num_moe_experts"),
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "transformer_impl": transformer_impl,
        "use_mcore_models": True,
        "ckpt_format": "torch",
        "data_parallel_random_init": False,
        "sequence_parallel": False,
        "iteration": iteration,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return SimpleNamespace(**args)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
