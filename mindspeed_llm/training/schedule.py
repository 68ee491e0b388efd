"""Learning rate and weight decay over the run: megatron-core's scheduler, counted in samples."""

from __future__ import annotations

from mindspeed_llm.config.run import RunConfig

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def build_scheduler(cfg: RunConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The scheduler of ``cfg``; its step is one sample, so ramp-up of the batch size keeps the curve.

    With ``--train-iters`` every bound is a number of iterations times the global batch size; with
    ``--train-samples`` it is a number of samples already, as in Megatron-LM.
    """
    training, schedule = cfg.training, cfg.schedule
    batch: int = training.global_batch_size  # pyright: ignore[reportAssignmentType]  derived by now
    if training.train_iters is not None:
        total = training.train_iters * batch
        decay = (schedule.lr_decay_iters or training.train_iters) * batch
        warmup = schedule.lr_warmup_iters * batch
        wsd_decay = None if schedule.lr_wsd_decay_iters is None else schedule.lr_wsd_decay_iters * batch
    else:
        total: int = training.train_samples  # pyright: ignore[reportAssignmentType, reportRedeclaration]
        decay = schedule.lr_decay_samples or total
        warmup = schedule.lr_warmup_samples
        wsd_decay = schedule.lr_wsd_decay_samples
    if schedule.lr_warmup_fraction is not None:
        warmup = schedule.lr_warmup_fraction * decay
    weight_decay = cfg.optimizer.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=cfg.optimizer.lr,  # pyright: ignore[reportArgumentType]  a rule demands it
        min_lr=cfg.optimizer.min_lr or 0.0,
        lr_warmup_steps=warmup,  # pyright: ignore[reportArgumentType]  a fraction of a sample is fine
        lr_decay_steps=max(decay, 1),
        lr_decay_style=schedule.lr_decay_style,
        start_wd=weight_decay if schedule.start_weight_decay is None else schedule.start_weight_decay,
        end_wd=weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
        wd_incr_steps=total,
        wd_incr_style=schedule.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=schedule.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=schedule.override_opt_param_scheduler,
        wsd_decay_steps=wsd_decay,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
