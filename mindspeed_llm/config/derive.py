"""Values that follow from others, as Megatron-LM 0.16.1's validate_args and training set-up have them.

Each derivation is a pure function of the flat values and of the names that somebody gave, and answers with the values
to change. They run in the order of :data:`DERIVATIONS`; a later one sees what an earlier one changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from mindspeed_llm.config.latent import latent_sizes

Values = Mapping[str, Any]
Given = Collection[str]
Changes = dict[str, Any]


class Derivation(NamedTuple):
    """One step of derivation and, for the notice when it overrules a given value, its reason."""

    compute: Callable[[Values, Given], Changes]
    why: str


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rows of the embedding table: ``vocab_size`` up to a multiple of ``divisible_by * tensor_parallel``."""
    multiple = divisible_by * tensor_parallel
    return (vocab_size + multiple - 1) // multiple * multiple


def virtual_stages(values: Values, given: Given) -> Changes:
    """Interleaved stages per pipeline rank from either spelling; one stage is none. No change where layers do not
    divide: a rule says so with the numbers."""
    stages = values["virtual_pipeline_model_parallel_size"]
    per_stage = values["num_layers_per_virtual_pipeline_stage"]
    if values["num_virtual_stages_per_pipeline_rank"] is not None:
        stages = values["num_virtual_stages_per_pipeline_rank"]
    elif per_stage is not None and per_stage > 0:
        layers = counted_layers(values)
        chunk = values["pipeline_model_parallel_size"] * per_stage
        stages = layers // chunk if chunk and layers % chunk == 0 else stages
    return {"virtual_pipeline_model_parallel_size": None if stages == 1 else stages}


def counted_layers(values: Values) -> int:
    """Layers that pipeline stages share, with embedding and loss where they count as layers."""
    extra = values["account_for_embedding_in_pipeline_split"] + values["account_for_loss_in_pipeline_split"]
    return values["num_layers"] + extra


def point_to_point(values: Values, given: Given) -> Changes:
    """How activations travel between stages.

    Overlap needs interleaved stages. Batched sends and receives are matched in posting order, so with two ranks and
    interleaved stages (both neighbours are the same rank) they would swap activations and gradients.
    """
    interleaved = values["virtual_pipeline_model_parallel_size"] is not None
    overlap = values["overlap_p2p_comm"] and interleaved
    two_ranks = values["pipeline_model_parallel_size"] == 2
    changes = {"overlap_p2p_comm": overlap, "batch_p2p_comm": not overlap and not (interleaved and two_ranks)}
    if "align_param_gather" not in given or not interleaved:
        changes["align_param_gather"] = interleaved
    return changes


def sequence_parallel(values: Values, given: Given) -> Changes:
    """Sequence parallelism splits over tensor-parallel ranks: alone, there is nothing to split."""
    return {"sequence_parallel": values["sequence_parallel"] and values["tensor_model_parallel_size"] > 1}


