"""DeepSeek-V2 and V2-Lite: latent attention, experts chosen by softmax over all of them, shared experts."""

from __future__ import annotations

from mindspeed_llm.models.blocks import DENSE_LAYERS_MLP, EMBEDDING_AND_HEAD, PRE_NORMS
from mindspeed_llm.models.experts import (
    FIRST_LAYERS_DENSE,
    GREEDY_GROUPS,
    GROUP_FIELDS,
    TRAINING_OF_THE_ROUTER,
    number_of_experts,
    plain_routing,
    routed_experts,
    shared_expert_weights,
    shared_experts,
)
from mindspeed_llm.models.family import Const, Expect, Ignore, ModelFamily, Preset, Rename
from mindspeed_llm.models.latent import LATENT_ATTENTION, LATENT_HEADS
from mindspeed_llm.models.rope import rope
from mindspeed_llm.models.rules import SIZES, SWIGLU, plain, ties

FAMILY = ModelFamily(
    name="deepseek_v2",
    hf_model_type="deepseek_v2",
    hf_architectures=("DeepseekV2ForCausalLM",),
    config=(
        *SIZES,
        LATENT_HEADS,
        rope(),
        SWIGLU,
        ties(default=False),
        plain("num_moe_experts", "softmax_scale", "multi_latent_attention", qk_layernorm=True, rotary_interleaved=True),
        Const(add_bias_linear=False, add_qkv_bias=False),
        Expect("attention_bias", False, why="no published model has it"),
        Expect("mlp_bias", False, why="no published model has it"),
        *number_of_experts("n_routed_experts", "num_local_experts"),
        Rename("moe_intermediate_size", "moe_ffn_hidden_size"),
        shared_experts("n_shared_experts"),
        FIRST_LAYERS_DENSE,
        Expect("moe_layer_freq", 1, why="no published model has dense layers in between"),
        Expect("norm_topk_prob", False, why="the shares of the chosen experts are left as they are"),
        Expect("scoring_func", "softmax", why="the one that the family has"),
        Rename("routed_scaling_factor", "moe_router_topk_scaling_factor", default=1.0),
        GREEDY_GROUPS,
        plain_routing(
            "moe_layer_freq",
            "moe_router_topk_scaling_factor",
            "moe_shared_expert_intermediate_size",
            *GROUP_FIELDS,
            moe_router_pre_softmax=True,
        ),
        Preset(moe_router_dtype="fp32"),
        TRAINING_OF_THE_ROUTER,
        Ignore("ep_size", "pretraining_tp", why="how the model was once trained"),
        Ignore("aux_loss_alpha", "seq_aux", why="--moe-aux-loss-coeff, --moe-router-load-balancing-type say it here"),
    ),
    weights=(
        *EMBEDDING_AND_HEAD,
        *PRE_NORMS,
        *LATENT_ATTENTION,
        *DENSE_LAYERS_MLP,
        *routed_experts("model.layers.{l}.mlp", "gate_proj", "up_proj", "down_proj"),
        *shared_expert_weights("model.layers.{l}.mlp.shared_experts"),
    ),
    chat_template="deepseek2",
    tiny={
        "vocab_size": 328,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
    },
)
