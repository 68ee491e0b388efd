"""A whole pretraining step of a 150M Qwen2.5 against transformers, both sides in turns."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import version

from tests.bench.harness import ROOT, AnonymousPeak, Figure, Figures, Machine, alternate, benchmark, figure
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
        self.watching = ExitStack()
        self.memory = self.watching.enter_context(AnonymousPeak(self.process.pid))

    def tokens_per_second(self) -> float:
        """Of one step."""
        assert self.process.stdin is not None, "opened with a pipe"
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return GLOBAL_BATCH * LENGTH / float(self._answer("step"))

    def end(self) -> int:
        """Ends the process; the most anonymous bytes that it had."""
        assert self.process.stdin is not None, "opened with a pipe"
        self.process.stdin.close()
        self.process.wait()
        self.watching.close()
        return self.memory.bytes

    def _answer(self, word: str) -> str:
        assert self.process.stdout is not None, "opened with a pipe"
        for line in self.process.stdout:
            if line.startswith(word + " "):
                return line.split()[1]
        raise SystemExit(f"error: a side of the benchmark ended with status {self.process.wait()}")


def _compare(micro_batch: int, other: str, name: str, target: float | None = None) -> Figure:
    ours, theirs = _Side("ours", micro_batch), _Side(other, micro_batch)
    setting = f"150M Qwen2.5, bf16 with fp32 main weights, sequence {LENGTH}, micro-batch {micro_batch}"
    rate = alternate(setting, name, ours.tokens_per_second, theirs.tokens_per_second, unit="tokens/s", turns=TURNS)
    baseline = _Side("imports", micro_batch).end()
    memory = (ours.end() - baseline, theirs.end() - baseline)
    return figure(setting, name, rate.ours, rate.peer, unit=rate.unit, target=target, memory=memory)


@benchmark
def pretrain(machine: Machine) -> Figures:
    """Tokens per second and memory above an import-only process, at micro-batch 1 and 4."""
    transformers = f"transformers {version('transformers')}"
    autocast = f"{transformers}, fp32 weights, autocast bf16, fused AdamW"
    figures = [_compare(micro_batch, "autocast", autocast, target=1.0) for micro_batch in (1, 4)]
    return [*figures, _compare(1, "bf16", f"{transformers}, all in bf16, fused AdamW")]
