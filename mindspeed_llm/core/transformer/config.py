"""megatron-core's TransformerConfig with the fields it lacks, sealed once a run is built."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_llm.errors import ConfigError

from megatron.core.transformer.transformer_config import TransformerConfig

WRITTEN_AT_RUN_TIME = frozenset(
    ["no_sync_func", "grad_sync_func", "param_sync_func", "grad_scale_func", "finalize_model_grads_func", "timers"]
)
"""The callbacks that megatron-core's schedules read from the configuration and that a run sets after building it."""


@dataclass
class SuiteTransformerConfig(TransformerConfig):
    """What one model is made of and how it is cut.

    After :meth:`seal` only :data:`WRITTEN_AT_RUN_TIME` may change, so that no layer finds another configuration than
    the one that was printed.
    """

    true_vocab_size: int = 0
    """Rows of the vocabulary that are tokens; the columns of the logits beyond them are masked out of the softmax."""

    attn_logit_softcapping: float | None = None
    """Attention scores pass through ``cap * tanh(score / cap)``."""
    output_logit_softcapping: float | None = None
    """The same for the logits of the vocabulary."""
    embedding_multiplier: float = 1.0
    """Factor on the embeddings as they enter the first layer."""
    residual_multiplier: float = 1.0
    """Factor on what attention and MLP add to the residual."""
    output_multiplier: float = 1.0
    """Factor on the logits."""
    normalize_output_weight: bool = False
    """The rows of the output layer are divided by their lengths before they are used (Baichuan 2)."""
    embedding_layernorm: bool = False
    """A norm between the embeddings and the first layer (Bloom)."""
    pre_norm: bool = True
    """A norm before attention and before the MLP."""
    post_norm: bool = False
    """A norm on what attention and MLP give, before it is added to the residual."""
    qk_norm_over_heads: bool = False
    """The norms of queries and keys run over all heads together, not over each (OLMo 2)."""
    qk_norm_after_rotary: bool = False
    """The norms of queries and keys come behind the rotary positions (Hunyuan)."""
    alibi: bool = False
    """Scores fall linearly with the distance, at a slope of each head's own."""

    kv_lora_rank: int | None = None
    """Channels that the keys and values of all heads are made of; None: each head has its own (no latent attention)."""
    q_lora_rank: int | None = None
    """Channels that the queries of all heads are made of; None: the hidden state's."""
    qk_head_dim: int = 128
    """Channels of a latent query or key that are not rotated."""
    qk_pos_emb_head_dim: int = 64
    """Those that are; all heads share the key's."""
    v_head_dim: int = 128
    """Channels of a latent value."""

    moe_router_group_experts: int | None = None
    """Best experts of a group whose scores together are the group's; None: ``moe_router_topk // moe_router_group_topk``
    (megatron-core)."""

    rotary_base_local: float | None = None
    """Theta of the layers with a window, which then know no scaling; None: all layers turn alike."""
    rope_scaling_type: Literal["linear", "dynamic", "yarn", "llama3", "longrope"] | None = None
    """How rotary frequencies are stretched beyond the context that the model was trained on."""
    long_factor: tuple[float, ...] | None = None
    """longrope: divisors of the frequencies of sequences longer than the trained context."""
    short_factor: tuple[float, ...] | None = None
    """longrope: those of the others."""
    rope_scaling_factor: float = 1.0
    rope_scaling_low_freq_factor: float = 1.0
    rope_scaling_high_freq_factor: float = 4.0
    rope_scaling_original_max_position_embeddings: int = 0
    """The trained context, in tokens."""
    rope_scaling_beta_fast: float = 32.0
    rope_scaling_beta_slow: float = 1.0
    rope_scaling_truncate: bool = True
    """Round yarn's correction range to whole dimensions."""

    yarn_rotary_scaling_factor: float = 1.0
    """With the two below: megatron-core's attention multiplies cos and sin by yarn's temperature, 1 at factor 1."""
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None

    def seal(self) -> None:
        """Refuse further changes but for :data:`WRITTEN_AT_RUN_TIME`."""
        object.__setattr__(self, "_sealed", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in WRITTEN_AT_RUN_TIME and self.__dict__.get("_sealed"):
            raise ConfigError(
                f"the model's configuration is sealed; {name} cannot change any more",
                got=value,
                allowed=sorted(WRITTEN_AT_RUN_TIME),
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> SuiteTransformerConfig:
        """An unsealed copy: megatron-core edits copies for the layers that need another value."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            if name != "_sealed":
                # Process groups and bound methods of the model are shared, not copied.
                shared = name in WRITTEN_AT_RUN_TIME
                object.__setattr__(twin, name, value if shared else copy.deepcopy(value, memo))
        return twin
