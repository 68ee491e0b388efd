"""ChatGLM3, and GLM-4 9B in the layout of its own code (``glm-4-9b-chat``)."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import (
    Column,
    Const,
    Derived,
    Drop,
    Expect,
    Ignore,
    ModelFamily,
    ParamMap,
    QkvStacked,
    Rename,
    Row,
    Values,
    Vocab,
)
from mindspeed_llm.models.rules import BOOKKEEPING, PLAIN_DECODER, TOKENS_AND_GENERATION, plain, ties

_MCORE, _HF = "decoder.layers.{l}.", "transformer.encoder.layers.{l}."
_BASE = 10000.0


def _heads_to_values(hf_config: Values) -> dict[str, Any]:
    heads = hf_config.get("num_attention_heads")
    if not heads:
        raise ConversionError("config.json lacks 'num_attention_heads'")
    groups = hf_config.get("multi_query_group_num", 1) if hf_config.get("multi_query_attention") else heads
    return {"num_attention_heads": heads, "group_query_attention": groups != heads, "num_query_groups": groups}


def _heads_to_hf(values: Values) -> dict[str, Any]:
    heads, groups = values["num_attention_heads"], values["num_query_groups"]
    return {
        "num_attention_heads": heads,
        "multi_query_attention": groups != heads,
        "multi_query_group_num": groups,
    }


def _rope_to_values(hf_config: Values) -> dict[str, Any]:
    return {"rotary_base": _BASE * (hf_config.get("rope_ratio") or 1)}


def _rope_to_hf(values: Values) -> dict[str, Any]:
    return {"rope_ratio": values["rotary_base"] / _BASE}


FAMILY = ModelFamily(
    name="chatglm",
    hf_model_type="chatglm",
    hf_architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    config=(
        BOOKKEEPING,
        TOKENS_AND_GENERATION,
        *PLAIN_DECODER,
        Rename("num_layers", "num_layers"),
        Rename("hidden_size", "hidden_size"),
        Rename("ffn_hidden_size", "ffn_hidden_size"),
        Rename("kv_channels", "kv_channels", default=128),
        Derived(
            "num_attention_heads",
            "multi_query_attention",
            "multi_query_group_num",
            to_values=_heads_to_values,
            to_hf=_heads_to_hf,
        ),
        Rename("padded_vocab_size", "vocab_size"),
        Rename("seq_length", "max_position_embeddings"),
        Rename("layernorm_epsilon", "layernorm_epsilon", default=1e-5),
        Rename("attention_dropout", "attention_dropout", default=0.0, recipe=True),
        Rename("hidden_dropout", "hidden_dropout", default=0.0, recipe=True),
        Rename("add_qkv_bias", "add_qkv_bias", default=False),
        Derived("rope_ratio", to_values=_rope_to_values, to_hf=_rope_to_hf),
        ties(default=False),
        plain(rotary_percent=0.5, rotary_interleaved=True),
        Const(activation_func="silu", position_embedding_type="rope", rope_scaling_type=None, add_bias_linear=False),
        Expect("add_bias_linear", False, why="no published model has it"),
        Expect("rmsnorm", True, why="no published model has layer norms"),
        Expect("apply_residual_connection_post_layernorm", False, why="no published model has it"),
        Expect("post_layer_norm", True, why="there is always a final norm"),
        Expect("fp32_residual_connection", False, why="no published model has it"),
        Expect("original_rope", True, why="rotary positions are one-dimensional"),
        Expect("quantization_bit", 0, why="weights must be plain floating point"),
        Expect("pre_seq_len", None, why="prefix tuning is not computed"),
        Ignore("vocab_size", why="padded_vocab_size is what the weights have"),
        Ignore("prefix_projection", "classifier_dropout", why="for other heads"),
        Ignore(
            "apply_query_key_layer_scaling",
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "interleaved_qkv",
            "use_flash_attn",
            why="say how scores are computed, not what they are",
        ),
    ),
    weights=(
        ParamMap("embedding.word_embeddings.weight", ("transformer.embedding.word_embeddings.weight",), shard=Vocab()),
        ParamMap(_MCORE + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
        ParamMap(
            _MCORE + "self_attention.linear_qkv.weight",
            (_HF + "self_attention.query_key_value.weight",),
            QkvStacked(),
            Column(),
        ),
        ParamMap(
            _MCORE + "self_attention.linear_qkv.bias",
            (_HF + "self_attention.query_key_value.bias",),
            QkvStacked(),
            Column(),
            when="add_qkv_bias",
        ),
        ParamMap(_MCORE + "self_attention.linear_proj.weight", (_HF + "self_attention.dense.weight",), shard=Row()),
        ParamMap(_MCORE + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
        ParamMap(_MCORE + "mlp.linear_fc1.weight", (_HF + "mlp.dense_h_to_4h.weight",), shard=Column(parts=2)),
        ParamMap(_MCORE + "mlp.linear_fc2.weight", (_HF + "mlp.dense_4h_to_h.weight",), shard=Row()),
        ParamMap("decoder.final_layernorm.weight", ("transformer.encoder.final_layernorm.weight",)),
        ParamMap(
            "output_layer.weight",
            ("transformer.output_layer.weight",),
            shard=Vocab(),
            tied_to="embedding.word_embeddings.weight",
        ),
        Drop("transformer.rotary_pos_emb.inv_freq", "computed from the config"),
    ),
    chat_template="chatglm3",
    tiny={
        "padded_vocab_size": 328,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "kv_channels": 32,
        "num_layers": 4,
        "num_attention_heads": 4,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "seq_length": 512,
        "layernorm_epsilon": 1e-5,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rope_ratio": 50,
        "tie_word_embeddings": False,
    },
)
