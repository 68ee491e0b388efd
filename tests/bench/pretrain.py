"""A whole pretraining step of a 150M Qwen2.5 against transformers, both sides in turns."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.bench.harness import ROOT, Figure, Figures, Machine, alternate, benchmark
from tests.bench.pretrain_side import GLOBAL_BATCH, LENGTH, THREADS

TURNS = 3


class _Side:
    """A process that takes a step when told to."""

    def __init__(self, side: str, micro_batch: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.bench.pretrain_side", side, str(micro_batch)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(THREADS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tokens_per_second(self) -> float:
        """Of one step."""
        assert self.process.stdin is not None, "opened with a pipe"
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return GLOBAL_BATCH * LENGTH / float(self._answer("step"))

    def peak_mib(self) -> float:
        """Ends the process; its highest resident MiB."""
        assert self.process.stdin is not None, "opened with a pipe"
        self.process.stdin.close()
        peak = int(self._answer("peak")) / 1024
        self.process.wait()
        return peak

    def _answer(self, word: str) -> str:
        assert self.process.stdout is not None, "opened with a pipe"
        for line in self.process.stdout:
            if line.startswith(word + " "):
                return line.split()[1]
        raise SystemExit(f"error: a side of the benchmark ended with status {self.process.wait()}")


def _compare(micro_batch: int, other: str, name: str) -> list[Figure]:
    ours, theirs = _Side("ours", micro_batch), _Side(other, micro_batch)
    what = f"ours, micro-batch {micro_batch}"
    rate = alternate(
        what, name, ours.tokens_per_second, theirs.tokens_per_second, unit="tokens/s", turns=TURNS, warm_up=1
    )
    baseline = _Side("imports", micro_batch).peak_mib()
    memory = (ours.peak_mib() - baseline, theirs.peak_mib() - baseline)
    return [rate, alternate(what, name, lambda: memory[0], lambda: memory[1], unit="MiB", turns=1, warm_up=0)]


@benchmark
def pretrain(machine: Machine) -> Figures:
    """Tokens per second and memory above an import-only process, at micro-batch 1 and 4."""
    figures = []
    for micro_batch in (1, 4):
        figures += _compare(micro_batch, "autocast", "transformers fp32 weights, autocast bf16, fused AdamW")
    return figures + _compare(1, "bf16", "transformers all in bf16, fused AdamW")
