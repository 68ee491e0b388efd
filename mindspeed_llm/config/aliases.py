"""Spellings that are not a field's name: each a pure function from what was written to field values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mindspeed_llm.errors import ConfigError


@dataclass(frozen=True)
class Alias:
    """One such spelling.

    Attributes:
        section: where --help shows it.
        help: what it does.
        expand: field values from the text after the flag, which is empty for a flag without value.
        takes: how many values follow; ``expand`` gets them with a space between.
    """

    section: str
    help: str
    expand: Callable[[str], Mapping[str, object]]
    takes: int = 0


def sets(**values: object) -> Callable[[str], Mapping[str, object]]:
    """The function that always answers ``values``."""
    return lambda _text: values


def renamed(name: str) -> Callable[[str], Mapping[str, object]]:
    """The function that gives the text to the field ``name``."""
    return lambda text: {name: text}


def no_weight_decay_condition(text: str) -> Mapping[str, object]:
    """Megatron-LM's older spelling of --apply-wd-to-qk-layernorm.

    Raises:
        ConfigError: another condition than the one that exists.
    """
    if text != "apply_wd_to_qk_layernorm":
        raise ConfigError(
            "--no-weight-decay-cond-type does not take this value",
            got=text,
            allowed="apply_wd_to_qk_layernorm",
            fix="use --apply-wd-to-qk-layernorm",
        )
    return {"apply_wd_to_qk_layernorm": True}


def non_persistent_kind(text: str) -> Mapping[str, object]:
    """The kind of checkpoints of which only the newest is kept: the one that exists changes nothing.

    Raises:
        ConfigError: another kind.
    """
    if text != "global":
        raise ConfigError(
            "--non-persistent-ckpt-type does not take this value",
            got=text,
            allowed="global: local and in_memory need a library that copies between nodes",
            fix="--non-persistent-ckpt-type global, with --non-persistent-global-ckpt-dir on fast shared storage",
        )
    return {}


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{flag} takes a number", got=text) from None


UPSTREAM_SPECS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec": {},
        "mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec": {"post_norm": True},
    }
)
"""MindSpeed-LLM's layer specs whose layers are built here, with what they say beyond the other flags."""


def layer_spec(text: str) -> Mapping[str, object]:
    """What one of MindSpeed-LLM's layer specs says that no other flag does.

    Raises:
        ConfigError: a spec whose layers are not built here, or a module of the user's.
    """
    try:
        return UPSTREAM_SPECS[text]
    except KeyError:
        raise ConfigError(
            "--spec names layers that are not built here",
            got=text,
            allowed=", or ".join(UPSTREAM_SPECS),
            fix="leave it out where the other flags say what the layers are; a module of another suite cannot be run",
        ) from None


def windowed(**beside: object) -> Callable[[str], Mapping[str, object]]:
    """The function that makes of a number of visible tokens, the query's own included, megatron-core's window to the
    left, with the values ``beside``."""
    return lambda text: {"window_size": (int(_number("a sliding window", text)) - 1, 0), **beside}


def query_scalar(text: str) -> Mapping[str, object]:
    """The scale of attention scores from the head size that it is the inverse root of.

    Raises:
        ConfigError: not a number above 0.
    """
    number = _number("--query-pre-attn-scalar", text)
    if number <= 0:
        raise ConfigError("--query-pre-attn-scalar takes a number above 0", got=text)
    return {"softmax_scale": number**-0.5}


def layers_of_experts(text: str) -> Mapping[str, object]:
    """Which layers have experts; MindSpeed-LLM's -1 means every one."""
    return {"moe_layer_freq": 1 if text == "-1" else text}


