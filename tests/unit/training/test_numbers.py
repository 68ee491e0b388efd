"""The running mean of the loss, and what a skipped step with a bad loss counts as."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.training import report
from mindspeed_llm.training.state import LOSS_WINDOW, Progress
from mindspeed_llm.training.step import StepResult


def mean_of(losses: list[float]) -> Progress:
    progress = Progress()
    for loss in losses:
        progress.take_loss(loss)
    return progress


def test_the_mean_of_few_losses_is_plain() -> None:
    losses = [random.Random(3).uniform(1, 9) for _ in range(LOSS_WINDOW)]
    for count in (1, 2, 17, LOSS_WINDOW):
        assert mean_of(losses[:count]).loss_mean == pytest.approx(sum(losses[:count]) / count, rel=1e-12)


def test_the_mean_of_many_losses_forgets() -> None:
    draw = random.Random(4)
    losses = [draw.uniform(1, 9) for _ in range(3 * LOSS_WINDOW)]
    first, later = losses[:LOSS_WINDOW], losses[LOSS_WINDOW:]
    keep = 1 - 1 / LOSS_WINDOW
    closed = keep ** len(later) * sum(first) / LOSS_WINDOW
    closed += sum(loss * keep ** (len(later) - 1 - number) / LOSS_WINDOW for number, loss in enumerate(later))
    assert mean_of(losses).loss_mean == pytest.approx(closed, rel=1e-12)


def test_progress_goes_through_a_save_and_takes_older_ones() -> None:
    progress = mean_of([3.0, 0.1, 7.7])
    progress.iteration = 3
    taken = Progress()
    taken.load_state_dict(progress.state_dict())
    assert taken == progress
    older = {name: value for name, value in progress.state_dict().items() if name not in ("loss_mean", "losses")}
    taken = Progress()
    taken.load_state_dict(older)
    assert taken == Progress(iteration=3)


def test_what_a_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(report.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(report.dist, "get_world_size", lambda: 1)
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64, "seq_length": 8}
    sizes |= {"max_position_embeddings": 8, "log_interval": 5, "micro_batch_size": 1, "train_iters": 5, "lr": 1.0}
    reporter = report.Reporter(from_values(sizes, world_size=1), 5)
    monkeypatch.setattr(reporter, "_emit", rows.append)
    for step, (loss, skipped) in enumerate(
        [(2.0, False), (math.nan, True), (9.0, True), (4.0, False), (math.inf, False)], start=1
    ):
        result = StepResult(loss, 8, 1.0, 0.1, 0.0, 1.0, skipped)
        reporter.step(Progress(iteration=step, consumed_samples=step), result, 1, 1)
    (row,) = rows
    assert (row["skipped"], row["nan"], row["lm_loss"]) == (2, 2, 3.0)
    assert row["elapsed_ms"] * row["tokens_per_s"] == pytest.approx(8 * 1000)
