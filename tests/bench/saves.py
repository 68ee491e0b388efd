"""What a save costs: against megatron-core's writer, for the training that waits, and against a copy of its files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.metadata import version

from tests.bench.harness import Figure, Figures, Machine, benchmark, figure
from tests.distributed.pool import Pool

SIDE = "tests.bench.saves_side"
TURNS = 5


@benchmark
def saves(machine: Machine) -> Figures:
    """Eight ranks with a tiny model; one with 80M parameters and their moments. Files are waited for on both sides."""
    del machine
    pool = Pool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            each = pool.run(f"{SIDE}:writers", 8, timeout=600, root=folder, turns=TURNS)
        turns = [{name: max(rank[turn][name] for rank in each) for name in ("ours", "theirs")} for turn in range(TURNS)]
        with tempfile.TemporaryDirectory() as folder:
            alone = pool.run(f"{SIDE}:stalls", 1, timeout=600, root=folder, turns=TURNS)[0]
    finally:
        pool.close()
    rates = [{name: turn["MB"] / turn[name] for name in ("at once", "written", "copy")} for turn in alone]
    return [
        _figure(
            "a save, 8 ranks, tiny model",
            f"megatron-core {version('megatron-core')} writer",
            "s",
            turns,
            "ours",
            "theirs",
        ),
        _figure("training waits, --async-save", "training waits, save at once", "s", alone, "background", "at once"),
        _figure("save at once, fsync", "copy of its files, fsync", "MB/s", rates, "at once", "copy"),
        _figure("save in the background, fsync", "copy of its files, fsync", "MB/s", rates, "written", "copy"),
    ]


def _figure(
    setting: str, peer: str, unit: str, turns: Sequence[dict[str, float]], name_ours: str, name_peer: str
) -> Figure:
    return figure(setting, peer, [turn[name_ours] for turn in turns], [turn[name_peer] for turn in turns], unit=unit)
