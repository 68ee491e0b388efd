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

    pretrained_checkpoint: str | None = None
    """Weights to start from while --load holds no checkpoint: a Hugging Face folder or a checkpoint folder."""

    save: str | None = None
    """Folder that checkpoints are written to."""

    save_interval: int | None = option(None, flags=("--persistent-save-interval",))
    """Optimizer steps between checkpoints; by default only one at the end."""

    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory; the last one is waited for."""

    save_retain_interval: int | None = None
    """Keep checkpoints of multiples of this many steps, and of the others only the newest."""

    save_total_limit: int | None = None
    """Keep this many checkpoints, the newest ones."""

    non_persistent_save_interval: int | None = None
    """Optimizer steps between checkpoints of which only the newest is kept, beside those of the save interval."""

    non_persistent_global_ckpt_dir: str | None = None
    """Folder of those checkpoints; by default non_persistent in the save folder."""

    ckpt_fully_parallel_save: bool = True
    """Let data-parallel ranks write a part each of what they hold alike."""

    ckpt_fully_parallel_load: bool = False
    """Let data-parallel ranks read a part each of what they need alike, and send it to each other."""

    dist_ckpt_optim_fully_reshardable: bool = False
    """Keep optimizer state in every checkpoint so that any layout can load it, not only in the last one; slower."""

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
