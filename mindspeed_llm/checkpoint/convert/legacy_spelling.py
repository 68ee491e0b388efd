"""How one tensor is called in per-rank files of different layers, and what is not a megatron-core model at all.

With TransformerEngine the norm before a linear layer is part of that layer; megatron-core's own layers, and the
families' tables, have it beside them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from mindspeed_llm.errors import ConversionError

_FUSED: Mapping[str, str] = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
}
"""A linear layer that TransformerEngine gives a norm, and the norm."""
_NORM_IN_LINEAR = re.compile(r"(.*\.layers\.\d+\.)(.+)\.layer_norm_(weight|bias)")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))\d+")
_SEQUENTIAL = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_NORM = re.compile(r"(.*\.layers\.\d+\.)(.+layernorm)\.(weight|bias)")


def local_name(key: str) -> str | None:
    """``key`` as megatron-core's own layers call it; None for what is no weight."""
    if key.endswith("_extra_state"):
        return None
    match = _NORM_IN_LINEAR.fullmatch(key)
    if match is None or match[2] not in _FUSED:
        return key
    return f"{match[1]}{_FUSED[match[2]]}.{match[3]}"


def transformer_engine_name(name: str, names: Collection[str]) -> str:
    """The inverse of :func:`local_name`.

    Args:
        name: of the tensor.
        names: of all tensors of the model: a norm is fused with a layer that is there.
    """
    match = _NORM.fullmatch(name)
    linear = match and next((linear for linear, norm in _FUSED.items() if norm == match[2]), None)
    if match is None or linear is None or f"{match[1]}{linear}.weight" not in names:
        return name
    return f"{match[1]}{linear}.layer_norm_{match[3]}"


def sequential_name(name: str, local: int) -> str:
    """A tensor of an expert as megatron-core's ``SequentialMLP`` calls it, the kind that every software can read.

    Args:
        name: the tensor's.
        local: which expert of its rank.
    """
    match = _EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}local_experts.{local}.{match[2]}"


def grouped_name(name: str) -> str:
    """The inverse of :func:`sequential_name`: the local expert's number is at the end."""
    match = _SEQUENTIAL.fullmatch(name)
    return name if match is None else f"{match[1]}{match[3]}{match[2]}"


def require_megatron_core(label: object, keys: Collection[str]) -> None:
    """Refuses what other model classes have left.

    Raises:
        ConversionError: with what it is.
    """
    kinds = {
        "language_model": "a model of Megatron-LM from before megatron-core (--use-legacy-models)",
        "lora_A": "a model with LoRA adapters beside its weights",
        "mlp.experts.weight": "experts in one matrix (--moe-grouped-gemm); those in one each are read",
    }
    for mark, kind in kinds.items():
        strange = [key for key in keys if mark in key]
        if strange:
            raise ConversionError(
                f"{label} holds {kind}",
                got=", ".join(sorted(strange)[:3]),
                allowed="a megatron-core model",
                fix="convert or merge it with the software that wrote it",
            )
