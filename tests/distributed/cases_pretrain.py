"""What the ranks run to see whole runs of ``pretrain_gpt.py``: its entry point, with what it says and does."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch.distributed as dist

from mindspeed_llm.cli.pretrain import main
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.training import loop, pretrain, streams
from mindspeed_llm.training.state import Run

from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

SMALLEST: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def command(argv: list[str]) -> dict[str, Any]:
    """Run the command line: exit status, what was written, the batches that were read, the weights at the end."""
    out, err = io.StringIO(), io.StringIO()
    found: dict[str, Any] = {"batches": [], "weights": {}}
    with fresh_logging(), recorded(found), redirect_stdout(out), redirect_stderr(err):
        found["code"] = main(argv)
    return found | {"out": out.getvalue(), "err": err.getvalue()}


def must_stop(limit: int, minutes: list[float]) -> bool:
    """What a rank decides whose run began ``minutes[rank]`` ago, under ``--exit-duration-in-mins limit``."""
    cfg = from_values({**SMALLEST, "exit_duration_in_mins": limit}, world_size=dist.get_world_size())
    return loop._must_stop(cfg, 1, time.monotonic() - 60 * minutes[dist.get_rank()], loop._StopSignal(cfg))


@contextmanager
def fresh_logging() -> Iterator[None]:
    """``basicConfig`` acts once in a process; a rank serves many runs."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def recorded(found: dict[str, Any]) -> Iterator[None]:
    """Keep copies of this rank's batches (with its place), and its weights as they are when the run ends."""
    get_batch, setup, runs = streams.get_batch, pretrain.setup, []

    def reading(*args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = get_batch(*args, **kwargs)
        if kwargs.get("vp_stage") in (None, 0) and parallel_state.get_tensor_model_parallel_rank() == 0:
            kept = {name: value.clone() for name, value in batch.items() if value is not None}
            found["batches"].append(kept | {"dp": parallel_state.get_data_parallel_rank()})
        return batch

    def setting_up(*args: Any, **kwargs: Any) -> Run:
        runs.append(setup(*args, **kwargs))
        return runs[-1]

    streams.get_batch, pretrain.setup = reading, setting_up
    try:
        yield
    finally:
        streams.get_batch, pretrain.setup = get_batch, setup
        for run in runs:
            for index, chunk in enumerate(unwrap_model(run.chunks)):
                found["weights"] |= {f"{index}.{name}": p.detach().clone() for name, p in chunk.named_parameters()}
