"""How learning rate and weight decay move over a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.config.option import option


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate and weight-decay schedules, the kinds of Megatron-LM 0.16.1."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Curve of the learning rate after its warm-up."""

    lr_decay_iters: int | None = None
    """Steps until the learning rate has reached its minimum; by default all steps of the run."""

    lr_decay_samples: int | None = None
    """The same in sequences, for a run whose length is given in sequences."""

    lr_warmup_fraction: float | None = None
    """Part of the decay that is linear warm-up, from 0 to 1."""

    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""

    lr_warmup_samples: int = 0
    """Sequences of linear warm-up, for a run whose length is given in sequences."""

    lr_warmup_init: float = 0.0
    """Learning rate from which the warm-up starts."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Curve of the last phase of the warm-up, stable, decay schedule (WSD)."""

    lr_wsd_decay_iters: int | None = None
    """Steps of the last phase of the WSD schedule."""

    lr_wsd_decay_samples: int | None = None
    """Sequences of the last phase of the WSD schedule."""

    start_weight_decay: float | None = None
    """Weight decay at the first step, when it changes over the run."""

    end_weight_decay: float | None = None
    """Weight decay at the last step, when it changes over the run."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Curve of the weight decay over the run."""

    override_opt_param_scheduler: bool = option(False, flags=("--override-opt_param-scheduler",))
    """Use the schedule of this command line even when a checkpoint holds another one."""

    use_checkpoint_opt_param_scheduler: bool = option(False, flags=("--use-checkpoint-opt_param-scheduler",))
    """Use the schedule that the checkpoint holds, whatever this command line says."""
