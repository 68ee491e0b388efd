"""GPT-2: learned positions, layer norms, and linear layers stored as ``[in, out]``."""

from __future__ import annotations

from mindspeed_llm.models.blocks import layer_norm
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
from mindspeed_llm.models.rules import BOOKKEEPING, PLAIN_DECODER, TOKENS_AND_GENERATION, activation, plain, ties

_MCORE, _HF = "decoder.layers.{l}.", "transformer.h.{l}."


def _width_to_values(hf_config: Values) -> dict[str, int | bool]:
    hidden, heads = hf_config.get("n_embd", 768), hf_config.get("n_head", 12)
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "group_query_attention": False,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": hf_config.get("n_inner") or 4 * hidden,
    }


def _width_to_hf(values: Values) -> dict[str, int]:
    return {
        "n_embd": values["hidden_size"],
        "n_head": values["num_attention_heads"],
        "n_inner": values["ffn_hidden_size"],
    }


FAMILY = ModelFamily(
    name="gpt2",
    hf_model_type="gpt2",
    hf_architectures=("GPT2LMHeadModel",),
    config=(
        BOOKKEEPING,
        TOKENS_AND_GENERATION,
        *PLAIN_DECODER,
        Rename("n_layer", "num_layers"),
        Derived("n_embd", "n_head", "n_inner", to_values=_width_to_values, to_hf=_width_to_hf),
        Rename("n_positions", "max_position_embeddings", default=1024),
        Rename("vocab_size", "vocab_size"),
        Rename("layer_norm_epsilon", "layernorm_epsilon", default=1e-5),
        Rename("initializer_range", "init_method_std", default=0.02, recipe=True),
        Rename("attn_pdrop", "attention_dropout", default=0.1, recipe=True),
        Rename("resid_pdrop", "hidden_dropout", default=0.1, recipe=True),
        activation("activation_function", gelu_new="gelu_tanh", gelu="gelu"),
        ties(default=True),
        plain(normalization="LayerNorm", gated_linear_unit=False),
        Const(position_embedding_type="learned_absolute", add_bias_linear=True, add_qkv_bias=True),
        Expect("scale_attn_weights", True, why="scores are always scaled"),
        Expect("scale_attn_by_inverse_layer_idx", False, why="no published model has it"),
        Ignore("reorder_and_upcast_attn", why="scores are float32 here in any case"),
        Ignore("embd_pdrop", why="dropout is the run's: --hidden-dropout"),
        Ignore("n_ctx", why="the older spelling of n_positions"),
        Ignore(
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
            why="for classifiers",
        ),
    ),
    weights=(
        ParamMap("embedding.word_embeddings.weight", ("transformer.wte.weight",), shard=Vocab()),
        ParamMap("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
        *layer_norm(_MCORE + "input_layernorm", _HF + "ln_1"),
        ParamMap(
            _MCORE + "self_attention.linear_qkv.weight",
            (_HF + "attn.c_attn.weight",),
            QkvStacked(),
            Column(),
            transposed=True,
        ),
        ParamMap(_MCORE + "self_attention.linear_qkv.bias", (_HF + "attn.c_attn.bias",), QkvStacked(), Column()),
        ParamMap(
            _MCORE + "self_attention.linear_proj.weight", (_HF + "attn.c_proj.weight",), shard=Row(), transposed=True
        ),
        ParamMap(_MCORE + "self_attention.linear_proj.bias", (_HF + "attn.c_proj.bias",)),
        *layer_norm(_MCORE + "pre_mlp_layernorm", _HF + "ln_2"),
        ParamMap(_MCORE + "mlp.linear_fc1.weight", (_HF + "mlp.c_fc.weight",), shard=Column(), transposed=True),
        ParamMap(_MCORE + "mlp.linear_fc1.bias", (_HF + "mlp.c_fc.bias",), shard=Column()),
        ParamMap(_MCORE + "mlp.linear_fc2.weight", (_HF + "mlp.c_proj.weight",), shard=Row(), transposed=True),
        ParamMap(_MCORE + "mlp.linear_fc2.bias", (_HF + "mlp.c_proj.bias",)),
        *layer_norm("decoder.final_layernorm", "transformer.ln_f"),
        ParamMap("output_layer.weight", ("lm_head.weight",), shard=Vocab(), tied_to="embedding.word_embeddings.weight"),
        Drop(_HF + "attn.bias", "the causal mask; old checkpoints stored it"),
        Drop(_HF + "attn.masked_bias", "a constant; old checkpoints stored it"),
    ),
    chat_template="empty",
    tiny={
        "vocab_size": 328,
        "n_embd": 64,
        "n_inner": 128,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
)
