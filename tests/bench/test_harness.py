"""The harness measures what it says: order, medians, memory of known size, bandwidth of a known copy."""

from __future__ import annotations

import pytest

from tests.bench.harness import alternate, benchmark, discover, measure_machine, peak_memory_mib


def test_sides_take_turns_and_medians_ignore_an_outlier() -> None:
    order: list[str] = []
    values = {"a": iter([9.0, 1.0, 2.0, 300.0]), "b": iter([9.0, 4.0, 4.0, 4.0])}

    def measure(side: str) -> float:
        order.append(side)
        return next(values[side])

    figure = alternate("a", "b", lambda: measure("a"), lambda: measure("b"), unit="s", turns=3)
    assert "".join(order) == "abababab"
    assert (figure.value_a, figure.value_b, figure.ratio) == (2.0, 4.0, 0.5)
    assert figure.spread_a == pytest.approx(299 / 2)
    assert figure.spread_b == 0


def test_peak_memory_is_above_the_imports() -> None:
    # 64 MiB that are touched, released again before the end.
    measured = peak_memory_mib("block = bytearray(b'x') * (64 << 20)\ndel block", imports="import json")
    assert measured == pytest.approx(64, abs=4)


def test_the_machine_is_measured() -> None:
    machine = measure_machine(copy_mib=16, size=128, turns=1)
    assert machine.processor
    assert min(machine.copy_gb_per_s, machine.fp32_tflops, machine.bf16_tflops) > 0


def test_a_name_is_taken_once() -> None:
    assert "help_time" in discover()

    def help_time(machine: object) -> list[object]:
        return []

    with pytest.raises(ValueError, match="two benchmarks are called help_time"):
        benchmark(help_time)  # pyright: ignore[reportArgumentType]
