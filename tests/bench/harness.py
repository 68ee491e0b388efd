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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results.json"
_RSS_MARK = "peak-rss-kib:"


@dataclass(frozen=True)
class Machine:
    """What the hardware gives at best, as measured now."""

    processor: str
    threads: int
    copy_gb_per_s: float
    """Bytes read plus bytes written, of a copy far larger than the caches."""
    fp32_tflops: float
    bf16_tflops: float


@dataclass(frozen=True)
class Figure:
    """One comparison: ``value`` of A and of B in ``unit``, medians over the turns."""

    a: str
    b: str
    unit: str
    value_a: float
    value_b: float
    ratio: float
    """``value_a / value_b``."""
    spread_a: float
    """(largest - smallest) / median."""
    spread_b: float
    turns: int


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
    a: str,
    b: str,
    measure_a: Callable[[], float],
    measure_b: Callable[[], float],
    *,
    unit: str,
    turns: int = 7,
    warm_up: int = 1,
) -> Figure:
    """Measure the two sides in turns, A B A B, and keep the medians.

    Args:
        a: what A is.
        b: what B, the reference, is.
        measure_a: does A's work once and returns its figure in ``unit`` (see :func:`seconds` for a time).
        measure_b: the same for B.
        unit: ``s``, ``tokens/s``, ``MiB``, ...
        turns: measurements of each side that count.
        warm_up: measurements of each side before these.
    """
    for _ in range(warm_up):
        measure_a()
        measure_b()
    pairs = [(measure_a(), measure_b()) for _ in range(turns)]
    values_a, values_b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    median_a, median_b = statistics.median(values_a), statistics.median(values_b)
    return Figure(
        a=a,
        b=b,
        unit=unit,
        value_a=median_a,
        value_b=median_b,
        ratio=median_a / median_b if median_b else float("inf"),
        spread_a=_spread(values_a),
        spread_b=_spread(values_b),
        turns=turns,
    )


def _spread(values: Sequence[float]) -> float:
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


def peak_memory_mib(code: str, *, imports: str, timeout: float = 600.0) -> float:
    """Peak resident MiB of a process that runs ``imports`` and ``code``, above one that runs only ``imports``.

    Both run in processes of their own, so that neither meets what the other left in its allocator.
    """
    return (_peak_kib(f"{imports}\n{code}", timeout) - _peak_kib(imports, timeout)) / 1024


def _peak_kib(code: str, timeout: float) -> int:
    # ru_maxrss starts from the parent's size at fork and so misses small children; VmHWM starts anew at exec.
    report = (
        "import sys\nsys.stdout.write('\\n%s' + next(l for l in open('/proc/self/status') if l.startswith('VmHWM')))"
    )
    output = run_python(["-c", f"{code}\n{report % _RSS_MARK}"], timeout=timeout)
    return int(output.rpartition(_RSS_MARK)[2].split()[1])


def measure_machine(*, copy_mib: int = 256, size: int = 1024, turns: int = 5) -> Machine:
    """Copy bandwidth of ``copy_mib`` MiB and the rate of ``size`` x ``size`` matmuls, best of ``turns``."""
    import torch

    source = torch.zeros(copy_mib * 2**18)
    target = torch.empty_like(source)
    copy = min(seconds(lambda: target.copy_(source))() for _ in range(turns + 1))

    def tflops(dtype: torch.dtype) -> float:
        left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        return 2 * size**3 / min(seconds(lambda: left @ right)() for _ in range(turns + 1)) / 1e12

    return Machine(
        processor=_processor(),
        threads=torch.get_num_threads(),
        copy_gb_per_s=2 * source.nbytes / copy / 1e9,
        fp32_tflops=tflops(torch.float32),
        bf16_tflops=tflops(torch.bfloat16),
    )


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
        f"{machine.processor}, {machine.threads} threads: copy {machine.copy_gb_per_s:.1f} GB/s, "
        f"matmul fp32 {machine.fp32_tflops:.3f} and bf16 {machine.bf16_tflops:.3f} TFLOP/s"
    )
    report: dict[str, list[dict[str, object]]] = {}
    for name, function in sorted(chosen.items()):
        _say(f"\n{name}")
        figures = function(machine)
        for figure in figures:
            _say(
                f"  {figure.ratio:7.3f}x  {figure.a}: {figure.value_a:.4g} {figure.unit} (spread {figure.spread_a:.0%})"
                f"  vs  {figure.b}: {figure.value_b:.4g} {figure.unit} (spread {figure.spread_b:.0%})"
            )
        report[name] = [asdict(figure) for figure in figures]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": asdict(machine), "benchmarks": report}, indent=2) + "\n")
    _say(f"\n{RESULTS.relative_to(ROOT)} written")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
