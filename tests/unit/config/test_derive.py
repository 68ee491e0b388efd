"""Derived values against Megatron's own formulas and megatron-core's own configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_llm.config.derive import padded_vocab_size
from mindspeed_llm.config.resolve import DERIVED, from_values

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "seq_length": 64,
    "micro_batch_size": 1,
}


@given(st.integers(1, 200_000), st.integers(1, 256), st.integers(1, 16))
def test_padded_vocabulary_is_the_smallest_multiple(tokens: int, divisible_by: int, tensor: int) -> None:
    padded = padded_vocab_size(tokens, divisible_by, tensor)
    assert padded % (divisible_by * tensor) == 0
    assert tokens <= padded < tokens + divisible_by * tensor


def test_swiglu_rounds_two_thirds_to_64() -> None:
    # Llama-2-7B: 4h * 2/3 = 10922.67; Megatron takes 10880 where the released model takes 11008 by another rule.
    cfg = from_values({**TINY, "hidden_size": 4096, "gated_linear_unit": True, "activation_func": "silu"})
    assert cfg.transformer.ffn_hidden_size == 10880
    assert from_values({**TINY, "hidden_size": 4096}).transformer.ffn_hidden_size == 16384


def test_sizes_are_what_megatron_core_derives() -> None:
    import mindspeed_llm.core  # noqa: F401  brings megatron-core in behind its seam

    from megatron.core.transformer.transformer_config import TransformerConfig

    theirs = TransformerConfig(num_layers=4, hidden_size=120, num_attention_heads=6)
    ours = from_values({**TINY, "hidden_size": 120, "num_attention_heads": 6}).transformer
    for name in ("ffn_hidden_size", "kv_channels", "num_query_groups"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    ("given_values", "groups"),
    [({}, 4), ({"group_query_attention": True}, 1), ({"group_query_attention": True, "num_query_groups": 2}, 2)],
)
def test_query_groups(given_values: dict[str, Any], groups: int) -> None:
    assert from_values({**TINY, **given_values}).transformer.num_query_groups == groups


def test_data_parallel_size_and_global_batch() -> None:
    cfg = from_values({**TINY, "tensor_model_parallel_size": 2, "micro_batch_size": 3}, world_size=8)
    assert cfg.distributed.data_parallel_size == 4
    assert cfg.training.global_batch_size == 12


def test_a_run_of_no_steps_has_a_batch_of_one() -> None:
    none = {name: value for name, value in TINY.items() if name != "micro_batch_size"}
    assert from_values({**none, "train_iters": 0}, world_size=2).training.global_batch_size == 2
    assert from_values({**none, "train_iters": 1}).training.micro_batch_size is None


@pytest.mark.parametrize(
    "spelling", [{"num_layers_per_virtual_pipeline_stage": 1}, {"num_virtual_stages_per_pipeline_rank": 2}]
)
def test_both_spellings_of_interleaving(spelling: dict[str, int]) -> None:
    cfg = from_values({**TINY, "pipeline_model_parallel_size": 2, "global_batch_size": 4, **spelling}, world_size=2)
    assert cfg.transformer.virtual_pipeline_model_parallel_size == 2
    assert cfg.sources["virtual_pipeline_model_parallel_size"] == DERIVED


@pytest.mark.parametrize(
    "spelling", [{"num_layers_per_virtual_pipeline_stage": 2}, {"num_virtual_stages_per_pipeline_rank": 1}]
)
def test_one_interleaved_stage_is_none(spelling: dict[str, int]) -> None:
    cfg = from_values({**TINY, "pipeline_model_parallel_size": 2, **spelling}, world_size=2)
    assert cfg.transformer.virtual_pipeline_model_parallel_size is None


def test_two_interleaved_ranks_do_not_batch_their_messages() -> None:
    interleaved = {**TINY, "num_layers": 8, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 8}
    two = from_values({**interleaved, "pipeline_model_parallel_size": 2}, world_size=2).transformer
    four = from_values({**interleaved, "pipeline_model_parallel_size": 4}, world_size=4).transformer
    plain = from_values({**TINY, "pipeline_model_parallel_size": 2}, world_size=2).transformer
    overlapped = from_values(
        {**interleaved, "pipeline_model_parallel_size": 4, "overlap_p2p_comm": True}, world_size=4
    ).transformer
    assert [two.batch_p2p_comm, four.batch_p2p_comm, plain.batch_p2p_comm] == [False, True, True]
    assert (overlapped.overlap_p2p_comm, overlapped.batch_p2p_comm) == (True, False)


def test_overlap_without_interleaving_is_turned_off_and_said() -> None:
    cfg = from_values({**TINY, "pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}, world_size=2)
    assert cfg.transformer.overlap_p2p_comm is False
    assert "--overlap-p2p-comm: True (python) becomes False" in "\n".join(cfg.notices)


def test_sequence_parallelism_alone_is_turned_off_and_said() -> None:
    cfg = from_values({**TINY, "sequence_parallel": True})
    assert cfg.transformer.sequence_parallel is False
    assert "--sequence-parallel: True (python) becomes False" in "\n".join(cfg.notices)


def test_bf16_sums_gradients_in_fp32_unless_told_otherwise() -> None:
    assert from_values({**TINY, "bf16": True}).ddp.grad_reduce_in_fp32 is True
    assert from_values({**TINY, "bf16": True, "grad_reduce_in_fp32": False}).ddp.grad_reduce_in_fp32 is False
    assert from_values(TINY).ddp.grad_reduce_in_fp32 is False


def test_dynamic_loss_scale_expects_infinities() -> None:
    dynamic = from_values({**TINY, "fp16": True})
    static = from_values({**TINY, "fp16": True, "loss_scale": 128.0})
    assert (dynamic.training.check_for_nan_in_loss, dynamic.ddp.check_for_nan_in_grad) == (False, False)
    assert (static.training.check_for_nan_in_loss, static.ddp.check_for_nan_in_grad) == (True, True)


def test_schedules_follow_the_length_of_the_run() -> None:
    cfg = from_values({**TINY, "train_iters": 50, "lr": 1e-3, "weight_decay": 0.1})
    assert cfg.schedule.lr_decay_iters == 50
    assert (cfg.schedule.start_weight_decay, cfg.schedule.end_weight_decay) == (0.1, 0.1)
    assert cfg.schedule.lr_decay_samples is None


@pytest.mark.parametrize(("given_values", "dtype"), [({"bf16": True}, "bf16"), ({"fp16": True}, "fp16"), ({}, "fp32")])
def test_written_weights_are_in_the_models_format(given_values: dict[str, Any], dtype: str) -> None:
    assert from_values({**TINY, **given_values}).checkpoint.params_dtype == dtype


def test_llama3_scaling_has_megatrons_default_factor() -> None:
    cfg = from_values({**TINY, "position_embedding_type": "rope", "rope_scaling_type": "llama3"})
    assert cfg.model.rope_scaling_factor == 8.0


def test_longrope_stretches_as_transformers_does() -> None:
    import torch
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Phi-3's configuration states no factor, either.
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 16, "short_factor": [1.0] * 16}
    theirs = Phi3Config(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=TINY["max_position_embeddings"],
        original_max_position_embeddings=16,
        rope_parameters=scaling,
    )
    _, temperature = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"))
    longrope = {
        "position_embedding_type": "rope",
        "rope_scaling_type": "longrope",
        "rope_scaling_original_max_position_embeddings": 16,
        "long_factor": (2.0,) * 16,
        "short_factor": (1.0,) * 16,
    }
    factor = from_values({**TINY, **longrope}).model.rope_scaling_factor
    assert factor is not None
    assert math.sqrt(1 + math.log(factor) / math.log(16)) == pytest.approx(temperature, rel=1e-12)


def test_recompute_options_without_recomputation_are_dropped_and_said() -> None:
    cfg = from_values({**TINY, "recompute_method": "block", "recompute_num_layers": 2})
    assert cfg.transformer.recompute_method is None
    assert "nothing is recomputed without --recompute-granularity" in "\n".join(cfg.notices)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"position_embedding_type": "rope"}, True),
        ({"position_embedding_type": "rope", "reset_attention_mask": True}, False),
        ({"position_embedding_type": "learned_absolute"}, False),
    ],
)
def test_positions_that_nothing_reads_are_remarked_once(values: dict[str, Any], said: bool) -> None:
    notices = from_values({**TINY, **values, "reset_position_ids": True}).notices
    assert sum("--reset-position-ids has no effect" in notice for notice in notices) == said
    assert not any("--reset-position-ids" in notice for notice in from_values({**TINY, **values}).notices)
