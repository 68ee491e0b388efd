"""Rules of a mixture of experts: how many there are, how tokens are routed, and how ranks share them."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_llm.config.layers import layers_of_experts
from mindspeed_llm.config.option import names
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.config.schema import field_table
from mindspeed_llm.errors import ConfigError

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
BALANCING = (*AUX_LOSSES, "sinkhorn", "none")
# MindSpeed-LLM's kinds of balancing that choose experts in ways of their own.
OTHER_CHOICES = {
    "group_limited_greedy": "it ranks groups by their best expert, and --moe-router-group-topk by the sum of the best",
    "pai_megatron_aux_loss": "it is another suite's loss",
    "sparsemixer_topk": "it samples the experts of Phi-3.5-MoE",
}

OF_EXPERTS = (
    *(name for name in field_table() if name.startswith("moe_") and field_table()[name].has_flag),
    *names("first_k_dense_replace n_shared_experts norm_topk_prob seq_aux"),
)


def experts_are_there(cfg: RunConfig) -> Iterator[ConfigError]:
    """What is said of experts is said of a model that has some."""
    if cfg.transformer.num_moe_experts is not None:
        return
    # Recipes of dense models may carry parallel sizes of 1.
    sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    given = [name for name in sizes if cfg.value(name) not in (None, 1)]
    given += [name for name in OF_EXPERTS if cfg.value(name) != field_table()[name].default]
    if given:
        yield ConfigError(
            "there are no experts for these to act on",
            got=", ".join(field_table()[name].flag for name in given),
            fix="--num-experts, or leave them out",
        )


def layers_have_experts(cfg: RunConfig) -> Iterator[ConfigError]:
    """Some layers have experts, and the ways to say which agree."""
    t, m = cfg.transformer, cfg.model
    if (t.num_moe_experts or 0) < 1 or t.num_layers < 1:
        return
    frequency, fix = t.moe_layer_freq, "--moe-layer-freq or --first-k-dense-replace"
    if isinstance(frequency, int) and frequency < 1:
        yield ConfigError("--moe-layer-freq is out of range", got=frequency, allowed="1 or more, or -1", fix=fix)
        return
    if not isinstance(frequency, int) and (len(frequency) != t.num_layers or not set(frequency) <= {0, 1}):
        yield ConfigError(
            "--moe-layer-freq does not say 1 or 0 for every layer",
            got=f"{len(frequency)} entries for {t.num_layers} layers",
            fix=fix,
        )
        return
    layers = layers_of_experts({name: getattr(t, name) for name in ("num_layers", "num_moe_experts", "moe_layer_freq")})
    if not any(layers):
        yield ConfigError("no layer has experts", got=f"--moe-layer-freq {frequency}", fix=fix)
    elif any(layers[: max(m.first_k_dense_replace or 0, 0)]):
        yield ConfigError(
            "--first-k-dense-replace contradicts --moe-layer-freq",
            got=f"{m.first_k_dense_replace} and {frequency}",
            fix="leave one of them out",
        )
    shared, size = t.moe_shared_expert_intermediate_size, t.moe_ffn_hidden_size
    if m.n_shared_experts and size and shared != m.n_shared_experts * size:
        yield ConfigError(
            "the size of the shared experts is given twice",
            got=f"--moe-shared-expert-intermediate-size {shared}, --n-shared-experts {m.n_shared_experts} x {size}",
            fix="leave one of them out",
        )
    if shared is None and (t.moe_shared_expert_gate or t.moe_shared_expert_overlap):
        yield ConfigError(
            "there is no shared expert",
            got="--moe-shared-expert-gate or --moe-shared-expert-overlap",
            fix="--moe-shared-expert-intermediate-size",
        )


def experts_are_chosen(cfg: RunConfig) -> Iterator[ConfigError]:
    """Each token goes to some of the experts, with weights that can be learnt."""
    t = cfg.transformer
    experts, topk = t.num_moe_experts, t.moe_router_topk
    if experts is None or min(experts, topk) < 1:
        return
    if topk > experts:
        yield ConfigError(
            "a token goes to more experts than there are",
            got=f"--moe-router-topk {topk}, {experts} experts",
            allowed=f"from 1 to {experts}",
            fix="--moe-router-topk",
        )
        return
    softmax = t.moe_router_score_function == "softmax"
    if topk == 1 and softmax and not t.moe_router_pre_softmax and t.moe_router_load_balancing_type != "sinkhorn":
        yield ConfigError(
            "the softmax over the one expert of a token is always 1, and the router would learn nothing",
            got="--moe-router-topk 1",
            fix="--moe-router-pre-softmax",
        )
    if t.moe_router_enable_expert_bias and softmax:
        yield ConfigError(
            "the experts' bias is added to sigmoid scores",
            got="--moe-router-score-function softmax",
            allowed="sigmoid",
            fix="--moe-router-score-function sigmoid, or leave out --moe-router-enable-expert-bias",
        )
    yield from _groups(cfg, experts, topk)


def _groups(cfg: RunConfig, experts: int, topk: int) -> Iterator[ConfigError]:
    groups, chosen = cfg.transformer.moe_router_num_groups, cfg.transformer.moe_router_group_topk
    fix = "--moe-router-num-groups and --moe-router-group-topk"
    # One group is no limit, and recipes say it by itself.
    if (groups not in (None, 1) and chosen is None) or (groups is None and chosen is not None):
        yield ConfigError(
            "routing within groups needs how many there are and how many a token may use",
            got=f"--moe-router-num-groups {groups}, --moe-router-group-topk {chosen}",
            fix=fix,
        )
    judges = cfg.model.moe_router_group_experts
    if judges is not None and (groups is None or not 1 <= judges <= experts // max(groups, 1)):
        yield ConfigError(
            "so many experts of a group cannot judge it",
            got=f"--moe-router-group-experts {judges}, --moe-router-num-groups {groups}",
            allowed="1 to the experts of a group, with groups",
            fix="--moe-router-group-experts or --moe-router-num-groups",
        )
    if groups is None or chosen is None or min(groups, chosen) < 1:
        return
    if experts % groups:
        yield ConfigError(
            "the experts cannot be shared equally by the groups",
            got=f"{experts} experts, {groups} groups",
            allowed=f"a divisor of {experts}",
            fix="--moe-router-num-groups",
        )
    elif not chosen <= min(groups, topk) or (judges is None and topk % chosen) or topk > chosen * (experts // groups):
        # megatron-core ranks groups by the sum of their best topk / group_topk scores, unless told how many.
        yield ConfigError(
            "a token's experts cannot be shared equally by the groups that it may use",
            got=f"{topk} experts of {chosen} among {groups} groups of {experts // groups}",
            allowed=f"a divisor of {topk}, up to {min(groups, topk)}, with groups that hold enough experts",
            fix=fix,
        )


def experts_are_balanced(cfg: RunConfig) -> Iterator[ConfigError]:
    """The ways to balance experts exist, each has its weight, and they go together."""
    t = cfg.transformer
    if t.num_moe_experts is None:
        return
    kinds, weights, flag = t.moe_router_load_balancing_type, t.moe_aux_loss_coeff, "--moe-router-load-balancing-type"
    several = not isinstance(kinds, str)
    allowed = AUX_LOSSES if several else BALANCING
    for kind in kinds if several else (kinds,):
        if kind not in allowed:
            why = f": {OTHER_CHOICES[kind]}" if kind in OTHER_CHOICES else ""
            yield ConfigError(f"{flag} does not take this value{why}", got=kind, allowed=", ".join(allowed), fix=flag)
    alone = isinstance(weights, (int, float))
    given = (weights,) if isinstance(weights, (int, float)) else weights
    if several == alone or (several and len(kinds) != len(given)):
        yield ConfigError(
            "each kind of balancing has a weight of its own",
            got=f"{flag} {kinds}, --moe-aux-loss-coeff {weights}",
            fix="as many numbers after --moe-aux-loss-coeff as there are kinds",
        )
    elif min(given, default=0) < 0:
        yield ConfigError("--moe-aux-loss-coeff is out of range", got=weights, allowed="0 or more")
    elif kinds == "sinkhorn" and weights:
        yield ConfigError(
            "sinkhorn balances by itself, without a loss", got=f"--moe-aux-loss-coeff {weights}", allowed=0
        )
    if kinds == "sinkhorn" and t.moe_expert_capacity_factor is not None:
        yield ConfigError(
            "sinkhorn knows no capacity of experts",
            got=f"--moe-expert-capacity-factor {t.moe_expert_capacity_factor}",
            fix=f"{flag} {', '.join(AUX_LOSSES)} or none",
        )
    if t.moe_pad_expert_input_to_capacity and t.moe_expert_capacity_factor is None:
        yield ConfigError(
            "--moe-pad-expert-input-to-capacity needs a capacity", fix="--moe-expert-capacity-factor, such as 1.25"
        )


def experts_travel(cfg: RunConfig) -> Iterator[ConfigError]:
    """The dispatcher exists here, and does what is asked of it."""
    t = cfg.transformer
    if t.num_moe_experts is None:
        return
    kind, fix = t.moe_token_dispatcher_type, "--moe-token-dispatcher-type"
    if kind == "flex":
        yield ConfigError(
            "the flex dispatcher sends tokens through DeepEP or HybridEP, libraries for CUDA that are not used here",
            got=f"{fix} flex",
            allowed="allgather, alltoall",
            fix=fix,
        )
    elif kind != "alltoall" and t.moe_shared_expert_overlap:
        yield ConfigError(
            "shared experts are computed while tokens travel only with one dispatcher",
            got=f"{fix} {kind}, --moe-shared-expert-overlap",
            allowed="alltoall",
            fix=fix,
        )


def experts_fill_the_ranks(cfg: RunConfig) -> Iterator[ConfigError]:
    """Every rank gets the same number of experts, or of their parts."""
    t, world = cfg.transformer, cfg.distributed.world_size
    experts, parallel, tensor = t.num_moe_experts, t.expert_model_parallel_size, t.tensor_model_parallel_size
    parts = tensor if t.expert_tensor_parallel_size is None else t.expert_tensor_parallel_size
    pipeline = t.pipeline_model_parallel_size
    if experts is None or min(parallel, parts, tensor, pipeline, experts) < 1:
        return
    if experts % parallel:
        yield ConfigError(
            "the experts cannot be shared equally by the expert-parallel ranks",
            got=f"{experts} experts, {parallel} ranks",
            allowed=f"a divisor of {experts}",
            fix="--expert-model-parallel-size",
        )
    copy = parallel * parts * pipeline
    if world % (tensor * pipeline * t.context_parallel_size) == 0 and world % copy:
        yield ConfigError(
            f"{world} processes cannot hold copies of experts over {copy} processes",
            got=f"EP {parallel} x ETP {parts} x PP {pipeline} = {copy}, WORLD_SIZE {world}",
            allowed=f"a number of processes that is a multiple of {copy}",
            fix="--expert-model-parallel-size, --expert-tensor-parallel-size or --moe-tp-extend-ep",
        )
    for name, ranks in (("moe_ffn_hidden_size", parts), ("moe_shared_expert_intermediate_size", tensor)):
        size = cfg.value(name)
        if isinstance(size, int) and size % ranks:
            flag = field_table()[name].flag
            yield ConfigError(
                f"{flag} cannot be shared equally by the ranks", got=f"{size} and {ranks} ranks", fix=flag
            )
    if t.add_bias_linear and parts != 1:
        yield ConfigError(
            "experts with biases cannot be cut, for each part would add the bias",
            got=f"expert-tensor-parallel size {parts}",
            allowed=1,
            fix="--disable-bias-linear, or --expert-tensor-parallel-size 1",
        )


def experts_see_their_tokens(cfg: RunConfig) -> Iterator[ConfigError]:
    """In training each tensor-parallel rank routes its own tokens."""
    t = cfg.transformer
    if t.num_moe_experts is not None and t.tensor_model_parallel_size > 1 and not t.sequence_parallel:
        yield ConfigError(
            "tensor-parallel ranks would route the same tokens",
            got=f"--tensor-model-parallel-size {t.tensor_model_parallel_size} with experts",
            fix="add --sequence-parallel",
        )


EXPERT_RULES = (
    experts_are_there,
    layers_have_experts,
    experts_are_chosen,
    experts_are_balanced,
    experts_travel,
    experts_fill_the_ranks,
)
EXPERT_TRAINING_RULES = (experts_see_their_tokens,)
