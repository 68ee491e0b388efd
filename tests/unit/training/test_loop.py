"""How many steps a run has, against megatron-core's own calculator of batch sizes."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.training.loop import total_iterations

from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator


def steps(**values: Any) -> int:
    model = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "seq_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 16,
        "lr": 1e-3,
    }
    return total_iterations(from_values({**model, **values}, world_size=1))


def megatron_steps(samples: int, start: int, increment: int, ramp: int, final: int = 16) -> int:
    """Whole batches of ``samples``, the size of each from megatron-core."""
    calculator = RampupBatchsizeNumMicroBatchesCalculator(final, 2, 1, False, 0, start, increment, ramp)
    count = consumed = 0
    while True:
        calculator.update(consumed, consistency_check=False, verbose=False)
        consumed += calculator.get_current_global_batch_size()
        if consumed > samples:
            return count
        count += 1


def test_iterations_as_given() -> None:
    assert steps(train_iters=7) == 7


def test_whole_batches_of_the_samples() -> None:
    assert steps(train_samples=160) == 10
    assert steps(train_samples=175) == 10


@pytest.mark.parametrize("samples", [1, 24, 64, 100, 128, 129, 500])
@pytest.mark.parametrize(("start", "increment", "ramp"), [(2, 2, 64), (4, 4, 90), (8, 8, 128), (4, 12, 33)])
def test_ramp_up(samples: int, start: int, increment: int, ramp: int) -> None:
    got = steps(train_samples=samples, rampup_batch_size=(start, increment, ramp))
    assert got == megatron_steps(samples, start, increment, ramp)