def token_dispatcher(text: str) -> Mapping[str, object]:
    """How tokens travel; MindSpeed-LLM's alltoall_seq, which gathers a sequence first, gives alltoall's result."""
    return {"moe_token_dispatcher_type": "alltoall" if text == "alltoall_seq" else text}


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "--swiglu": Alias(
            "transformer", "Gated feed-forward block with SiLU.", sets(gated_linear_unit=True, activation_func="silu")
        ),
        "--quick-geglu": Alias(
            "transformer",
            "Gated feed-forward block with the sigmoid form of GELU.",
            sets(gated_linear_unit=True, activation_func="quick_gelu"),
        ),
        "--squared-relu": Alias(
            "transformer", "Feed-forward block with squared ReLU.", sets(activation_func="squared_relu")
        ),
        "--geglu": Alias(
            "transformer", "Gated feed-forward block with GELU.", sets(gated_linear_unit=True, activation_func="gelu")
        ),
        "--gelu-tanh": Alias(
            "transformer",
            "Gated feed-forward block with the hyperbolic-tangent form of GELU.",
            sets(gated_linear_unit=True, activation_func="gelu_tanh"),
        ),
        "--add-rmsnorm-offset": Alias(
            "transformer",
            "Same as --apply-layernorm-1p: norms multiply by one plus their weight.",
            sets(layernorm_zero_centered_gamma=True),
        ),
        "--use-glm-rope": Alias("transformer", "Same as --rotary-interleaved.", sets(rotary_interleaved=True)),
        "--partial-rotary-factor": Alias("model", "Same as --rotary-percent.", renamed("rotary_percent"), takes=1),
        "--sliding-window": Alias("transformer", "Each token sees this many, itself included.", windowed(), takes=1),
        "--interleave-sliding-window": Alias(
            "transformer", "The same in every other layer, from the first.", windowed(window_attn_skip_freq=2), takes=1
        ),
        "--spec": Alias(
            "transformer",
            "MindSpeed-LLM's spec of the layers of Qwen3 (the norms of queries and keys come from --qk-layernorm) or "
            "of Gemma 2 (--post-norm).",
            layer_spec,
            takes=2,
        ),
        "--query-pre-attn-scalar": Alias(
            "transformer", "Scores are divided by the square root of this.", query_scalar, takes=1
        ),
        "--use-fused-swiglu": Alias(
            "transformer",
            "Compute gate and product in one function that keeps only its input for backward.",
            sets(bias_activation_fusion=True),
        ),
        "--no-bias-swiglu-fusion": Alias(
            "transformer", "Compute gate and product step by step.", sets(bias_activation_fusion=False)
        ),
        "--no-bias-gelu-fusion": Alias(
            "transformer", "Compute bias and activation step by step.", sets(bias_activation_fusion=False)
        ),
        "--use-rotary-position-embeddings": Alias("model", "Rotary positions.", sets(position_embedding_type="rope")),
        "--use-rope-scaling": Alias(
            "model", "Scale rotary positions as Llama 3.1 does.", sets(rope_scaling_type="llama3")
        ),
        "--recompute-activations": Alias(
            "transformer", "Recompute attention in backward.", sets(recompute_granularity="selective")
        ),
        "--no-check-for-nan-in-loss-and-grad": Alias(
            "training",
            "Go on when loss or gradients are not finite.",
            sets(check_for_nan_in_loss=False, check_for_nan_in_grad=False),
        ),
        "--grad-reduce-in-bf16": Alias(
            "ddp", "Sum gradients over ranks in bf16 when training in bf16.", sets(grad_reduce_in_fp32=False)
        ),
        "--no-weight-decay-cond-type": Alias(
            "optimizer", "Older spelling of --apply-wd-to-qk-layernorm.", no_weight_decay_condition, takes=1
        ),
        "--npu-deterministic": Alias("training", "Same as --deterministic-mode.", sets(deterministic_mode=True)),
        "--use-deter-comp": Alias("training", "Same as --deterministic-mode.", sets(deterministic_mode=True)),
        "--encoder-num-layers": Alias("transformer", "Same as --num-layers.", renamed("num_layers"), takes=1),
        "--encoder-seq-length": Alias("training", "Same as --seq-length.", renamed("seq_length"), takes=1),
        "--non-persistent-ckpt-type": Alias(
            "checkpoint", "Kind of the checkpoints of which only the newest is kept: global.", non_persistent_kind, 1
        ),
        "--moe-layer-freq": Alias(
            "transformer",
            "Put experts into every Nth layer, from the first on, or by a pattern such as ([0]*3+[1]*61).",
            layers_of_experts,
            takes=1,
        ),
        "--moe-token-dispatcher-type": Alias(
            "transformer",
            "How tokens travel to their experts: allgather or alltoall; alltoall_seq means alltoall.",
            token_dispatcher,
            takes=1,
        ),
        "--moe-intermediate-size": Alias(
            "transformer", "Same as --moe-ffn-hidden-size.", renamed("moe_ffn_hidden_size"), takes=1
        ),
        "--multi-head-latent-attention": Alias(
            "transformer", "Same as --multi-latent-attention.", sets(multi_latent_attention=True)
        ),
        "--n-group": Alias("transformer", "Same as --moe-router-num-groups.", renamed("moe_router_num_groups"), 1),
        "--topk-group": Alias("transformer", "Same as --moe-router-group-topk.", renamed("moe_router_group_topk"), 1),
        "--routed-scaling-factor": Alias(
            "transformer", "Same as --moe-router-topk-scaling-factor.", renamed("moe_router_topk_scaling_factor"), 1
        ),
        "--shared-expert-gate": Alias(
            "transformer", "Same as --moe-shared-expert-gate.", sets(moe_shared_expert_gate=True)
        ),
        **{
            flag: Alias(
                "transformer",
                "Same as --moe-router-dtype fp32: the router's scores, their softmax and the choice are in fp32.",
                sets(moe_router_dtype="fp32"),
            )
            for flag in ("--router-gating-in-fp32", "--topk-softmax-in-fp32", "--moe-revert-type-after-topk")
        },
        "--fix-router": Alias(
            "transformer",
            "Same as --moe-router-force-load-balancing: tokens go to experts by chance, to measure speed.",
            sets(moe_router_force_load_balancing=True),
        ),
        "--hf-save-dir": Alias("checkpoint", "Same as --save-hf.", renamed("save_hf"), takes=1),
    }
)
