"""How this project measures: two sides in turns, medians, and the machine's own limits in the same run.

    @benchmark
    def help_time(machine: Machine) -> Figures:
        return [alternate("pretrain_gpt.py --help", "python -c pass", run_help, run_pass, unit="s")]

Processors differ, change their clock and share their caches, so a figure is a ratio of two sides measured A B A B in
one run, and a rate is read beside the copy bandwidth and the matmul peak of that run. Nothing here passes or fails.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results.json"
_LOOK = 0.01
"""Seconds between two looks at a process's memory: what lives shorter may go unseen."""


@dataclass(frozen=True)
class Machine:
    """What measured, and what its hardware gives at best, as measured in the same run.

    Attributes:
        cpu: its name.
        threads: of torch.
        torch: its version.
        commit: of this project.
        copy_gb_s: bytes read plus bytes written, of a copy far larger than the caches.
        matmul_bf16_tflops: of a square matmul.
    """

    cpu: str
    threads: int
    torch: str
    commit: str
    copy_gb_s: float
    matmul_bf16_tflops: float


@dataclass(frozen=True)
class Figure:
    """One comparison of ours with a peer, a value of each for every turn.

    Attributes:
        setting: what was measured.
        ours: in ``unit``.
        peer: in ``unit``.
        peer_version: what the peer is.
        unit: a rate (``.../s``) or ``runs``, where more is better, or else a cost.
        ratio: the median of ours over that of the peer.
        target: for the ratio, or None.
        holds: whether the target is met; None without one.
        mem_ours: peak anonymous bytes above a process that only imports, or None.
        mem_peer: likewise.
        mem_ratio: ours over the peer's.
    """

    setting: str
    ours: list[float]
    peer: list[float]
    peer_version: str
    unit: str
    ratio: float
    target: float | None
    holds: bool | None
    mem_ours: int | None
    mem_peer: int | None
    mem_ratio: float | None


Figures = list[Figure]
Benchmark = Callable[[Machine], Figures]
_benchmarks: dict[str, Benchmark] = {}


def benchmark(function: Benchmark) -> Benchmark:
    """Register ``function``; ``make bench ONLY=<its name>`` runs it alone."""
    name = function.__name__
    if name in _benchmarks:
        raise ValueError(f"two benchmarks are called {name}")
    _benchmarks[name] = function
    return function


def alternate(
    setting: str,
    peer_version: str,
    measure_ours: Callable[[], float],
    measure_peer: Callable[[], float],
    *,
    unit: str,
    target: float | None = None,
    turns: int = 7,
    warm_up: int = 1,
) -> Figure:
    """Measure the two sides in turns, ours first.

    Args:
        setting: what is measured.
        peer_version: the reference.
        measure_ours: does our work once and returns its figure in ``unit`` (see :func:`seconds` for a time).
        measure_peer: the same for the peer.
        unit: see :class:`Figure`.
        target: for the ratio.
        turns: measurements of each side that count.
        warm_up: measurements of each side before these.
    """
    for _ in range(warm_up):
        measure_ours()
        measure_peer()
    pairs = [(measure_ours(), measure_peer()) for _ in range(turns)]
    return figure(setting, peer_version, [a for a, _ in pairs], [b for _, b in pairs], unit=unit, target=target)


def figure(
    setting: str,
    peer_version: str,
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    unit: str,
    target: float | None = None,
    memory: tuple[int, int] | None = None,
) -> Figure:
    """A comparison from its values; see :class:`Figure`.

    Args:
        memory: of ours and of the peer, in bytes.
    """
    reference = statistics.median(peer)
    ratio = statistics.median(ours) / reference if reference else float("inf")
    more_is_better = unit.endswith("/s") or unit == "runs"
    holds = None if target is None else ratio >= target if more_is_better else ratio <= target
    mem_ours, mem_peer = memory or (None, None)
    mem_ratio = mem_ours / mem_peer if mem_ours is not None and mem_peer else None
    return Figure(
        setting, list(ours), list(peer), peer_version, unit, ratio, target, holds, mem_ours, mem_peer, mem_ratio
    )


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    median = statistics.median(values)
    return (max(values) - min(values)) / median if median else 0.0


def seconds(work: Callable[[], object]) -> Callable[[], float]:
    """A measure of ``work`` in seconds, for :func:`alternate`."""

    def measure() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return measure


def run_python(arguments: Sequence[str], *, environment: dict[str, str] | None = None, timeout: float = 600.0) -> str:
    """Run this Python with ``arguments`` at the project's root and return what it wrote; raises when it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


class AnonymousPeak:
    """The largest sum of the anonymous memory of a process and its children, looked at while the block runs.

    Attributes:
        bytes: the largest so far.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK):
            self.bytes = max(self.bytes, sum(map(_anonymous_bytes, (self._pid, *_children(self._pid)))))


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:
        return []
    return children


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0)


def measure_machine(*, copy_mib: int = 256, size: int = 1024, turns: int = 5) -> Machine:
    """Copy bandwidth of ``copy_mib`` MiB and the rate of ``size`` x ``size`` matmuls, best of ``turns``."""
    import torch

    source = torch.zeros(copy_mib * 2**18)
    target = torch.empty_like(source)
    copy = min(seconds(lambda: target.copy_(source))() for _ in range(turns + 1))
    left, right = (torch.randn(size, size).to(torch.bfloat16) for _ in range(2))
    matmul = min(seconds(lambda: left @ right)() for _ in range(turns + 1))
    return Machine(
        cpu=_processor(),
        threads=torch.get_num_threads(),
        torch=torch.__version__.partition("+")[0],
        commit=_commit(),
        copy_gb_s=2 * source.nbytes / copy / 1e9,
        matmul_bf16_tflops=2 * size**3 / matmul / 1e12,
    )


def _commit() -> str:
    """The commit that is checked out; a mark says that files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def discover() -> dict[str, Benchmark]:
    """Every registered benchmark, after importing the modules beside this one."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in ("harness", "__main__") and not module.name.startswith("test_"):
            importlib.import_module(f"tests.bench.{module.name}")
    return dict(_benchmarks)


def run(only: str | None = None) -> None:
    """Run the benchmarks, print each figure as it comes, and write :data:`RESULTS`."""
    chosen = discover()
    if only is not None:
        if only not in chosen:
            raise SystemExit(f"error: no benchmark is called {only!r}; there are: {', '.join(sorted(chosen))}")
        chosen = {only: chosen[only]}
    machine = measure_machine()
    _say(
        f"{machine.cpu}, {machine.threads} threads: copy {machine.copy_gb_s:.1f} GB/s, "
        f"bf16 matmul {machine.matmul_bf16_tflops:.3f} TFLOP/s"
    )
    rows: list[dict[str, object]] = []
    for name, function in sorted(chosen.items()):
        _say(f"\n{name}")
        for row in function(machine):
            _say(_describe(row))
            rows.append({"name": name, **asdict(row)})
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": asdict(machine), "rows": rows}, indent=1) + "\n")
    _say(f"\n{RESULTS.relative_to(ROOT)} written")


def _describe(row: Figure) -> str:
    sides = (
        f"{what}: {statistics.median(values):.4g} {row.unit} (spread {spread(values):.0%})"
        for what, values in ((row.setting, row.ours), (row.peer_version, row.peer))
    )
    target = "" if row.target is None else f"  target {row.target:g}: {'holds' if row.holds else 'MISSED'}"
    memory = "" if row.mem_ratio is None else f"  memory {row.mem_ratio:.3f}x"
    return f"  {row.ratio:7.3f}x  {'  vs  '.join(sides)}{target}{memory}"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
