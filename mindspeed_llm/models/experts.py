"""Rules and weights of mixtures of experts that more than one family uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.config.layers import layers_of_experts
from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Column, Const, Derived, GateUp, Ignore, ParamMap, Rename, Row, Rule, Values

_PLAIN: Mapping[str, Any] = {
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_group_experts": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_apply_probs_on_input": False,
}
"""Experts in every layer; each token goes to the best few by softmax, whose weights sum to one."""


def plain_routing(*others: str, **changes: Any) -> Const:
    """How every model of a family routes: plainly, with ``changes``; the fields ``others`` belong to other rules."""
    return Const(**{name: value for name, value in {**_PLAIN, **changes}.items() if name not in others})


def _size_to_values(hf_config: Values) -> dict[str, Any]:
    return {"moe_ffn_hidden_size": hf_config.get("intermediate_size")}


def _size_to_hf(values: Values) -> dict[str, Any]:
    if values["moe_ffn_hidden_size"] != values["ffn_hidden_size"]:
        raise ConversionError(
            "experts have the size of intermediate_size in this family",
            got=values["moe_ffn_hidden_size"],
            allowed=values["ffn_hidden_size"],
        )
    return {}


EXPERTS_OF_MLP_SIZE = Derived(to_values=_size_to_values, to_hf=_size_to_hf, depends=("ffn_hidden_size",))
"""The experts' hidden size where config.json names only that of the MLP."""


