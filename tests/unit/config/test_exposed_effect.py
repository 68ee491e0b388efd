"""Every flag of a megatron-core field, and of a model, does something: off its default, a tiny run differs."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from mindspeed_llm.config.exposed import EXPOSED
from mindspeed_llm.config.option import names
from mindspeed_llm.config.schema import FieldSpec, field_table
from mindspeed_llm.config.values import members
from mindspeed_llm.errors import ConfigError
from tests.unit.config.exposed_runs import BASE, Seen, observe

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """How to set a field off its default, where the value does not follow from the type.

    Attributes:
        value: that the field gets.
        beside: what it needs; the run without the field has it too.
        without: what the run without the field has in its place.
        world: ranks of both runs.
    """

    value: Any = None
    beside: Mapping[str, Any] = NOTHING
    without: Mapping[str, Any] = NOTHING
    world: int = 1


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2, "check_for_nan_in_loss": False, "check_for_nan_in_grad": False}
VPP2 = {**PP2, "num_layers": 4, "global_batch_size": 4, "num_virtual_stages_per_pipeline_rank": 2}
FP16 = {"fp16": True}
SHARDED = {"use_distributed_optimizer": True}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True}
SELECTIVE, FULL = {"recompute_granularity": "selective"}, {"recompute_granularity": "full"}
BLOCK = {**FULL, "recompute_method": "block"}

LONGROPE = {
    "rope_scaling_type": "longrope",
    "rope_scaling_factor": 4.0,
    "long_factor": (4.0, 3.0),
    "short_factor": (1.5, 2.0),
}

MOE = {"num_moe_experts": 4, "add_bias_linear": False}
BALANCED = {**MOE, "moe_aux_loss_coeff": 0.1}
SIGMOID = {**MOE, "moe_router_score_function": "sigmoid"}
SHARED_EXPERT = {**MOE, "moe_shared_expert_intermediate_size": 16}
# A token to two experts of four: a capacity of two of the eight tokens drops some.
TIGHT = {**MOE, "moe_expert_capacity_factor": 0.5}

LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 6,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "add_bias_linear": False,
}

CASES: dict[str, Case] = {
    "multi_latent_attention": Case(True, LATENT, {"multi_latent_attention": False, "kv_lora_rank": None}),
    "kv_lora_rank": Case(8, LATENT),
    "q_lora_rank": Case(8, LATENT),
    "qk_head_dim": Case(8, LATENT),
    "qk_pos_emb_head_dim": Case(4, LATENT),
    "v_head_dim": Case(8, LATENT),
    "position_embedding_type": Case("alibi"),
    "rotary_base_local": Case(50.0, {"window_size": (2, 0), "window_attn_skip_freq": 2}),
    "long_factor": Case((9.0, 9.0), {**LONGROPE, "rope_scaling_original_max_position_embeddings": 4}),
    "short_factor": Case((9.0, 9.0), LONGROPE),
    "scale_depth": Case(0.5),
    "first_k_dense_replace": Case(1, MOE),
    "n_shared_experts": Case(1, MOE),
    "norm_topk_prob": Case(True, {**MOE, "moe_router_pre_softmax": True}),
    "seq_aux": Case(True, {**BALANCED, "moe_router_load_balancing_type": "none"}),
    "moe_tp_extend_ep": Case(True, {**MOE, **TP2, "sequence_parallel": True}, world=2),
    "dim_model_base": Case(4),
    "output_logit_softcapping": Case(0.5),
    "attn_logit_softcapping": Case(1e-3),
    "activation_func_clamp_value": Case(1e-3, {"gated_linear_unit": True}),
    "glu_linear_offset": Case(1.0, {"gated_linear_unit": True}),
    "rope_scaling_truncate": Case(
        False,
        {
            "rotary_base": 100.0,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 4.0,
            "rope_scaling_original_max_position_embeddings": 64,
        },
    ),
    "qk_norm_after_rotary": Case(True, {"qk_layernorm": True}),
    "moe_router_group_experts": Case(1, {**MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 1}),
    "qk_norm_over_heads": Case(True, {"normalization": "RMSNorm"}),
    "tensor_model_parallel_size": Case(2, world=2),
    "pipeline_model_parallel_size": Case(2, {k: v for k, v in PP2.items() if k.startswith("check")}, world=2),
    "sequence_parallel": Case(True, TP2, world=2),
    "overlap_p2p_comm": Case(True, VPP2, world=2),
    "overlap_p2p_comm_warmup_flush": Case(True, {**VPP2, "overlap_p2p_comm": True}, world=2),
    "microbatch_group_size_per_vp_stage": Case(4, VPP2, world=2),
    "expert_model_parallel_size": Case(2, MOE, world=2),
    "expert_tensor_parallel_size": Case(1, {**MOE, **TP2, "sequence_parallel": True}, world=2),
    "num_moe_experts": Case(4, {"add_bias_linear": False}),
    "moe_ffn_hidden_size": Case(24, MOE),
    "moe_layer_freq": Case(2, MOE),
    "moe_shared_expert_intermediate_size": Case(16, MOE),
    "moe_shared_expert_gate": Case(True, SHARED_EXPERT),
    "moe_shared_expert_overlap": Case(True, {**SHARED_EXPERT, "moe_token_dispatcher_type": "alltoall"}),
    "moe_router_load_balancing_type": Case("none", BALANCED),
    "moe_router_topk": Case(3, MOE),
    "moe_router_num_groups": Case(2, {**MOE, "moe_router_group_topk": 1}, {"moe_router_num_groups": 1}),
    "moe_router_group_topk": Case(1, {**MOE, "moe_router_num_groups": 2}, {"moe_router_group_topk": 2}),
    "moe_router_pre_softmax": Case(True, MOE),
    "moe_router_topk_scaling_factor": Case(2.5, MOE),
    "moe_router_score_function": Case("sigmoid", MOE),
    "moe_router_dtype": Case("fp64", MOE),
    "moe_router_enable_expert_bias": Case(True, {**SIGMOID, "moe_router_bias_update_rate": 0.5}),
    "moe_router_bias_update_rate": Case(0.5, {**SIGMOID, "moe_router_enable_expert_bias": True}),
    "moe_router_force_load_balancing": Case(True, MOE),
    "moe_aux_loss_coeff": Case(0.1, MOE),
    "moe_z_loss_coeff": Case(0.1, MOE),
    "moe_input_jitter_eps": Case(0.1, MOE),
    "moe_token_dispatcher_type": Case("alltoall", MOE),
    "moe_expert_capacity_factor": Case(0.5, MOE),
    "moe_pad_expert_input_to_capacity": Case(True, TIGHT),
    "moe_token_drop_policy": Case("position", TIGHT),
    "moe_apply_probs_on_input": Case(True, {**MOE, "moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "moe_per_layer_logging": Case(True, BALANCED),
    "num_layers": Case(3),
    "num_layers_in_first_pipeline_stage": Case(1, {**PP2, "num_layers": 4}, world=2),
    "num_layers_in_last_pipeline_stage": Case(1, {**PP2, "num_layers": 4}, world=2),
    # With two ranks no number of layers suits both with and without.
    "account_for_embedding_in_pipeline_split": Case(
        True, {**PP2, "num_layers": 3}, {"account_for_loss_in_pipeline_split": True}, world=2
    ),
    "account_for_loss_in_pipeline_split": Case(
        True, {**PP2, "num_layers": 3}, {"account_for_embedding_in_pipeline_split": True}, world=2
    ),
    "hidden_size": Case(32),
    "num_attention_heads": Case(2),
    "num_query_groups": Case(2),
    "softmax_scale": Case(2.0),
    "ffn_hidden_size": Case(24),
    "kv_channels": Case(8),
    "add_qkv_bias": Case(True, {"add_bias_linear": False}),
    "window_size": Case((2, 0)),
    "window_attn_skip_freq": Case(2, {"window_size": (2, 0)}),
    "no_rope_freq": Case(2),
    "embedding_init_method_std": Case(0.5),
    "bias_activation_fusion": Case(True, {"gated_linear_unit": True, "activation_func": "silu", "ffn_hidden_size": 32}),
    "recompute_granularity": Case("selective"),
    "recompute_method": Case("block", {**FULL, "recompute_num_layers": 1}, {"recompute_method": "uniform"}),
    "recompute_num_layers": Case(2, BLOCK, {"recompute_num_layers": 1}),
    "recompute_modules": Case(("mlp",), {**SELECTIVE, "add_bias_linear": False}),
    "distribute_saved_activations": Case(
        True, {**TP2, **FULL, "recompute_method": "uniform", "recompute_num_layers": 1}, world=2
    ),
    "lr": Case(2e-2),
    "min_lr": Case(5e-3),
    "decoupled_lr": Case(1e-3),
    "decoupled_min_lr": Case(5e-4, {"decoupled_lr": 1e-3}),
    "weight_decay": Case(0.5),
    "apply_wd_to_qk_layernorm": Case(True, {"qk_layernorm": True}),
    "loss_scale": Case(8.0, FP16),
    "initial_loss_scale": Case(1024.0, FP16),
    "min_loss_scale": Case(2.0**31, {**FP16, "hysteresis": 1}),
    "loss_scale_window": Case(1, {**FP16, "initial_loss_scale": 16.0}),
    "hysteresis": Case(1, FP16),
    "adam_eps": Case(1e-2),
    "decoupled_weight_decay": Case(False, {"weight_decay": 0.5}),
    "sgd_momentum": Case(0.5, {"optimizer": "sgd"}),
    "use_distributed_optimizer": Case(True, world=2),
    "overlap_param_gather": Case(True, OVERLAP, world=2),
    "grad_reduce_in_fp32": Case(True, FP16),
    "overlap_grad_reduce": Case(True, SHARDED, world=2),
    "align_param_gather": Case(False, {**VPP2, **OVERLAP, "overlap_param_gather": True}, world=4),
    "check_for_nan_in_grad": Case(False, {"check_for_nan_in_loss": False, "init_method_std": 1e30}),
    "bucket_size": Case(100, OVERLAP, world=2),
    "pad_buckets_for_high_nccl_busbw": Case(True, OVERLAP, world=2),
    "reduce_scatter_with_fp32_accumulation": Case(True, OVERLAP, world=2),
    "average_in_collective": Case(True, world=2),
}

# Fields of ours that say what a model computes.
OURS = names(
    """position_embedding_type q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_base
    rotary_base_local rotary_percent long_factor short_factor embedding_multiplier input_embeds_norm
    embedding_layernorm residual_multiplier scale_depth output_multiplier dim_model_base output_logit_softcapping
    attn_logit_softcapping normalize_output_weight pre_norm post_norm qk_norm_over_heads qk_norm_after_rotary
    rope_scaling_truncate moe_router_group_experts first_k_dense_replace
    n_shared_experts norm_topk_prob seq_aux moe_tp_extend_ep untie_embeddings_and_output_weights activation_func
    group_query_attention init_method_xavier_uniform"""
)

# These change when and how data travels, or only warn, and nothing that is computed: code that runs must ask for them.
COMMUNICATION = names(
    """overlap_p2p_comm overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage distribute_saved_activations
    overlap_grad_reduce overlap_param_gather align_param_gather reduce_scatter_with_fp32_accumulation
    average_in_collective sequence_parallel check_for_large_grads moe_token_dispatcher_type
    moe_shared_expert_overlap"""
)

# Values other than the default are refused by the flag's name.
REFUSED: dict[str, Any] = {
    "context_parallel_size": 2,
    "num_distributed_optimizer_instances": 2,
    "transformer_impl": "transformer_engine",
}


def off_default(spec: FieldSpec) -> Any:
    """A value that is not the field's default, from its type."""
    if spec.is_bool:
        return not spec.default
    choices = [choice for member in members(spec.annotation) for choice in typing.get_args(member)]
    others = [choice for choice in choices if choice not in (None, spec.default)]
    return others[0] if others else spec.default / 2


