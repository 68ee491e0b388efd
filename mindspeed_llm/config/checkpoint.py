"""What a run loads and what it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.config.option import option


@dataclass(frozen=True)
class CheckpointConfig:
    """Loading and saving of checkpoints and of Hugging Face folders."""

    load: str | None = None
    """Checkpoint folder or Hugging Face folder to start from."""

    save: str | None = None
    """Folder that checkpoints are written to."""

    save_interval: int | None = option(None, flags=("--persistent-save-interval",))
    """Optimizer steps between checkpoints; by default only one at the end."""

    save_hf: str | None = None
    """Write a Hugging Face folder here at the end of the run."""

    save_hf_interval: int | None = None
    """Optimizer steps between Hugging Face folders, written as iter_0000000N under the same place."""

    params_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of weights written for Hugging Face; by default that of the run if it is
    bf16 or fp16, else that of the folder loaded."""

    finetune: bool = False
    """Load only weights and start at step 0: no optimizer, no random state, no data position."""

    no_load_optim: bool = False
    """Do not load the optimizer state."""

    no_load_rng: bool = False
    """Do not load the state of random generators."""

    no_save_optim: bool = False
    """Do not save the optimizer state."""

    no_save_rng: bool = False
    """Do not save the state of random generators."""

    ckpt_step: int | None = None
    """Step of the checkpoint to load; by default the newest."""

    exit_on_missing_checkpoint: bool = False
    """Fail when the place to load from holds no checkpoint, even where it equals the place to save to."""
