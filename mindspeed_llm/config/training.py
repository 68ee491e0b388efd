"""How long, in which batches and under which control training runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.config.option import option


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, length, evaluation and end of a run."""

    seq_length: int | None = None
    """Tokens in each sequence."""

    micro_batch_size: int | None = None
    """Sequences in one forward pass of one data-parallel rank."""

    global_batch_size: int | None = None
    """Sequences in one optimizer step over all ranks; by default one micro-batch on each data-parallel rank."""

    rampup_batch_size: tuple[int, ...] | None = option(None, count=3)
    """Start size, increment and number of samples of a linear growth of the global batch size."""

    train_iters: int | None = None
    """Optimizer steps of the whole run; 0 loads, saves and ends."""

    train_samples: int | None = None
    """Sequences of the whole run, instead of a number of optimizer steps."""

    seed: int = 1234
    """Seed of weight initialisation, dropout and the order of the data."""

    data_parallel_random_init: bool = False
    """Initialise the weights of each data-parallel rank from its own seed (they are made equal afterwards)."""

    eval_iters: int = 100
    """Batches of each evaluation; 0 turns evaluation off."""

    eval_interval: int | None = None
    """Optimizer steps between evaluations; by default there is none before the end."""

    skip_train: bool = False
    """Do not train: only evaluate, then leave."""

    validate_only: bool = False
    """Check the flags for the WORLD_SIZE of the environment, the tokenizer and the data, print what follows from them,
    and leave: no process is started, and no torch is needed."""

    op: tuple[str, ...] = ()
    """Implementations of fused ops to use instead of the device's best, as OP=IMPLEMENTATION."""

    deterministic_mode: bool = False
    """Use only algorithms whose results repeat bit for bit; refuse the others."""

    check_for_nan_in_loss: bool = True
    """Stop when the loss is not a finite number. Off under fp16 with dynamic loss scaling, which expects it."""

    loss_spike_factor: float | None = None
    """Do not update the weights in a step whose loss exceeds this many times the running mean of the loss (above 1)."""

    exit_interval: int | None = None
    """Save and leave at the first step whose number is a multiple of this."""

    exit_duration_in_mins: int | None = None
    """Save and leave after this many minutes."""

    exit_signal_handler: bool = False
    """Save and leave when a signal arrives."""

    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"] = "SIGTERM"
    """The signal of --exit-signal-handler."""

    manual_gc: bool = False
    """Collect Python's garbage at fixed steps rather than whenever it likes, so that ranks pause together."""

    manual_gc_interval: int = 0
    """Steps between manual collections; 0 collects only at the start and around evaluation."""
