"""What stands in for the families that transformers has no class for: the nearest class it has, with weights re-laid.

Re-laying only moves values, so it carries gradients as it carries weights, and the optimizer does not notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


class Oracle(NamedTuple):
    """How one family is computed by transformers.

    Attributes:
        build: the model for a config.json of the family.
        relay: the tensors of that model under the family's names, in the family's layout.
    """

    build: Callable[[Config], Any]
    relay: Callable[[State, Config], dict[str, Tensor]]


def _renamed(state: State, names: Mapping[str, str]) -> dict[str, Tensor]:
    """``state`` with each first match of a pattern in ``names`` replaced."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for pattern, replacement in names.items():
            name, count = re.subn(pattern, replacement, name)
            if count:
                break
        result[name] = tensor
    return result


def _merged(
    state: State, parts: tuple[str, ...], whole: str, merge: Callable[[list[Tensor]], Tensor]
) -> dict[str, Tensor]:
    """``state`` with the tensors called like ``parts`` in each layer made one."""
    result = dict(state)
    for name in state:
        if parts[0] in name:
            found = [result.pop(name.replace(parts[0], part)) for part in parts]
            result[name.replace(parts[0], whole)] = merge(found)
    return result


def _rope(config: Config) -> dict[str, Any]:
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", "default")
    return {"rope_type": kind, "rope_theta": config.get("rope_theta", 1e4), **scaling}


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
)


def _sizes(config: Config) -> dict[str, Any]:
    return {key: config[key] for key in _SIZES if key in config} | {"pad_token_id": None}


# https://huggingface.co/THUDM/chatglm3-6b/blob/main/modeling_chatglm.py: GLM in one matrix each.
def _glm(config: Config) -> Any:
    groups = config["multi_query_group_num"] if config["multi_query_attention"] else config["num_attention_heads"]
    return GlmForCausalLM(
        GlmConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=groups,
            head_dim=config["kv_channels"],
            rms_norm_eps=config["layernorm_epsilon"],
            attention_bias=config["add_qkv_bias"],
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4 * config.get("rope_ratio", 1),
                "partial_rotary_factor": 0.5,
            },
            tie_word_embeddings=False,
            pad_token_id=None,
        )
    )


def _to_chatglm(state: State, config: Config) -> dict[str, Tensor]:
    del config
    for kind in ("weight", "bias"):
        parts = tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv")
        state = _merged(state, parts, f"self_attention.query_key_value.{kind}", torch.cat)
    return _renamed(
        state,
        {
            r"^model\.embed_tokens": "transformer.embedding.word_embeddings",
            r"^model\.norm": "transformer.encoder.final_layernorm",
            r"^lm_head": "transformer.output_layer",
            r"^model\.layers\.(\d+)\.self_attn\.o_proj": r"transformer.encoder.layers.\1.self_attention.dense",
            r"^model\.layers\.(\d+)\.mlp\.gate_up_proj": r"transformer.encoder.layers.\1.mlp.dense_h_to_4h",
            r"^model\.layers\.(\d+)\.mlp\.down_proj": r"transformer.encoder.layers.\1.mlp.dense_4h_to_h",
            r"^model\.": "transformer.encoder.",
        },
    )


# https://huggingface.co/internlm/internlm2-7b/blob/main/modeling_internlm2.py: wqkv is [groups, q.. k v, head, hidden].
def _llama(config: Config) -> Any:
    length = config.get("max_position_embeddings") or config["model_max_length"]
    return LlamaForCausalLM(
        LlamaConfig(**_sizes(config), max_position_embeddings=length, rope_parameters=_rope(config))
    )


