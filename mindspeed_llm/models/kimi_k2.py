"""Kimi-K2: DeepSeek-V3 with more experts in one group, fewer heads, and a model_type of its own."""

from __future__ import annotations

import dataclasses

from mindspeed_llm.models import deepseek_v3

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    name="kimi_k2",
    hf_model_type="kimi_k2",
    chat_template="kimi_k2",
    tiny={
        **deepseek_v3.FAMILY.tiny,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
)
