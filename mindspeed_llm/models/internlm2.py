"""InternLM2 and InternLM2.5: one matrix for queries, keys and values, in megatron-core's own order."""

from __future__ import annotations

from mindspeed_llm.models.family import (
    Column,
    Const,
    Drop,
    Expect,
    GateUp,
    Ignore,
    ModelFamily,
    ParamMap,
    Row,
    Vocab,
)
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, heads, plain, ties

_MCORE, _HF = "decoder.layers.{l}.", "model.layers.{l}."

FAMILY = ModelFamily(
    name="internlm2",
    hf_model_type="internlm2",
    hf_architectures=("InternLM2ForCausalLM",),
    config=(
        *SIZES,
        heads(),
        rope(),
        SWIGLU,
        ties(default=False),
        plain(),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("bias", False, why="the published models have none"),
        Ignore("attn_implementation", "pretraining_tp", why="say how, not what"),
    ),
    weights=(
        ParamMap("embedding.word_embeddings.weight", ("model.tok_embeddings.weight",), shard=Vocab()),
        ParamMap(_MCORE + "input_layernorm.weight", (_HF + "attention_norm.weight",)),
        # Per KV group its queries, then its key, then its value.
        ParamMap(_MCORE + "self_attention.linear_qkv.weight", (_HF + "attention.wqkv.weight",), shard=Column()),
        ParamMap(_MCORE + "self_attention.linear_proj.weight", (_HF + "attention.wo.weight",), shard=Row()),
        ParamMap(_MCORE + "pre_mlp_layernorm.weight", (_HF + "ffn_norm.weight",)),
        ParamMap(
            _MCORE + "mlp.linear_fc1.weight",
            (_HF + "feed_forward.w1.weight", _HF + "feed_forward.w3.weight"),
            GateUp(),
            Column(parts=2),
        ),
        ParamMap(_MCORE + "mlp.linear_fc2.weight", (_HF + "feed_forward.w2.weight",), shard=Row()),
        ParamMap("decoder.final_layernorm.weight", ("model.norm.weight",)),
        ParamMap("output_layer.weight", ("output.weight",), shard=Vocab(), tied_to="embedding.word_embeddings.weight"),
        Drop(_HF + "attention.rotary_emb.inv_freq", "computed from the config; old checkpoints stored it"),
    ),
    chat_template="intern2",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "bias": False,
        "tie_word_embeddings": False,
    },
)