def architecture(values: Values, given: Given) -> Changes:
    """Sizes of feed-forward and heads that follow from the hidden size."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    changes: Changes = latent_sizes(values)
    values = {**values, **changes}
    if values["ffn_hidden_size"] is None and hidden > 0:
        # Megatron keeps the parameter count of a gated block near that of a plain one, in multiples of 64.
        swiglu = values["gated_linear_unit"] and values["activation_func"] == "silu"
        changes["ffn_hidden_size"] = int((4 * hidden * 2 / 3) / 64) * 64 if swiglu else 4 * hidden
    if values["kv_channels"] is None and heads > 0 and hidden % heads == 0:
        changes["kv_channels"] = hidden // heads
    if values["num_query_groups"] is None and heads > 0:
        changes["num_query_groups"] = 1 if values["group_query_attention"] else heads
    if values["add_bias_linear"]:
        changes["add_qkv_bias"] = True
    if values["apply_query_key_layer_scaling"]:
        changes["attention_softmax_in_fp32"] = True
    if values["rope_scaling_type"] == "llama3" and values["rope_scaling_factor"] is None:
        changes["rope_scaling_factor"] = 8.0
    if values["rope_scaling_type"] == "longrope" and values["rope_scaling_factor"] is None:
        # As transformers: how far the longest context exceeds the one that was trained.
        longest, trained = values["max_position_embeddings"], values["rope_scaling_original_max_position_embeddings"]
        if longest and trained:
            changes["rope_scaling_factor"] = longest / trained
    changes |= _factors(values)
    if values["padded_vocab_size"] is None and values["vocab_size"] is not None:
        sizes = values["make_vocab_size_divisible_by"], values["tensor_model_parallel_size"]
        if min(sizes) > 0:
            changes["padded_vocab_size"] = padded_vocab_size(values["vocab_size"], *sizes)
    return changes


def _factors(values: Values) -> Changes:
    """Factors that recipes of Gemma and MiniCPM state by what they are made of."""
    hidden, layers = values["hidden_size"], values["num_layers"]
    changes: Changes = {}
    if values["input_embeds_norm"] and hidden > 0:
        changes["embedding_multiplier"] = hidden**0.5
    if values["scale_depth"] is not None and layers > 0:
        changes["residual_multiplier"] = values["scale_depth"] / layers**0.5
    if values["dim_model_base"] is not None and hidden > 0:
        changes["output_multiplier"] = values["dim_model_base"] / hidden
    return changes


def experts(values: Values, given: Given) -> Changes:
    """Sizes and routing of a mixture of experts, from MindSpeed-LLM's spellings of them, too."""
    if not values["num_moe_experts"]:
        return {}
    changes: Changes = {"moe_layer_freq": _layers_of_experts(values)}
    size = values["moe_ffn_hidden_size"]
    if size is None:
        size = changes["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    if values["n_shared_experts"] and size and values["moe_shared_expert_intermediate_size"] is None:
        changes["moe_shared_expert_intermediate_size"] = values["n_shared_experts"] * size
    if values["moe_tp_extend_ep"]:
        size = values["expert_model_parallel_size"] * values["tensor_model_parallel_size"]
        changes |= {"expert_model_parallel_size": size, "expert_tensor_parallel_size": 1}
    capacity = values["moe_expert_capacity_factor"]
    if capacity is not None and capacity < 0:
        changes["moe_expert_capacity_factor"] = None
    if values["moe_z_loss_coeff"] == 0:
        changes["moe_z_loss_coeff"] = None
    return changes | _routing(values)


def _layers_of_experts(values: Values) -> int | tuple[int, ...]:
    """``--moe-layer-freq`` with the layers that ``--first-k-dense-replace`` takes out."""
    dense, frequency = values["first_k_dense_replace"] or 0, values["moe_layer_freq"]
    if not isinstance(frequency, int):
        return tuple(frequency)
    frequency = 1 if frequency == -1 else frequency
    if dense <= 0 or frequency < 1:
        return frequency
    return tuple(int(layer >= dense and layer % frequency == 0) for layer in range(values["num_layers"]))


def _routing(values: Values) -> Changes:
    """softmax_topk is a softmax before the choice, and nothing else; a softmax over the chosen ones is one before the
    choice whose weights are made to sum to one."""
    changes: Changes = {}
    kind = values["moe_router_load_balancing_type"]
    if kind == "softmax_topk":
        kind, changes = "none", {"moe_router_pre_softmax": True}
    if values["seq_aux"] and kind == "none":
        kind = "seq_aux_loss"
    if values["norm_topk_prob"] and values["moe_router_topk"] > 1:
        changes["moe_router_pre_softmax"] = False
    return {**changes, "moe_router_load_balancing_type": kind}


def recomputation(values: Values, given: Given) -> Changes:
    """Megatron's recipes may carry a method and a number of layers without turning recomputation on."""
    off = values["recompute_granularity"] is None
    return dict.fromkeys(("recompute_method", "recompute_num_layers", "recompute_modules")) if off else {}


def no_steps(values: Values, given: Given) -> Changes:
    """A run that only loads and saves needs neither batches nor a learning rate, but megatron-core wants them.

    With interleaved stages it wants a micro-batch for each pipeline rank.
    """
    if values["train_iters"] != 0 or values["skip_train"]:
        return {}
    wanted = {"micro_batch_size": 1, "lr": 0.0}
    changes = {name: value for name, value in wanted.items() if values[name] is None}
    if values["global_batch_size"] is None and values["virtual_pipeline_model_parallel_size"] is not None:
        pipeline = values["pipeline_model_parallel_size"]
        copy = values["tensor_model_parallel_size"] * pipeline * values["context_parallel_size"]
        group = values["microbatch_group_size_per_vp_stage"] or pipeline
        micro_batch = values["micro_batch_size"] or 1
        if copy > 0 and values["world_size"] % copy == 0:
            changes["global_batch_size"] = micro_batch * group * (values["world_size"] // copy)
    return changes


def batches(values: Values, given: Given) -> Changes:
    """Data-parallel size from the number of processes, and a global batch of one micro-batch on each."""
    model_parallel = (
        values["tensor_model_parallel_size"] * values["pipeline_model_parallel_size"] * values["context_parallel_size"]
    )
    if model_parallel <= 0 or values["world_size"] % model_parallel:
        return {}
    size = values["world_size"] // model_parallel
    changes: Changes = {"data_parallel_size": size}
    if values["global_batch_size"] is None and values["micro_batch_size"]:
        changes["global_batch_size"] = values["micro_batch_size"] * size
    return changes


def schedules(values: Values, given: Given) -> Changes:
    """Decay over the whole run, and constant weight decay, unless told otherwise."""
    changes: Changes = {}
    for unit in ("iters", "samples"):
        if values[f"lr_decay_{unit}"] is None and values[f"train_{unit}"] is not None:
            changes[f"lr_decay_{unit}"] = values[f"train_{unit}"]
    if values["weight_decay_incr_style"] == "constant":
        for end in ("start_weight_decay", "end_weight_decay"):
            if values[end] is None:
                changes[end] = values["weight_decay"]
    return changes


def precision(values: Values, given: Given) -> Changes:
    """Number formats: bf16 sums gradients in fp32 unless told otherwise; a dynamic loss scale expects infinities."""
    changes: Changes = {}
    if values["bf16"] and "grad_reduce_in_fp32" not in given:
        changes["grad_reduce_in_fp32"] = True
    if values["fp16"] and not values["loss_scale"]:
        changes |= {"check_for_nan_in_loss": False, "check_for_nan_in_grad": False}
    if values["params_dtype"] is None:
        changes["params_dtype"] = "bf16" if values["bf16"] else "fp16" if values["fp16"] else "fp32"
    return changes


def data(values: Values, given: Given) -> Changes:
    """Megatron's default loader and split; a run that does not train needs no optimizer state."""
    changes: Changes = {}
    if values["dataloader_type"] is None:
        changes["dataloader_type"] = "single"
    if values["split"] is None and (values["data_path"] or values["data_args_path"]):
        changes["split"] = "969,30,1"
    if values["skip_train"]:
        changes["no_load_optim"] = True
    return changes


DERIVATIONS: tuple[Derivation, ...] = (
    Derivation(virtual_stages, "one interleaved stage per pipeline rank is no interleaving"),
    Derivation(point_to_point, "overlap needs interleaved stages, and two ranks cannot batch their messages"),
    Derivation(sequence_parallel, "there is nothing to split with one tensor-parallel rank"),
    Derivation(architecture, "it follows from other values of the architecture"),
    Derivation(experts, "it follows from other values of the mixture of experts"),
    Derivation(recomputation, "nothing is recomputed without --recompute-granularity"),
    Derivation(no_steps, "a run of no steps needs none"),
    Derivation(batches, "it follows from the number of processes"),
    Derivation(schedules, "it follows from the length of the run"),
    Derivation(precision, "it follows from the number format"),
    Derivation(data, "it follows from other values of the run"),
)


def derive(values: Values, given: Given) -> tuple[dict[str, Any], dict[str, str]]:
    """Apply all derivations.

    Returns:
        The flat values, and for each name that was changed the reason.
    """
    current: dict[str, Any] = dict(values)
    reasons: dict[str, str] = {}
    for derivation in DERIVATIONS:
        for name, value in derivation.compute(current, given).items():
            if current[name] != value:
                current[name], reasons[name] = value, derivation.why
    return current, reasons


def remarks(values: Values) -> list[str]:
    """What start-up says of options that are taken and, with the others of this run, change nothing."""
    found: list[str] = []
    if values["reset_position_ids"] and not values["reset_attention_mask"]:
        kind = values["position_embedding_type"]
        if kind != "learned_absolute":
            found.append(
                f"--reset-position-ids has no effect with --position-embedding-type {kind}: megatron-core numbers "
                "positions itself there; --reset-attention-mask keeps documents apart"
            )
    return found