def _renormalised_to_values(hf_config: Values) -> dict[str, Any]:
    return {"moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False)}


def _renormalised_to_hf(values: Values) -> dict[str, Any]:
    return {"norm_topk_prob": not values["moe_router_pre_softmax"]}


RENORMALISED = Derived("norm_topk_prob", to_values=_renormalised_to_values, to_hf=_renormalised_to_hf)
"""The weights of a token's experts are shares of all experts, or of those few; megatron-core's softmax comes before or
after their choice."""


def _sparse_to_values(hf_config: Values) -> dict[str, Any]:
    step, dense = hf_config.get("decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or ()
    layers = range(hf_config["num_hidden_layers"])
    pattern = tuple(int(layer not in dense and (layer + 1) % step == 0) for layer in layers)
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _sparse_to_hf(values: Values) -> dict[str, Any]:
    dense = [layer for layer, experts in enumerate(layers_of_experts(values)) if not experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


SPARSE_LAYERS = Derived(
    "decoder_sparse_step",
    "mlp_only_layers",
    to_values=_sparse_to_values,
    to_hf=_sparse_to_hf,
    depends=("num_layers",),
)
"""Which layers have experts, as Qwen's configurations say it."""


def _first_dense_to_values(hf_config: Values) -> dict[str, Any]:
    dense, layers = hf_config.get("first_k_dense_replace") or 0, hf_config["num_hidden_layers"]
    return {"moe_layer_freq": (0,) * dense + (1,) * (layers - dense) if dense else 1}


def _first_dense_to_hf(values: Values) -> dict[str, Any]:
    kinds = layers_of_experts(values)
    dense = kinds.index(True) if True in kinds else len(kinds)
    if not all(kinds[dense:]):
        raise ConversionError(
            "only the first layers can be without experts in this family", got=values["moe_layer_freq"]
        )
    return {"first_k_dense_replace": dense}


FIRST_LAYERS_DENSE = Derived(
    "first_k_dense_replace", to_values=_first_dense_to_values, to_hf=_first_dense_to_hf, depends=("num_layers",)
)
"""How many layers at the start have no experts."""


def _group_values(groups: int | None, chosen: int | None, judges: int) -> dict[str, Any]:
    if (groups or 1) == 1:
        groups = chosen = None
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_experts": judges if groups else None,
    }


def _group_keys(values: Values, judges: int) -> dict[str, Any]:
    groups, chosen, few = (values[f"moe_router_{name}"] for name in ("num_groups", "group_topk", "group_experts"))
    if groups and (few or values["moe_router_topk"] // chosen) != judges:
        raise ConversionError(
            "in this family so many of its experts judge a group",
            got=f"--moe-router-group-experts {few}",
            allowed=judges,
        )
    return {"n_group": groups or 1, "topk_group": chosen or 1}


def groups(judges: int) -> Derived:
    """Rule for groups of experts, of which a token chooses some by their ``judges`` best experts."""
    return Derived(
        "n_group",
        "topk_group",
        to_values=lambda hf_config: _group_values(hf_config.get("n_group"), hf_config.get("topk_group"), judges),
        to_hf=lambda values: _group_keys(values, judges),
        depends=("moe_router_topk",),
    )


def _greedy_to_values(hf_config: Values) -> dict[str, Any]:
    methods = ("greedy", "group_limited_greedy")
    method = hf_config.get("topk_method") or methods[0]
    if method not in methods:
        raise ConversionError("config.json: unknown topk_method", got=method, allowed=", ".join(methods))
    limited = method == methods[1]
    return _group_values(hf_config.get("n_group") if limited else None, hf_config.get("topk_group"), 1)


def _greedy_to_hf(values: Values) -> dict[str, Any]:
    method = "group_limited_greedy" if values["moe_router_num_groups"] else "greedy"
    return {"topk_method": method, **_group_keys(values, 1)}


GREEDY_GROUPS = Derived(
    "topk_method",
    "n_group",
    "topk_group",
    to_values=_greedy_to_values,
    to_hf=_greedy_to_hf,
    depends=("moe_router_topk",),
)
"""The same where ``topk_method`` says whether groups count; the best expert judges its group (DeepSeek-V2)."""

GROUP_FIELDS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_experts")


def shared_experts(key: str) -> Derived:
    """Rule for experts that every token goes to, as many as ``key`` says, of the size of the others."""

    def to_values(hf_config: Values) -> dict[str, Any]:
        size = (hf_config.get(key) or 0) * hf_config["moe_intermediate_size"]
        return {"moe_shared_expert_intermediate_size": size or None}

    def to_hf(values: Values) -> dict[str, Any]:
        whole, size = values["moe_shared_expert_intermediate_size"] or 0, values["moe_ffn_hidden_size"]
        if whole % size:
            raise ConversionError("shared experts are as large as the others in this family", got=f"{whole}, {size}")
        return {key: whole // size}

    return Derived(key, to_values=to_values, to_hf=to_hf, depends=("moe_ffn_hidden_size",))


TRAINING_OF_THE_ROUTER = Ignore(
    "router_aux_loss_coef",
    "output_router_logits",
    why="transformers' way to train the router; --moe-aux-loss-coeff is ours",
)


_FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")


def _further_to_values(hf_config: Values) -> dict[str, Any]:
    for key in _FURTHER:
        if hf_config.get(key):
            raise ConversionError(
                f"config.json: {key} is not supported for this family (multi-token prediction is planned)",
                got=hf_config[key],
                allowed=0,
            )
    return {}


NO_FURTHER_TOKENS = Derived(*_FURTHER, to_values=_further_to_values, to_hf=lambda _values: {_FURTHER[0]: 0})
"""No layers that predict further tokens; transformers takes one where config.json does not say so."""


def number_of_experts(*keys: str) -> tuple[Rule, ...]:
    """Rules for how many experts there are, by the first of ``keys`` that config.json has (the
    first of all is written), and how many a token goes to."""

    def to_values(hf_config: Values) -> dict[str, Any]:
        for key in keys:
            if hf_config.get(key):
                return {"num_moe_experts": hf_config[key]}
        raise ConversionError(f"config.json lacks {keys[0]!r}")

    def to_hf(values: Values) -> dict[str, Any]:
        return {keys[0]: values["num_moe_experts"]}

    return Derived(*keys, to_values=to_values, to_hf=to_hf), Rename("num_experts_per_tok", "moe_router_topk")


_MCORE = "decoder.layers.{l}.mlp."


def shared_expert_weights(place: str) -> tuple[ParamMap, ...]:
    """The experts that every token goes to, which are one; ``place`` is Hugging Face's module of it."""
    return (
        ParamMap(
            _MCORE + "shared_experts.linear_fc1.weight",
            (f"{place}.gate_proj.weight", f"{place}.up_proj.weight"),
            GateUp(),
            Column(parts=2),
            experts=True,
        ),
        ParamMap(
            _MCORE + "shared_experts.linear_fc2.weight", (f"{place}.down_proj.weight",), shard=Row(), experts=True
        ),
    )


SHARED_EXPERT = (
    *shared_expert_weights("model.layers.{l}.mlp.shared_expert"),
    ParamMap(_MCORE + "shared_experts.gate_weight", ("model.layers.{l}.mlp.shared_expert_gate.weight",), experts=True),
)
"""An expert that every token goes to, with a gate of its own, by Qwen's names."""


def routed_experts(place: str, gate: str, up: str, down: str, router: str = "gate") -> tuple[ParamMap, ...]:
    """Router and experts of a layer.

    Args:
        place: Hugging Face's module of them, such as ``model.layers.{l}.mlp``.
        gate: the name of an expert's gate matrix.
        up: of its up matrix.
        down: of its down matrix.
        router: of the router.
    """
    expert = place + ".experts.{e}."
    return (
        ParamMap(_MCORE + "router.weight", (f"{place}.{router}.weight",), experts=True),
        ParamMap(
            _MCORE + "experts.linear_fc1.weight{e}",
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"),
            GateUp(),
            Column(parts=2),
            experts=True,
        ),
        ParamMap(_MCORE + "experts.linear_fc2.weight{e}", (f"{expert}{down}.weight",), shard=Row(), experts=True),
    )


def balancing_bias(name: str) -> ParamMap:
    """What is added to each expert's score when experts are chosen, and learnt from their load alone."""
    return ParamMap(_MCORE + "router.expert_bias", (name,), experts=True, trained=False)
