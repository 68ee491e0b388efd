"""What the model is, as far as megatron-core's TransformerConfig does not say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.config.option import option


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and vocabulary of the language model."""

    hf_config: str | None = None
    """Folder or file of a Hugging Face config.json, or the name of a published model, that gives the architecture
    without weights."""

    model_type_hf: str | None = None
    """Name of the model family, when it is not to be read from a Hugging Face config."""

    vocab_size: int | None = None
    """Number of tokens of the vocabulary before padding; by default the tokenizer's."""

    padded_vocab_size: int | None = None
    """Rows of the embedding table. By default the vocabulary size rounded up so that every tensor-parallel rank
    holds the same number of rows. Rows above the vocabulary never get probability."""

    make_vocab_size_divisible_by: int = 128
    """Round the embedding rows of each tensor-parallel rank up to a multiple of this."""

    max_position_embeddings: int | None = None
    """Longest position that the model is made for; at least the sequence length."""

    position_embedding_type: Literal["learned_absolute", "rope", "alibi", "none"] = "learned_absolute"
    """How positions enter: a learned table, rotary embeddings, a bias on attention that grows with the distance, or
    not at all."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies (rope theta)."""

    rotary_base_local: float | None = None
    """Base of the rotary frequencies in layers with an attention window, which are never scaled. By default they turn
    as all layers do."""

    rotary_percent: float = 1.0
    """Part of each head's channels that is rotated, above 0 and up to 1."""

    rope_scaling_type: Literal["linear", "dynamic", "yarn", "llama3", "longrope"] | None = None
    """How the rotary frequencies are stretched to longer sequences."""

    rope_scaling_factor: float | None = None
    """Ratio of the extended to the original context length. For llama3 scaling the default is 8."""

    rope_scaling_original_max_position_embeddings: int | None = option(
        None, flags=("--original-max-position-embeddings",)
    )
    """Context length that the model was first trained with."""

    low_freq_factor: float = 1.0
    """llama3 scaling: wavelengths longer than the original context divided by this are fully stretched."""

    high_freq_factor: float = 4.0
    """llama3 scaling: wavelengths shorter than the original context divided by this are left alone."""

    beta_fast: float = option(32.0, flags=("--rope-scaling-beta-fast",))
    """yarn scaling: channels that turn at least this often within the original context are left alone."""

    beta_slow: float = option(1.0, flags=("--rope-scaling-beta-slow",))
    """yarn scaling: channels that turn at most this often within the original context are fully stretched."""

    rope_scaling_truncate: bool = True
    """yarn scaling: round the range between fully stretched channels and those left alone to whole channels."""

    rope_scaling_mscale: float | None = None
    """yarn scaling: strength of the correction of the attention temperature."""

    rope_scaling_mscale_all_dim: float | None = None
    """yarn scaling: strength of the same correction where it acts on all channels; the ratio of both is applied."""

    rope_scaling_attention_factor: float | None = None
    """yarn and longrope scaling: factor on the rotated queries and keys, in place of the one computed from the scaling
    factor."""

    long_factor: tuple[float, ...] | None = None
    """longrope scaling: divisors of the rotary frequencies for sequences above the original context length."""

    short_factor: tuple[float, ...] | None = None
    """longrope scaling: divisors of the rotary frequencies for all other sequences."""

    q_lora_rank: int | None = None
    """Latent attention: channels that the queries of all heads are made of; by default the hidden state's."""

    kv_lora_rank: int | None = None
    """Latent attention: channels that the keys and values of all heads are made of."""

    qk_head_dim: int = option(128, flags=("--qk-nope-head-dim",))
    """Latent attention: channels of a query or key that are not rotated."""

    qk_pos_emb_head_dim: int = option(64, flags=("--qk-rope-head-dim",))
    """Latent attention: channels of a query or key that are rotated; all heads share the key's."""

    v_head_dim: int = 128
    """Latent attention: channels of a value."""

    moe_router_group_experts: int | None = None
    """Group-limited routing: experts of a group, its best ones, whose scores together are the group's; by default as
    many as a token has in each chosen group."""

    embedding_multiplier: float = option(1.0, flags=("--scale-emb", "--embedding-multiplier-scale"))
    """Factor on the embeddings as they enter the first layer."""

    input_embeds_norm: bool = False
    """Multiply the embeddings by the square root of the hidden size."""

    embedding_layernorm: bool = option(False, flags=("--embed-layernorm",))
    """Put a norm between the embeddings and the first layer."""

    residual_multiplier: float = 1.0
    """Factor on what attention and the feed-forward block add to the residual stream."""

    scale_depth: float | None = None
    """Take this, divided by the square root of the number of layers, as the factor of the residual."""

    output_multiplier: float = option(1.0, flags=("--output-multiplier-scale",))
    """Factor on the logits."""

    dim_model_base: int | None = None
    """Take this, divided by the hidden size, as the factor of the logits."""

    output_logit_softcapping: float | None = None
    """Logits pass through cap * tanh(logit / cap)."""

    attn_logit_softcapping: float | None = None
    """Attention scores pass through cap * tanh(score / cap)."""

    normalize_output_weight: bool = False
    """Divide each row of the output layer by its length before it is used."""

    pre_norm: bool = True
    """Put a norm before attention and before the feed-forward block."""

    post_norm: bool = False
    """Put a norm on what attention and the feed-forward block give, before it is added to the residual."""

    qk_norm_over_heads: bool = False
    """Let the norms of queries and keys run over all heads together instead of over each head."""

    qk_norm_after_rotary: bool = False
    """Put the norms of queries and keys (--qk-layernorm) behind their rotation instead of before it."""

    first_k_dense_replace: int | None = None
    """Leading layers without experts; of the others, --moe-layer-freq chooses. -1 means none."""

    n_shared_experts: int | None = None
    """Shared experts: together a block of this many times the size of a routed one, in place of
    --moe-shared-expert-intermediate-size."""

    norm_topk_prob: bool = False
    """Let the weights of a token's experts sum to one. Sigmoid scores always do, and so do softmax scores unless
    --moe-router-pre-softmax takes them before the choice."""

    seq_aux: bool = False
    """Balance the experts within each sequence: --moe-router-load-balancing-type none becomes seq_aux_loss, with
    --moe-aux-loss-coeff."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weights, apart from the embedding table."""

    activation_func: Literal["gelu", "gelu_tanh", "silu", "squared_relu", "quick_gelu"] = "gelu"
    """Non-linearity of the feed-forward block; gelu_tanh is the approximation of GELU by a hyperbolic tangent."""

    group_query_attention: bool = False
    """Share keys and values between groups of query heads; one group unless the number of query groups is given."""

    init_method_xavier_uniform: bool = False
    """Draw initial weights from the Xavier uniform distribution instead of a normal one."""
