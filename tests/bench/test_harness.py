"""The harness measures what it says: order, medians, memory of known size, bandwidth of a known copy."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench import harness
from tests.bench.harness import AnonymousPeak, alternate, benchmark, discover, figure, measure_machine, run, spread

PUBLISHED = harness.ROOT / "docs" / "bench.json"
MACHINE = {
    "cpu": str,
    "threads": int,
    "torch": str,
    "commit": str,
    "copy_gb_s": float,
    "matmul_bf16_tflops": float,
}
ROW = {
    "name": str,
    "setting": str,
    "ours": list,
    "peer": list,
    "peer_version": str,
    "unit": str,
    "ratio": float,
    "target": float | None,
    "holds": bool | None,
    "mem_ours": int | None,
    "mem_peer": int | None,
    "mem_ratio": float | None,
}


def test_sides_take_turns_and_medians_ignore_an_outlier() -> None:
    order: list[str] = []
    values = {"a": iter([9.0, 1.0, 2.0, 300.0]), "b": iter([9.0, 4.0, 4.0, 4.0])}

    def measure(side: str) -> float:
        order.append(side)
        return next(values[side])

    row = alternate("a", "b", lambda: measure("a"), lambda: measure("b"), unit="s", turns=3)
    assert "".join(order) == "abababab"
    assert (row.ours, row.peer, row.ratio) == ([1.0, 2.0, 300.0], [4.0, 4.0, 4.0], 0.5)
    assert spread(row.ours) == pytest.approx(299 / 2)
    assert spread(row.peer) == 0


@pytest.mark.parametrize(("unit", "holds"), [("tokens/s", False), ("runs", False), ("s", True), ("MiB", True)])
def test_more_of_a_rate_is_better_and_less_of_a_cost(unit: str, holds: bool) -> None:
    assert figure("a", "b", [9.0], [10.0], unit=unit, target=1.0).holds is holds
    assert figure("a", "b", [10.0], [10.0], unit=unit, target=1.0).holds is True
    assert figure("a", "b", [11.0], [10.0], unit=unit, target=1.0).holds is not holds


def test_peak_memory_is_that_of_a_process_and_its_children() -> None:
    # 64 MiB in each of two, released again before the end; a file that is mapped does not count.
    hold = "import time; block = bytearray(b'x') * (64 << 20); time.sleep(0.3); del block; time.sleep(0.1)"
    both = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {hold!r}]); {hold}; child.wait()"
    peaks: list[int] = []
    for code in ("import subprocess, sys, time; time.sleep(0.2)", both):
        process = subprocess.Popen([sys.executable, "-c", code])
        with AnonymousPeak(process.pid) as peak:
            process.wait()
        peaks.append(peak.bytes)
    # The child brings an interpreter of its own.
    assert (peaks[1] - peaks[0]) / 2**20 == pytest.approx(128, abs=12)


def test_the_machine_is_measured() -> None:
    machine = measure_machine(copy_mib=16, size=128, turns=1)
    assert machine.cpu
    assert min(machine.copy_gb_s, machine.matmul_bf16_tflops) > 0
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=harness.ROOT, capture_output=True, text=True, check=True)
    assert head.stdout.startswith(machine.commit.removesuffix("-dirty"))


def test_a_name_is_taken_once() -> None:
    assert "help_time" in discover()

    def help_time(machine: object) -> list[object]:
        return []

    with pytest.raises(ValueError, match="two benchmarks are called help_time"):
        benchmark(help_time)  # pyright: ignore[reportArgumentType]


def check_form(results: dict[str, Any]) -> None:
    assert results.keys() == {"machine", "rows"}
    for part, form in ((results["machine"], MACHINE), *((row, ROW) for row in results["rows"])):
        assert list(part) == list(form)
        for key, kind in form.items():
            # JSON writes a whole number of seconds without its point.
            value = float(part[key]) if type(part[key]) is int and kind in (float, float | None) else part[key]
            assert isinstance(value, kind), key
    for row in results["rows"]:
        again = figure(
            row["setting"], row["peer_version"], row["ours"], row["peer"], unit=row["unit"], target=row["target"]
        )
        assert row["ratio"] == pytest.approx(again.ratio, abs=0.001)
        assert row["holds"] is again.holds
        if row["mem_ratio"] is not None:
            assert row["mem_ratio"] == pytest.approx(row["mem_ours"] / row["mem_peer"], abs=0.001)


def test_results_and_what_is_published_have_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        figure("with", "peer 1.0", [1.0, 2.0], [2.0, 2.0], unit="s", target=1.0, memory=(2, 4)),
        figure("without", "peer 1.0", [1.0], [2.0], unit="MB/s"),
    ]
    monkeypatch.setattr(harness, "discover", lambda: {"mine": lambda machine: rows})
    monkeypatch.setattr(harness, "measure_machine", lambda: measure_machine(copy_mib=1, size=16, turns=1))
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "bench" / "results.json")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "_commit", lambda: "0123456")
    run("mine")
    written = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert [statistics.median(row["ours"]) for row in written["rows"]] == [1.5, 1.0]
    check_form(written)
    check_form(json.loads(PUBLISHED.read_text()))
