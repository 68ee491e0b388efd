"""A mixture of experts that cannot be is refused once, with numbers; MindSpeed-LLM's spellings mean what they say."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_llm.cli.flags import parse_pretrain
from mindspeed_llm.config.resolve import Layer, resolve
from mindspeed_llm.config.rules import PRETRAIN_RULES
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import ConfigError
from tests.unit.config.test_rules import TINY, refused

EXPERTS: dict[str, Any] = {"num_moe_experts": 8, "add_bias_linear": False}
SHARED = {"moe_shared_expert_intermediate_size": 32}
SIGMOID = {"moe_router_score_function": "sigmoid"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}

CASES: list[tuple[int, dict[str, Any], str]] = [
    # sizes
    (1, {"num_moe_experts": 0}, "--num-moe-experts is out of range"),
    (1, {"moe_ffn_hidden_size": 0}, "--moe-ffn-hidden-size is out of range"),
    (1, {"moe_router_topk": 9}, "a token goes to more experts than there are"),
    (1, {"moe_router_topk": 0}, "--moe-router-topk is out of range"),
    (1, {"moe_layer_freq": 0}, "--moe-layer-freq is out of range"),
    (1, {"moe_layer_freq": (1, 0)}, "2 entries for 4 layers"),
    (1, {"moe_layer_freq": (1, 0, 2, 0)}, "does not say 1 or 0 for every layer"),
    (1, {"moe_layer_freq": (0, 0, 0, 0)}, "no layer has experts"),
    (1, {"first_k_dense_replace": 4}, "no layer has experts"),
    (1, {"first_k_dense_replace": 2, "moe_layer_freq": (0, 1, 1, 1)}, "--first-k-dense-replace contradicts"),
    (
        1,
        {"n_shared_experts": 2, "moe_ffn_hidden_size": 48, **SHARED},
        "--moe-shared-expert-intermediate-size 32, --n-shared-experts 2 x 48",
    ),
    (1, {"moe_shared_expert_gate": True}, "there is no shared expert"),
    # routing
    (1, {"moe_router_topk": 1}, "the router would learn nothing"),
    (1, {"moe_router_enable_expert_bias": True}, "added to sigmoid scores"),
    (1, {"moe_router_group_topk": 1}, "routing within groups needs"),
    (1, {"moe_router_num_groups": 2}, "--moe-router-num-groups 2, --moe-router-group-topk None"),
    (1, {"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "8 experts, 3 groups"),
    (1, {"moe_router_num_groups": 4, "moe_router_group_topk": 8}, "2 experts of 8 among 4 groups of 2"),
    (1, {"moe_router_num_groups": 8, "moe_router_group_topk": 1}, "2 experts of 1 among 8 groups of 1"),
    (
        1,
        {"moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
        "a divisor of 3, up to 3",
    ),
    (1, {"moe_router_group_experts": 2}, "--moe-router-group-experts 2, --moe-router-num-groups None"),
    (
        1,
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_group_experts": 3},
        "so many experts of a group cannot judge it",
    ),
    # balancing
    (1, {"moe_router_load_balancing_type": "seq_aux"}, "aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, none"),
    (1, {"moe_router_load_balancing_type": "group_limited_greedy"}, "it ranks groups by their best expert"),
    (
        1,
        {"moe_router_load_balancing_type": ("aux_loss", "sinkhorn"), "moe_aux_loss_coeff": (0.1, 0.1)},
        "allowed: aux_loss, seq_aux_loss, global_aux_loss\n",
    ),
    (
        1,
        {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": 0.1},
        "each kind of balancing has a weight of its own",
    ),
    (1, {"moe_aux_loss_coeff": (0.1, 0.1)}, "each kind of balancing has a weight of its own"),
    (1, {"moe_aux_loss_coeff": -0.1}, "--moe-aux-loss-coeff is out of range"),
    (1, {"moe_z_loss_coeff": -0.1}, "--moe-z-loss-coeff is out of range"),
    (1, {"moe_input_jitter_eps": 1.0}, "--moe-input-jitter-eps is out of range"),
    (1, {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.1}, "sinkhorn balances by itself"),
    (
        1,
        {"moe_router_load_balancing_type": "sinkhorn", "moe_expert_capacity_factor": 1.0},
        "sinkhorn knows no capacity",
    ),
    (1, {"moe_expert_capacity_factor": 0.0}, "--moe-expert-capacity-factor is out of range"),
    (1, {"moe_pad_expert_input_to_capacity": True}, "needs a capacity"),
    # dispatch and layout
    (1, {"moe_token_dispatcher_type": "flex"}, "libraries for CUDA that are not used here"),
    (1, {"moe_shared_expert_overlap": True, **SHARED}, "shared experts are computed while tokens travel only"),
    (3, {"expert_model_parallel_size": 3}, "8 experts, 3 ranks"),
    (2, {"expert_model_parallel_size": 4}, "EP 4 x ETP 1 x PP 1 = 4, WORLD_SIZE 2"),
    (2, {"expert_model_parallel_size": 2, **TP2}, "EP 2 x ETP 2 x PP 1 = 4, WORLD_SIZE 2"),
    (2, {"expert_tensor_parallel_size": 2, "moe_ffn_hidden_size": 33}, "33 and 2 ranks"),
    (2, {"moe_shared_expert_intermediate_size": 33, **TP2}, "33 and 2 ranks"),
    (2, {"add_bias_linear": True, **TP2}, "experts with biases cannot be cut"),
    (2, {"tensor_model_parallel_size": 2}, "add --sequence-parallel"),
]


@pytest.mark.parametrize(("world_size", "values", "message"), CASES, ids=[message for _, _, message in CASES])
def test_refused(world_size: int, values: dict[str, Any], message: str) -> None:
    text = refused(world_size, **{**EXPERTS, **values})
    assert message in text
    assert "problems" not in text.splitlines()[0], "one mistake, one error"


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"expert_model_parallel_size": 2}, "--expert-model-parallel-size"),
        ({"moe_ffn_hidden_size": 32, "moe_aux_loss_coeff": 0.1}, "--moe-ffn-hidden-size, --moe-aux-loss-coeff"),
        ({"n_shared_experts": 1}, "--n-shared-experts"),
    ],
)
def test_a_dense_model_has_no_options_of_experts(values: dict[str, Any], flags: str) -> None:
    text = refused(2, **values)
    assert f"there are no experts for these to act on\n  got: {flags}\n" in text


def test_a_dense_model_may_say_sizes_of_one() -> None:
    values = {**TINY, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    resolve([Layer("python", values)], rules=PRETRAIN_RULES)


def parse(words: str, world_size: int = 1) -> RunConfig:
    argv = [f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"
            for name, value in TINY.items()]  # fmt: skip
    argv += ["--disable-bias-linear", "--num-experts", "8", *words.split()]
    return parse_pretrain(argv, environ={"WORLD_SIZE": str(world_size)})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"num_moe_experts": 8, "moe_layer_freq": 1, "moe_ffn_hidden_size": 256}),
        ("--moe-intermediate-size 48 --n-shared-experts 2", {"moe_shared_expert_intermediate_size": 96}),
        # layers
        ("--first-k-dense-replace -1 --moe-layer-freq -1", {"moe_layer_freq": 1}),
        ("--first-k-dense-replace 1 --moe-layer-freq 1", {"moe_layer_freq": (0, 1, 1, 1)}),
        ("--first-k-dense-replace 1 --moe-layer-freq 2", {"moe_layer_freq": (0, 0, 1, 0)}),
        ("--moe-layer-freq ([0]*1+[1]*3)", {"moe_layer_freq": (0, 1, 1, 1)}),
        ("--moe-layer-freq 2", {"moe_layer_freq": 2}),
        # routing
        (
            "--moe-router-topk 4 --n-group 4 --topk-group 2 --routed-scaling-factor 2.5",
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5},
        ),
        (
            "--moe-router-load-balancing-type softmax_topk",
            {"moe_router_load_balancing_type": "none", "moe_router_pre_softmax": True},
        ),
        (
            "--moe-router-load-balancing-type softmax_topk --norm-topk-prob",
            {"moe_router_load_balancing_type": "none", "moe_router_pre_softmax": False},
        ),
        ("--norm-topk-prob --moe-router-pre-softmax", {"moe_router_pre_softmax": False}),
        ("--norm-topk-prob --moe-router-topk 1 --moe-router-pre-softmax", {"moe_router_pre_softmax": True}),
        (
            "--moe-router-load-balancing-type none --seq-aux --moe-aux-loss-coeff 1e-4",
            {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4},
        ),
        ("--seq-aux", {"moe_router_load_balancing_type": "aux_loss"}),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
            {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": (0.1, 0.2)},
        ),
        ("--router-gating-in-fp32", {"moe_router_dtype": "fp32"}),
        ("--fix-router", {"moe_router_force_load_balancing": True}),
        ("--moe-expert-capacity-factor -1", {"moe_expert_capacity_factor": None}),
        ("--moe-z-loss-coeff 0", {"moe_z_loss_coeff": None}),
        # dispatch
        ("--moe-token-dispatcher-type alltoall_seq", {"moe_token_dispatcher_type": "alltoall"}),
        ("--moe-token-dispatcher-type allgather", {"moe_token_dispatcher_type": "allgather"}),
        (
            "--moe-shared-expert-intermediate-size 32 --shared-expert-gate --shared-expert-gate-output-dimension 1",
            {"moe_shared_expert_gate": True},
        ),
    ],
)
def test_spellings(words: str, expected: dict[str, Any]) -> None:
    cfg = parse(words)
    assert {name: cfg.value(name) for name in expected} == expected


def test_experts_over_tensor_parallel_ranks_are_whole() -> None:
    words = "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --moe-tp-extend-ep"
    cfg = parse(words, world_size=4)
    assert (cfg.transformer.expert_model_parallel_size, cfg.transformer.expert_tensor_parallel_size) == (4, 1)
    assert any("--expert-model-parallel-size: 2 (command line) becomes 4" in notice for notice in cfg.notices)


@pytest.mark.parametrize(
    "words",
    [
        "--moe-grouped-gemm",
        "--moe-permutation-async-comm",
        "--moe-permute-fusion",
        "--use-fused-moe-token-permute-and-unpermute",
        "--moe-device-level-aux-loss-coeff 0",
        "--moe-comm-aux-loss-coeff 0.0",
    ],
)
def test_what_changes_nothing_is_said(words: str) -> None:
    assert any(f"{words.split()[0]} has no effect here" in notice for notice in parse(words).notices)


def test_a_loss_that_is_lacking_is_refused() -> None:
    with pytest.raises(ConfigError, match="--moe-comm-aux-loss-coeff is not available with this value"):
        parse("--moe-comm-aux-loss-coeff 0.02")
