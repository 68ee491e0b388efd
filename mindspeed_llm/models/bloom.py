"""Bloom: ALiBi, layer norms, one behind the embeddings, and queries, keys and values side by side for each head."""

from __future__ import annotations

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.blocks import layer_norm
from mindspeed_llm.models.family import (
    Column,
    Const,
    Derived,
    Expect,
    Ignore,
    ModelFamily,
    ParamMap,
    Rename,
    Row,
    Values,
    Vocab,
)
from mindspeed_llm.models.rules import BOOKKEEPING, PLAIN_DECODER, TOKENS_AND_GENERATION, plain, ties

_MCORE, _HF = "decoder.layers.{l}.", "transformer.h.{l}."


def _width_to_values(hf_config: Values) -> dict[str, int | bool]:
    # The published files say n_embed, transformers writes hidden_size.
    hidden = hf_config.get("hidden_size") or hf_config.get("n_embed")
    heads = hf_config.get("n_head") or hf_config.get("num_attention_heads")
    if not hidden or not heads:
        raise ConversionError("config.json lacks 'hidden_size' or 'n_head'")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "group_query_attention": False,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": 4 * hidden,
    }


def _width_to_hf(values: Values) -> dict[str, int]:
    if values["ffn_hidden_size"] != 4 * values["hidden_size"]:
        raise ConversionError(
            "Bloom's MLP is four times as wide as the model",
            got=values["ffn_hidden_size"],
            allowed=4 * values["hidden_size"],
        )
    return {"hidden_size": values["hidden_size"], "n_head": values["num_attention_heads"]}


FAMILY = ModelFamily(
    name="bloom",
    hf_model_type="bloom",
    hf_architectures=("BloomForCausalLM",),
    config=(
        BOOKKEEPING,
        TOKENS_AND_GENERATION,
        *PLAIN_DECODER,
        Rename("n_layer", "num_layers"),
        Derived(
            "hidden_size", "n_embed", "n_head", "num_attention_heads", to_values=_width_to_values, to_hf=_width_to_hf
        ),
        # ALiBi has no longest position; the published files say the length that was trained.
        Rename("seq_length", "max_position_embeddings", default=2048, recipe=True),
        Rename("vocab_size", "vocab_size"),
        Rename("layer_norm_epsilon", "layernorm_epsilon", default=1e-5),
        Rename("initializer_range", "init_method_std", default=0.02, recipe=True),
        Rename("attention_dropout", "attention_dropout", default=0.0, recipe=True),
        Rename("hidden_dropout", "hidden_dropout", default=0.0, recipe=True),
        ties(default=True),
        plain(normalization="LayerNorm", gated_linear_unit=False, embedding_layernorm=True),
        Const(
            activation_func="gelu_tanh",
            position_embedding_type="alibi",
            add_bias_linear=True,
            add_qkv_bias=True,
        ),
        Expect("apply_residual_connection_post_layernorm", False, why="no published model has it"),
        Ignore("pretraining_tp", "slow_but_exact", why="say how transformers slices the same products"),
        Ignore("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", why="say how, not what"),
        Ignore("skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "unk_token", why="transformers does not read it"),
    ),
    weights=(
        ParamMap("embedding.word_embeddings.weight", ("transformer.word_embeddings.weight",), shard=Vocab()),
        *layer_norm("embedding.norm", "transformer.word_embeddings_layernorm"),
        *layer_norm(_MCORE + "input_layernorm", _HF + "input_layernorm"),
        ParamMap(
            _MCORE + "self_attention.linear_qkv.weight",
            (_HF + "self_attention.query_key_value.weight",),
            shard=Column(),
        ),
        ParamMap(
            _MCORE + "self_attention.linear_qkv.bias", (_HF + "self_attention.query_key_value.bias",), shard=Column()
        ),
        ParamMap(_MCORE + "self_attention.linear_proj.weight", (_HF + "self_attention.dense.weight",), shard=Row()),
        ParamMap(_MCORE + "self_attention.linear_proj.bias", (_HF + "self_attention.dense.bias",)),
        *layer_norm(_MCORE + "pre_mlp_layernorm", _HF + "post_attention_layernorm"),
        ParamMap(_MCORE + "mlp.linear_fc1.weight", (_HF + "mlp.dense_h_to_4h.weight",), shard=Column()),
        ParamMap(_MCORE + "mlp.linear_fc1.bias", (_HF + "mlp.dense_h_to_4h.bias",), shard=Column()),
        ParamMap(_MCORE + "mlp.linear_fc2.weight", (_HF + "mlp.dense_4h_to_h.weight",), shard=Row()),
        ParamMap(_MCORE + "mlp.linear_fc2.bias", (_HF + "mlp.dense_4h_to_h.bias",)),
        *layer_norm("decoder.final_layernorm", "transformer.ln_f"),
        ParamMap("output_layer.weight", ("lm_head.weight",), shard=Vocab(), tied_to="embedding.word_embeddings.weight"),
    ),
    chat_template="empty",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "n_layer": 4,
        "n_head": 4,
        "seq_length": 64,
    },
)
