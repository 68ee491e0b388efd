"""Learning rate and weight decay against closed forms and transformers' schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers

from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.training.schedule import build_scheduler

BATCH, ITERATIONS, WARMUP, STABLE_UNTIL = 8, 40, 6, 25
PEAK, LOW = 1e-2, 1e-3


def curve(steps: int = ITERATIONS + 5, **values: Any) -> tuple[list[float], list[float]]:
    """Learning rate and weight decay that each iteration of a run uses."""
    given = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "seq_length": 16,
        "micro_batch_size": 1,
        "global_batch_size": BATCH,
        "lr": PEAK,
        "min_lr": LOW,
        "weight_decay": 0.1,
        **values,
    }
    if "train_samples" not in given:
        given["train_iters"] = ITERATIONS
    group = {"lr": 0.0, "weight_decay": 0.0, "params": []}
    optimizer = cast(Any, SimpleNamespace(param_groups=[group]))
    scheduler = build_scheduler(from_values(given, world_size=1), optimizer)
    rates, decays = [], []
    for _ in range(steps):
        rates.append(group["lr"])
        decays.append(group["weight_decay"])
        scheduler.step(increment=BATCH)
    return rates, decays


def falling(shape: Callable[[float], float], start: float = WARMUP, low: float = LOW) -> list[float]:
    """Warm-up, then ``shape`` of the part from ``start`` to the last iteration that has passed, then the lowest."""
    found = []
    for n in range(ITERATIONS + 5):
        if WARMUP and n <= WARMUP:
            found.append(PEAK * n / WARMUP)
        elif n > ITERATIONS:
            found.append(low)
        else:
            part = max(0.0, (n - start) / (ITERATIONS - start))
            found.append(low + (PEAK - low) * shape(part))
    return found


def close(got: list[float], wanted: list[float]) -> None:
    assert got == pytest.approx(wanted, rel=1e-9, abs=1e-15)


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda part: 1 - part,
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
}
LAST_PHASES: dict[str, Callable[[float], float]] = {
    **SHAPES,
    "exponential": lambda part: 2 * 0.5**part - 1,
    "minus_sqrt": lambda part: 1 - math.sqrt(part),
}


@pytest.mark.parametrize("style", SHAPES)
def test_falling_styles(style: str) -> None:
    close(curve(lr_decay_style=style, lr_warmup_iters=WARMUP)[0], falling(SHAPES[style]))


@pytest.mark.parametrize("style", LAST_PHASES)
def test_wsd(style: str) -> None:
    last = ITERATIONS - STABLE_UNTIL
    rates, _ = curve(lr_decay_style="WSD", lr_warmup_iters=WARMUP, lr_wsd_decay_style=style, lr_wsd_decay_iters=last)
    close(rates, falling(LAST_PHASES[style], start=STABLE_UNTIL))
    close(rates[WARMUP : STABLE_UNTIL + 1], [PEAK] * (STABLE_UNTIL + 1 - WARMUP))


def test_constant() -> None:
    rates, _ = curve(lr_decay_style="constant", lr_warmup_iters=WARMUP)
    close(rates, [PEAK * min(1.0, n / WARMUP) for n in range(ITERATIONS + 5)])
    close(curve(lr_decay_style="constant")[0], [PEAK] * (ITERATIONS + 5))


def test_inverse_square_root() -> None:
    rates, _ = curve(lr_decay_style="inverse-square-root", lr_warmup_iters=WARMUP, min_lr=PEAK / 2.2)
    wanted = [PEAK * n / WARMUP if n <= WARMUP else PEAK * math.sqrt(WARMUP / n) for n in range(ITERATIONS + 5)]
    wanted = [rate if n <= WARMUP else max(rate, PEAK / 2.2) for n, rate in enumerate(wanted)]
    # After the decay's end the lowest rate holds, as with every style but the constant one.
    wanted[ITERATIONS + 1 :] = [PEAK / 2.2] * 4
    close(rates, wanted)
    assert wanted[ITERATIONS] == PEAK / 2.2 < wanted[WARMUP + 10]


def theirs(name: str, **arguments: Any) -> list[float]:
    """The rates of a schedule of transformers; its lowest is zero."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = getattr(transformers, f"get_{name}")(optimizer, num_warmup_steps=WARMUP, **arguments)
    found = []
    for _ in range(ITERATIONS + 1):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"lr_decay_style": "constant"}, ("constant_schedule_with_warmup", {})),
        ({"lr_decay_style": "linear"}, ("linear_schedule_with_warmup", {"num_training_steps": ITERATIONS})),
        ({"lr_decay_style": "cosine"}, ("cosine_schedule_with_warmup", {"num_training_steps": ITERATIONS})),
        ({"lr_decay_style": "inverse-square-root"}, ("inverse_sqrt_schedule", {})),
        *(
            (
                {"lr_decay_style": "WSD", "lr_wsd_decay_style": ours, "lr_wsd_decay_iters": ITERATIONS - STABLE_UNTIL},
                (
                    "wsd_schedule",
                    {
                        "num_decay_steps": ITERATIONS - STABLE_UNTIL,
                        "num_stable_steps": STABLE_UNTIL - WARMUP,
                        "decay_type": decay_type,
                    },
                ),
            )
            for ours, decay_type in (("linear", "linear"), ("cosine", "cosine"), ("minus_sqrt", "1-sqrt"))
        ),
    ],
    ids=lambda given: str(given)[:60],
)
def test_equals_transformers(values: dict[str, Any], wanted: tuple[str, dict[str, Any]]) -> None:
    rates, _ = curve(ITERATIONS + 1, lr_warmup_iters=WARMUP, min_lr=0.0, **values)
    close(rates, theirs(wanted[0], **wanted[1]))


