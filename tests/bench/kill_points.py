"""How many saves survive that their run is killed while it writes them."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.harness import Figure, Figures, Machine, benchmark, figure
from tests.distributed.cases_kill_points import SCENARIOS, Trial
from tests.distributed.pool import Pool

CASES = "tests.distributed.cases_kill_points"
WORLD = 2
CHAINS, ROUNDS = 5, 40
TIMEOUT = 3600.0


@benchmark
def kill_points(machine: Machine) -> Figures:
    """Each operation of each of two ranks, before, amid and after; then runs killed at random, one after the other."""
    del machine
    pool = Pool()
    try:
        figures = [_count(name, lambda folder, name=name: _sweep(pool, folder, name)) for name in SCENARIOS]
        return [*figures, _count("again and again", lambda folder: _chains(pool, folder))]
    finally:
        pool.close()


def _sweep(pool: Pool, folder: Path, name: str) -> list[Trial]:
    arguments = {"folder": str(folder), "name": name, "world": WORLD}
    return pool.run(f"{CASES}:sweep", 1, timeout=TIMEOUT, process_group=False, **arguments)[0]


def _chains(pool: Pool, folder: Path) -> list[Trial]:
    trials: list[Trial] = []
    for seed in range(CHAINS):
        arguments = {"folder": str(folder / str(seed)), "world": WORLD, "seed": seed, "rounds": ROUNDS}
        trials += pool.run(f"{CASES}:chain", 1, timeout=TIMEOUT, process_group=False, **arguments)[0]
    return trials


def _count(name: str, work: Callable[[Path], list[Trial]]) -> Figure:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trials = work(Path(folder))
    lost = [trial for trial in trials if trial.fault is not None]
    for trial in lost:
        sys.stdout.write(f"  LOST {name}, {trial.operation}: {trial.fault}\n")
    seconds = time.perf_counter() - started
    survived = len(trials) - len(lost)
    setting = f"{name}: runs that went on ({len(lost)} lost, {seconds:.0f} s)"
    return figure(setting, "kills", [survived], [len(trials)], unit="runs", target=1.0)
