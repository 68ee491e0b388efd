"""Which fields of megatron-core's dataclasses have a flag here.

A field gets its flag when it works in what this suite trains. Every other field is refused by name, with the reason
of :mod:`~mindspeed_llm.config.refused`, so nothing is accepted and then ignored.
"""

from __future__ import annotations

from mindspeed_llm.config.option import names

# Set by derivation, by a model family, or by the code that builds megatron-core's objects; never by a flag.
INTERNAL = names(
    """virtual_pipeline_model_parallel_size batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs
    variable_seq_lengths attention_softmax_in_fp32"""
)

EXPOSED = names(
    """
    tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size perform_initialization use_cpu_initialization fp16 bf16
    overlap_p2p_comm overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage
    num_layers num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    hidden_size num_attention_heads softmax_type softmax_scale num_query_groups ffn_hidden_size kv_channels
    hidden_dropout attention_dropout
    layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit
    activation_func_clamp_value glu_linear_offset
    rotary_interleaved window_size window_attn_skip_freq normalization qk_layernorm
    calculate_per_token_loss no_rope_freq init_method_std embedding_init_method_std
    bias_activation_fusion transformer_impl recompute_granularity recompute_method recompute_num_layers
    multi_latent_attention num_moe_experts moe_ffn_hidden_size moe_layer_freq
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap
    moe_router_load_balancing_type moe_router_topk moe_router_num_groups
    moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function
    moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing
    moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dispatcher_type moe_expert_capacity_factor
    moe_pad_expert_input_to_capacity moe_token_drop_policy moe_apply_probs_on_input moe_per_layer_logging
    distribute_saved_activations recompute_modules

    lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm optimizer loss_scale
    initial_loss_scale min_loss_scale loss_scale_window hysteresis adam_beta1 adam_beta2 adam_eps
    decoupled_weight_decay sgd_momentum use_distributed_optimizer overlap_param_gather clip_grad log_num_zeros_in_grad

    grad_reduce_in_fp32 overlap_grad_reduce align_param_gather num_distributed_optimizer_instances
    check_for_nan_in_grad check_for_large_grads bucket_size pad_buckets_for_high_nccl_busbw
    reduce_scatter_with_fp32_accumulation average_in_collective
    """
)
