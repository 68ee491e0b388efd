"""GPT-OSS 20B and 120B: attention sinks, every other layer windowed, experts with biases and a clamped activation."""

from __future__ import annotations

from mindspeed_llm.models.blocks import EMBEDDING_AND_HEAD, PRE_NORMS, QKV_BIAS, SPLIT_ATTENTION
from mindspeed_llm.models.experts import (
    EXPERTS_OF_MLP_SIZE,
    TRAINING_OF_THE_ROUTER,
    number_of_experts,
    plain_routing,
)
from mindspeed_llm.models.family import Column, Const, Expect, GateUp, Ignore, ModelFamily, ParamMap, Rename, Row
from mindspeed_llm.models.gemma2 import interleaved_windows
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, heads, plain, ties

_MCORE, _HF = "decoder.layers.{l}.", "model.layers.{l}."
_EXPERTS = _HF + "mlp.experts."


def _gate_up(kind: str) -> tuple[str, str]:
    """Gate and up of an expert, which stand in turn in one tensor of all experts."""
    return f"{_EXPERTS}gate_up_proj{kind}[{{e}}][0::2]", f"{_EXPERTS}gate_up_proj{kind}[{{e}}][1::2]"


FAMILY = ModelFamily(
    name="gpt_oss",
    hf_model_type="gpt_oss",
    hf_architectures=("GptOssForCausalLM",),
    config=(
        *SIZES,
        heads(head_dim=64),
        rope(theta=150000.0),
        ties(default=False),
        plain(
            "num_moe_experts",
            "window_size",
            "window_attn_skip_freq",
            "activation_func_clamp_value",
            softmax_type="learnable",
            glu_linear_offset=1.0,
        ),
        # x sigmoid(1.702 x), which megatron-core calls quick GELU.
        Const(add_bias_linear=True, add_qkv_bias=True, activation_func="quick_gelu"),
        Expect("hidden_act", "silu", why="the gate's sigmoid has a gain, which swiglu_alpha says"),
        Expect("swiglu_alpha", 1.702, why="the gain of megatron-core's quick GELU"),
        Rename("swiglu_limit", "activation_func_clamp_value", default=7.0),
        Expect("attention_bias", True, why="no published model is without"),
        interleaved_windows(2, window=128),
        *number_of_experts("num_local_experts"),
        EXPERTS_OF_MLP_SIZE,
        plain_routing(),
        TRAINING_OF_THE_ROUTER,
        Ignore("experts_per_token", "initial_context_length", why="say once more what other keys say"),
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        *SPLIT_ATTENTION,
        QKV_BIAS,
        ParamMap(_MCORE + "self_attention.linear_proj.bias", (_HF + "self_attn.o_proj.bias",)),
        ParamMap(_MCORE + "self_attention.core_attention.softmax_offset", (_HF + "self_attn.sinks",), shard=Column()),
        ParamMap(_MCORE + "mlp.router.weight", (_HF + "mlp.router.weight",), experts=True),
        ParamMap(_MCORE + "mlp.router.bias", (_HF + "mlp.router.bias",), experts=True),
        ParamMap(
            _MCORE + "mlp.experts.linear_fc1.weight{e}",
            _gate_up(""),
            GateUp(),
            Column(parts=2),
            transposed=True,
            experts=True,
        ),
        ParamMap(_MCORE + "mlp.experts.linear_fc1.bias{e}", _gate_up("_bias"), GateUp(), Column(parts=2), experts=True),
        ParamMap(
            _MCORE + "mlp.experts.linear_fc2.weight{e}",
            (_EXPERTS + "down_proj[{e}]",),
            shard=Row(),
            transposed=True,
            experts=True,
        ),
        ParamMap(_MCORE + "mlp.experts.linear_fc2.bias{e}", (_EXPERTS + "down_proj_bias[{e}]",), experts=True),
    ),
    chat_template="gpt_oss",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "swiglu_limit": 0.25,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
        "tie_word_embeddings": False,
    },
)
