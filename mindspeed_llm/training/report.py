"""What a run tells about itself: Megatron's log line, ``metrics.jsonl``, TensorBoard, Weights & Biases."""

from __future__ import annotations

import datetime
import errno
import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.device import current
from mindspeed_llm.errors import SuiteError
from mindspeed_llm.training.flops import flops_per_token
from mindspeed_llm.training.routing import LOSSES, Routing, mean_losses
from mindspeed_llm.training.state import Progress
from mindspeed_llm.training.step import StepResult

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Somewhere that rows go: ``kind`` is ``start``, ``train`` or ``valid``."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


class MetricsFile:
    """One JSON object per line; values that are not finite are null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append ``row`` and hand it to the system at once.

        Raises:
            SuiteError: the disk does not take it.
        """
        try:
            if not self._is_in_place():
                logger.warning("%s was deleted or moved during the run: the metrics go on in a new file", self.path)
                self.file.close()
                self._open()
            self._append((json.dumps(_finite(row)) + "\n").encode())
        except OSError as error:
            raise SuiteError("the metrics cannot be written", got=f"{self.path}: {error.strerror}") from error

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Whole lines without a buffer: a row that does not fit on the disk is not tried again when the file is closed.
        self.file = self.path.open("ab", buffering=0)
        if self.file.tell() and not _ends_with_a_line(self.path):
            # A row that was cut off must not take the next one along.
            self._append(b"\n")

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False

    def _append(self, line: bytes) -> None:
        if self.file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


_DASHBOARD_NAMES = {
    "lm_loss": "lm loss",
    "grad_norm": "grad-norm",
    "learning_rate": "learning-rate",
    "weight_decay": "weight-decay",
    "global_batch_size": "batch-size",
    "elapsed_ms": "iteration-time-ms",
    "tokens_per_s": "tokens-per-second",
    "tflops_per_rank": "throughput",
}