def test_warm_up_from_another_rate() -> None:
    rates, _ = curve(lr_decay_style="constant", lr_warmup_iters=WARMUP, lr_warmup_init=4e-3)
    close(rates[: WARMUP + 1], [4e-3 + (PEAK - 4e-3) * n / WARMUP for n in range(WARMUP + 1)])


def test_warm_up_as_a_fraction_of_the_decay() -> None:
    whole, _ = curve(lr_decay_style="cosine", lr_warmup_fraction=WARMUP / ITERATIONS)
    close(whole, falling(SHAPES["cosine"]))
    half, _ = curve(lr_decay_style="constant", lr_warmup_fraction=0.3, lr_decay_iters=20)
    close(half[:8], [PEAK * min(1.0, n / 6) for n in range(8)])
    # A warm-up of 4.5 iterations: the counter is samples.
    odd, _ = curve(lr_decay_style="constant", lr_warmup_fraction=4.5 / ITERATIONS)
    close(odd[:7], [PEAK * min(1.0, n / 4.5) for n in range(7)])


def test_decay_shorter_than_the_run() -> None:
    rates, _ = curve(lr_decay_style="linear", lr_decay_iters=20)
    close(rates, [LOW + (PEAK - LOW) * max(0.0, 1 - n / 20) for n in range(ITERATIONS + 5)])


@pytest.mark.parametrize("style", [*SHAPES, "constant", "inverse-square-root", "WSD"])
def test_a_run_counted_in_samples_has_the_same_curve(style: str) -> None:
    wsd = style == "WSD"
    iterations, _ = curve(lr_decay_style=style, lr_warmup_iters=WARMUP, **({"lr_wsd_decay_iters": 10} if wsd else {}))
    samples, _ = curve(
        lr_decay_style=style,
        train_samples=ITERATIONS * BATCH,
        lr_warmup_samples=WARMUP * BATCH,
        **({"lr_wsd_decay_samples": 10 * BATCH} if wsd else {}),
    )
    close(samples, iterations)
    assert len(set(samples)) > WARMUP


def test_decay_counted_in_samples() -> None:
    rates, _ = curve(lr_decay_style="linear", train_samples=ITERATIONS * BATCH, lr_decay_samples=10 * BATCH)
    close(rates[:12], [LOW + (PEAK - LOW) * max(0.0, 1 - n / 10) for n in range(12)])


def test_weight_decay_is_constant_by_default() -> None:
    close(curve()[1], [0.1] * (ITERATIONS + 5))


@pytest.mark.parametrize(
    ("style", "shape"), [("linear", lambda part: part), ("cosine", lambda part: (1 - math.cos(math.pi * part)) / 2)]
)
@pytest.mark.parametrize("unit", ["iterations", "samples"])
def test_weight_decay_grows(style: str, shape: Callable[[float], float], unit: str) -> None:
    length = {"train_samples": ITERATIONS * BATCH} if unit == "samples" else {}
    _, decays = curve(start_weight_decay=0.02, end_weight_decay=0.2, weight_decay_incr_style=style, **length)
    close(decays, [0.02 + 0.18 * shape(min(1.0, n / ITERATIONS)) for n in range(ITERATIONS + 5)])