def _to_internlm2(state: State, config: Config) -> dict[str, Tensor]:
    groups = config["num_key_value_heads"]
    head = config["hidden_size"] // config["num_attention_heads"]

    def by_group(parts: list[Tensor]) -> Tensor:
        grouped = [part.view(groups, -1, head, part.shape[1]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 2)

    parts = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
    return _renamed(
        _merged(state, parts, "attention.wqkv.weight", by_group),
        {
            r"^model\.embed_tokens": "model.tok_embeddings",
            r"^lm_head": "output",
            r"self_attn\.o_proj": "attention.wo",
            r"mlp\.gate_proj": "feed_forward.w1",
            r"mlp\.up_proj": "feed_forward.w3",
            r"mlp\.down_proj": "feed_forward.w2",
            r"input_layernorm": "attention_norm",
            r"post_attention_layernorm": "ffn_norm",
        },
    )


# https://huggingface.co/internlm/internlm3-8b-instruct/blob/main/modeling_internlm3.py: Llama, or with biases
# Qwen2 but for its head size.
def _internlm3(config: Config) -> Any:
    length, rope, head = config["max_position_embeddings"], _rope(config), config["head_dim"]
    if not config["qkv_bias"]:
        llama = LlamaConfig(**_sizes(config), max_position_embeddings=length, rope_parameters=rope, head_dim=head)
        return LlamaForCausalLM(llama)
    qwen = Qwen2Config(**_sizes(config), max_position_embeddings=length, rope_parameters=rope)
    qwen.head_dim = head
    return Qwen2ForCausalLM(qwen)


# https://huggingface.co/openbmb/MiniCPM-2B-sft-bf16/blob/main/modeling_minicpm.py: Granite's factors by other names.
def _granite(config: Config) -> Any:
    return GraniteForCausalLM(
        GraniteConfig(
            **_sizes(config),
            max_position_embeddings=config["max_position_embeddings"],
            rope_parameters=_rope(config),
            embedding_multiplier=config["scale_emb"],
            residual_multiplier=config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
            logits_scaling=config["hidden_size"] / config["dim_model_base"],
            attention_multiplier=(config["hidden_size"] // config["num_attention_heads"]) ** -0.5,
        )
    )


def _as_it_is(state: State, config: Config) -> dict[str, Tensor]:
    del config
    return dict(state)


class _NormHead(torch.nn.Linear):
    """``NormHead`` of https://huggingface.co/baichuan-inc/Baichuan2-7B-Base/blob/main/modeling_baichuan.py."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, F.normalize(self.weight))


class _WithAlibi(LlamaForCausalLM):
    """Llama that turns nothing (all positions are 0) and adds ALiBi, as Baichuan2-13B's ``BaichuanAttention``."""

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        length = input_ids.shape[1]
        heads = self.config.num_attention_heads
        bias = build_alibi_tensor(torch.ones_like(input_ids), heads, torch.float32).view(-1, heads, 1, length)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mask = bias.expand(-1, -1, length, -1).masked_fill(hidden, torch.finfo(torch.float32).min)
        return super().forward(input_ids, attention_mask=mask, position_ids=0 * input_ids, use_cache=False, **kwargs)


def _baichuan(config: Config) -> Any:
    if config.get("max_position_embeddings"):
        model = _llama(config)
    else:
        model = _WithAlibi(LlamaConfig(**_sizes(config), max_position_embeddings=config["model_max_length"]))
    model.lm_head = _NormHead(config["hidden_size"], config["vocab_size"], bias=False)
    return model


def _to_baichuan(state: State, config: Config) -> dict[str, Tensor]:
    del config
    parts = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
    return _merged(state, parts, "self_attn.W_pack.weight", torch.cat)


# https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/config.json: DeepSeek-V3 by another name.
def _deepseek_v3(config: Config) -> Any:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**config, "pad_token_id": None}))


def _experts_apart(state: State, config: Config) -> dict[str, Tensor]:
    """transformers keeps all experts of a layer in one tensor, gate above up."""
    del config
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        place, _, last = name.rpartition(".")
        if not place.endswith(".experts"):
            result[name] = tensor
            continue
        for number, expert in enumerate(tensor.unbind()):
            parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
            parts = parts if last == "gate_up_proj" else [("down_proj", expert)]
            result |= {f"{place}.{number}.{part}.weight": matrix for part, matrix in parts}
    return result


# https://huggingface.co/inclusionAI/Ling-mini-2.0/blob/main/modeling_bailing_moe_v2.py: GLM-4.5 with stacked q, k, v.
def _glm4_moe(config: Config) -> Any:
    kept = (
        *("max_position_embeddings", "head_dim", "moe_intermediate_size", "num_experts_per_tok", "n_group"),
        *("topk_group", "first_k_dense_replace", "routed_scaling_factor", "use_qk_norm"),
    )
    partial = {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
    return Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **_sizes(config),
            **{key: config[key] for key in kept},
            n_routed_experts=config["num_experts"],
            n_shared_experts=config["num_shared_experts"],
            attention_bias=config["use_qkv_bias"],
            rope_parameters=_rope(config) | partial,
        )
    )


def _to_bailing(state: State, config: Config) -> dict[str, Tensor]:
    parts = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
    return _renamed(
        _merged(_experts_apart(state, config), parts, "attention.query_key_value.weight", torch.cat),
        {
            r"^model\.embed_tokens": "model.word_embeddings",
            r"self_attn\.o_proj": "attention.dense",
            r"self_attn\.q_norm": "attention.query_layernorm",
            r"self_attn\.k_norm": "attention.key_layernorm",
            r"e_score_correction_bias": "expert_bias",
        },
    )


ORACLES: Mapping[str, Oracle] = MappingProxyType(
    {
        "bailing_moe_v2": Oracle(_glm4_moe, _to_bailing),
        "baichuan": Oracle(_baichuan, _to_baichuan),
        "chatglm": Oracle(_glm, _to_chatglm),
        "internlm2": Oracle(_llama, _to_internlm2),
        "internlm3": Oracle(_internlm3, _as_it_is),
        "kimi_k2": Oracle(_deepseek_v3, _experts_apart),
        "minicpm": Oracle(_granite, _as_it_is),
    }
)
"""By family."""