def run_with(name: str) -> Seen:
    """A run whose field ``name`` is off its default."""
    case = CASES.get(name, Case())
    value = off_default(field_table()[name]) if case.value is None else case.value
    return observe(case.world, {**case.beside, name: value})


def run_without(name: str) -> Seen:
    """The same run but for that field."""
    case = CASES.get(name, Case())
    return observe(case.world, {**case.beside, **case.without})


def test_two_equal_runs_do_not_differ() -> None:
    first = observe(1, BASE)
    again = observe(1, {**BASE, "num_workers": 1})
    assert (first.made, first.done) == (again.made, again.done)


@pytest.mark.parametrize("name", [name for name in (*EXPOSED, *OURS) if name not in REFUSED])
def test_the_flag_changes_the_run(name: str) -> None:
    given = run_with(name)
    if name in COMMUNICATION:
        assert name in given.read
        return
    without = run_without(name)
    if CASES.get(name, Case()).world > 1:
        # What would have travelled between ranks is no number to compare.
        assert without.made != given.made
    else:
        assert (without.made, without.done) != (given.made, given.done)


@pytest.mark.parametrize("name", REFUSED)
def test_the_flag_is_refused_by_name(name: str) -> None:
    assert name in EXPOSED
    with pytest.raises(ConfigError, match=field_table()[name].flag):
        observe(1, {name: REFUSED[name]})