def dashboard_scalars(cfg: RunConfig, row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row under the names that Megatron-LM's dashboards use."""
    options = cfg.logging
    if row["kind"] == "valid":
        found = {"lm loss validation": row["lm_loss"]}
        if options.log_validation_ppl_to_tensorboard:
            found["lm loss validation ppl"] = math.exp(min(row["lm_loss"], 700.0))
        return found
    found = {shown: row[name] for name, shown in _DASHBOARD_NAMES.items()}
    found |= {name: row[name] for name in LOSSES if name in row}
    experts = row.get("experts", {})
    for name, values in experts.items():
        if name not in ("layers", "tokens"):
            found |= {f"moe/{name}_layer_{at}": one for at, one in zip(experts["layers"], values, strict=True)}
    if options.log_loss_scale_to_tensorboard:
        found["loss-scale"] = row["loss_scale"]
    if options.log_memory_to_tensorboard:
        found["mem-max-allocated-bytes"] = row["max_memory_bytes"]
    if options.log_world_size_to_tensorboard:
        found["world-size"] = dist.get_world_size()
    return found


def _finite(value: Any) -> Any:
    """``value`` with None for each number in it that is not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Event files under ``--tensorboard-dir``."""

    def __init__(self, cfg: RunConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.cfg = cfg
        self.writer = SummaryWriter(cfg.logging.tensorboard_dir, max_queue=cfg.logging.tensorboard_queue_size)

    def write(self, row: Mapping[str, Any]) -> None:
        """One point per number."""
        if row["kind"] == "start" or row["iteration"] % self.cfg.logging.tensorboard_log_interval:
            return
        for name, value in dashboard_scalars(self.cfg, row).items():
            self.writer.add_scalar(name, value, row["iteration"])

    def close(self) -> None:
        """Write what is queued."""
        self.writer.close()


class WeightsAndBiases:
    """A run of the project ``--wandb-project``."""

    def __init__(self, cfg: RunConfig) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  an optional package

        options = cfg.logging
        self.cfg = cfg
        self.run = wandb.init(
            project=options.wandb_project,
            name=options.wandb_exp_name,
            entity=options.wandb_entity,
            dir=options.wandb_save_dir or str(Path(cfg.checkpoint.save or ".") / "wandb"),
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """One point per number."""
        if row["kind"] != "start":
            self.run.log(dashboard_scalars(self.cfg, row), step=row["iteration"])

    def close(self) -> None:
        """End the run."""
        self.run.finish()


def _sinks(cfg: RunConfig) -> list[Sink]:
    """What this rank writes to: the last rank everything, as in Megatron-LM, where it alone knows the loss."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return []
    options = cfg.logging
    path = options.metrics_file or (cfg.checkpoint.save and str(Path(cfg.checkpoint.save) / "metrics.jsonl"))
    sinks: list[Sink] = []
    if path:
        sinks.append(MetricsFile(Path(path)))
    if options.tensorboard_dir:
        sinks.append(TensorBoard(cfg))
    if options.wandb_project:
        sinks.append(WeightsAndBiases(cfg))
    return sinks


def log_line(cfg: RunConfig, row: Mapping[str, Any], total: int) -> str:
    """Megatron-LM's line for ``row``, which people's scripts parse; rates follow with ``--log-throughput``."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    line = f" [{now}] iteration {row['iteration']:8d}/{total:8d} |"
    line += f" consumed samples: {row['consumed_samples']:12d} |"
    line += f" elapsed time per iteration (ms): {row['elapsed_ms']:.1f} |"
    if cfg.logging.log_throughput:
        line += f" throughput per GPU (TFLOP/s/GPU): {row['tflops_per_rank']:.1f} |"
        line += f" tokens per second: {row['tokens_per_s']:.1f} |"
        if row["mfu"] is not None:
            line += f" MFU (%): {100 * row['mfu']:.1f} |"
    line += f" learning rate: {row['learning_rate']:.6E} | global batch size: {row['global_batch_size']:5d} |"
    line += f" lm loss: {row['lm_loss']:.6E} |"
    line += "".join(f" {name}: {row[name]:.6E} |" for name in LOSSES if name in row)
    line += f" loss scale: {row['loss_scale']:.1f} |"
    line += f" grad norm: {row['grad_norm']:.3f} |"
    if "num_zeros" in row:
        line += f" num zeros: {row['num_zeros']} |"
    line += f" number of skipped iterations: {row['skipped']:3d} | number of nan iterations: {row['nan']:3d} |"
    return line


class _Bar:
    """A progress bar at the bottom of a terminal, with the log lines scrolling above it."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(), transient=True,
        )  # fmt: skip
        self.task = self.progress.add_task("training", total=total, loss="")
        self.progress.start()

    def advance(self, iteration: int, loss: float) -> None:
        """Show where the run is."""
        self.progress.update(self.task, completed=iteration, loss=f"loss {loss:.3f}")

    def say(self, line: str) -> None:
        """Print ``line`` above the bar."""
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        self.progress.stop()


class Reporter:
    """Collects steps and reports every ``--log-interval`` of them."""

    def __init__(self, cfg: RunConfig, total: int) -> None:
        self.cfg = cfg
        self.total = total
        self.sinks = _sinks(cfg)
        self.loud = dist.get_rank() == dist.get_world_size() - 1
        self.bar = _Bar(total) if self.loud and total and sys.stdout.isatty() else None
        self._losses: list[float] = []
        self._routings: list[Routing] = []
        self._steps = self._tokens = self._skipped = self._nan = 0
        self._since = time.perf_counter()

    def start(self, row: Mapping[str, Any]) -> None:
        """Say what starts."""
        self._emit({"kind": "start", **row})
        self.resume_clock()

    def resume_clock(self) -> None:
        """Time from now on belongs to training again; evaluation and saving did not."""
        self._since = time.perf_counter()

    def step(self, progress: Progress, result: StepResult, batch: int, micro_batches: int) -> None:
        """Take one step; report if it is due.

        Args:
            progress: after the step.
            result: of the step.
            batch: global batch size of the step.
            micro_batches: per data-parallel rank.
        """
        # A step can be both: fp16 skips what overflowed, and its loss may have.
        finite = math.isfinite(result.loss)
        self._steps += 1
        self._skipped += result.skipped
        self._nan += not finite
        if finite and not result.skipped:
            self._losses.append(result.loss)
        if result.routing is not None:
            self._routings.append(result.routing)
        if self.bar is not None:
            self.bar.advance(progress.iteration, result.loss)
        self._tokens += batch * self.cfg.training.seq_length  # pyright: ignore[reportOperatorIssue]
        if progress.iteration % self.cfg.logging.log_interval:
            return
        seconds = time.perf_counter() - self._since
        tokens_per_s = self._tokens / seconds
        tflops = tokens_per_s * flops_per_token(self.cfg) / dist.get_world_size() / 1e12
        peak = self.cfg.logging.peak_tflops
        row = {
            "kind": "train",
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens,
            "lm_loss": sum(self._losses) / len(self._losses) if self._losses else math.nan,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "weight_decay": result.weight_decay,
            "loss_scale": result.loss_scale,
            "global_batch_size": batch,
            "num_micro_batches": micro_batches,
            "skipped": self._skipped,
            "nan": self._nan,
            "elapsed_ms": 1000 * seconds / self._steps,
            "tokens_per_s": tokens_per_s,
            "tflops_per_rank": tflops,
            "mfu": None if peak is None else tflops / peak,
            "max_memory_bytes": current().max_memory_bytes(),
        }
        if result.zeros is not None:
            row["num_zeros"] = result.zeros
        row |= self._experts(result.routing)
        self._losses, self._routings, self._steps, self._tokens, self._skipped, self._nan = [], [], 0, 0, 0, 0
        self._emit(row)
        self._say(log_line(self.cfg, row, self.total))
        self._since = time.perf_counter()

    def _experts(self, last: Routing | None) -> dict[str, Any]:
        """Losses that balance experts, means over steps and layers; by ``--moe-per-layer-logging`` also those of each
        layer, and how the last step's tokens were shared."""
        losses = mean_losses(self._routings)
        found: dict[str, Any] = {name: math.fsum(values) / len(values) for name, values in losses.items()}
        if last is not None and last.tokens:
            found["experts"] = {
                "layers": last.layers, **losses,
                "tokens": last.tokens, "entropy": last.entropy, "dropped": last.dropped,
            }  # fmt: skip
        return found

    def valid(self, progress: Progress, loss: float, split: str) -> None:
        """Report an evaluation."""
        row = {
            "kind": "valid",
            "split": split,
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "lm_loss": loss,
        }
        self._emit(row)
        ppl = math.exp(min(loss, 700.0))
        self._say(
            f" {split} loss at iteration {progress.iteration} | lm loss value: {loss:.6E} | lm loss PPL: {ppl:.6E} |"
        )

    def close(self) -> None:
        """Close every sink."""
        for sink in self.sinks:
            sink.close()
        if self.bar is not None:
            self.bar.close()

    def _emit(self, row: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(row)

    def _say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.say(line)
        elif self.loud:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
