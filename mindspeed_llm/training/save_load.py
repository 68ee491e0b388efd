"""What a checkpoint of a run holds, and how a run takes it up again."""

from __future__ import annotations

import logging
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_llm.checkpoint import mcore_io
from mindspeed_llm.checkpoint.convert.record import ORIGIN
from mindspeed_llm.checkpoint.folders import NON_PERSISTENT, require_save, retire
from mindspeed_llm.checkpoint.in_use import Mark
from mindspeed_llm.checkpoint.saving import Save, begin
from mindspeed_llm.config.resolve import ARCHITECTURE_FIELDS
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.groups import data_group, expert_tensor_group, pipeline_group, tensor_group
from mindspeed_llm.device import current
from mindspeed_llm.errors import CheckpointError
from mindspeed_llm.training.failure import phase
from mindspeed_llm.training.optimizer_parts import fitted
from mindspeed_llm.training.state import Run
from mindspeed_llm.training.weights import origin

from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.utils import unwrap_model

logger = logging.getLogger(__name__)

SHARDING = "distrib_optim_sharding_type"


def _metadata(optimizer_form: str | None) -> dict[str, Any]:
    """What megatron-core needs to know to lay out, and later find, a sharded state."""
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": data_group(),
    }
    if optimizer_form is not None:
        metadata[SHARDING] = optimizer_form
    return metadata


def _bare_chunks(run: Run) -> dict[str, Any]:
    """The chunks without their wrappers, whose names would become part of every key."""
    one = len(run.chunks) == 1
    return {"model" if one else f"model{index}": chunk for index, chunk in enumerate(unwrap_model(run.chunks))}


def _model_state(run: Run, metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _bare_chunks(run).items()}


def _tracker() -> CudaRNGStatesTracker:
    return cast(CudaRNGStatesTracker, tensor_parallel.get_cuda_rng_tracker())


def _rng_state() -> ShardedObject:
    """Every generator of this rank; data-parallel replicas share theirs."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": _tracker().get_states(),
    }
    stages, parts = pipeline_group(), tensor_group()
    return ShardedObject(
        "rng_state",
        state,
        (stages.size(), parts.size()),
        (stages.rank(), parts.rank()),
        replica_id=data_group().rank(),
    )


def _layout(run: Run) -> dict[str, Any]:
    cfg = run.cfg.transformer
    return {
        "tensor_model_parallel_size": cfg.tensor_model_parallel_size,
        "pipeline_model_parallel_size": cfg.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": cfg.virtual_pipeline_model_parallel_size,
        "expert_model_parallel_size": cfg.expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_group().size(),
    }


def _state(run: Run, metadata: dict[str, Any]) -> dict[str, Any]:
    """All that a checkpoint holds, as a sharded state dict."""
    checkpoint = run.cfg.checkpoint
    run.gather_parameters()
    state = _model_state(run, metadata)
    if not checkpoint.no_save_optim:
        state["optimizer"] = run.optimizer.sharded_state_dict(state, metadata=metadata)
        state["opt_param_scheduler"] = run.scheduler.state_dict()
    if not checkpoint.no_save_rng:
        state["rng_state"] = _rng_state()
    state["progress"] = run.progress.state_dict()
    state["layout"] = _layout(run)
    state["data_parallel_size"] = data_group().size()
    state[ORIGIN] = origin(run.cfg)
    state["config"] = {name: asdict(getattr(run.cfg, name)) for name in ("model", "transformer", "training")}
    return state


class Saver:
    """The saves of a run under ``--save``, of which at most one is under way. All methods are collective.

    Args:
        run: the run.
        mark: on rank 0, that this run writes there.
    """

    def __init__(self, run: Run, mark: Mark | None = None) -> None:
        self.run = run
        self._mark = mark
        self._pending: tuple[Save, bool] | None = None

    @phase("save")
    def save(self, *, last: bool = False, persistent: bool = True) -> None:
        """Save the run as it is now; with ``--async-save`` training may go on while it is written.

        The optimizer's state is kept so that any layout can load it (slower) when the run ends here or
        ``--dist-ckpt-optim-fully-reshardable`` asks for it, and else for any number of data-parallel ranks at the same
        tensor and pipeline layout.

        Args:
            last: the run ends here, so nothing is left to the background.
            persistent: else the save is one of those of which only the newest is kept.

        Raises:
            InUse: another run has begun to write to the folder.
            CheckpointError: it cannot be written, or the one before could not; earlier saves are untouched.
        """
        self.finish()
        checkpoint = self.run.cfg.checkpoint
        if checkpoint.save is None:
            return
        root = Path(checkpoint.save) if persistent else non_persistent_root(self.run.cfg)
        form = None
        if self.run.cfg.value("use_distributed_optimizer"):
            portable = last or checkpoint.dist_ckpt_optim_fully_reshardable
            form = "fully_reshardable" if portable else "dp_reshardable"
        metadata = _metadata(form)
        spread = checkpoint.ckpt_fully_parallel_save and data_group().size() > 1
        save = begin(
            root,
            self.run.progress.iteration,
            _state(self.run, metadata),
            metadata,
            background=checkpoint.async_save and not last,
            group=data_group() if spread else None,
            before=self._renew_mark,
        )
        self._pending = save, persistent
        if not checkpoint.async_save or last:
            self.finish()

    def _renew_mark(self) -> None:
        if self._mark is not None:
            self._mark.renew()

    @phase("save")
    def poll(self) -> None:
        """Complete a save in the background if all ranks have written their part.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is None:
            return
        written = torch.tensor([float(self._pending[0].written())], device=current().torch_device)
        dist.all_reduce(written, dist.ReduceOp.MIN)
        if written.item():
            self.finish()

    @phase("save")
    def finish(self) -> None:
        """Wait for the save that is under way, if any, and complete it.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is None:
            return
        (save, persistent), self._pending = self._pending, None
        checkpoint = self.run.cfg.checkpoint

        def retire_others() -> None:
            retire(
                save.root,
                save.iteration,
                limit=checkpoint.save_total_limit if persistent else 1,
                every=checkpoint.save_retain_interval if persistent else None,
            )

        folder = save.finish(after=retire_others)
        logger.info("saved checkpoint %s", folder)


def non_persistent_root(cfg: RunConfig) -> Path:
    """Where the saves lie of which only the newest is kept."""
    checkpoint = cfg.checkpoint
    given = checkpoint.non_persistent_global_ckpt_dir
    return Path(given) if given else Path(checkpoint.save or "", NON_PERSISTENT)


def load_checkpoint(run: Run, root: Path, iteration: int, *, weights_only: bool = False) -> None:
    """Take up the save of ``iteration`` in ``root``: weights, and unless told otherwise optimizer, schedule,
    generators and counters. Collective.

    Args:
        run: the run.
        root: the folder of saves.
        iteration: of the save.
        weights_only: as with ``--finetune``.

    Raises:
        CheckpointError: the save is missing, incomplete or does not fit.
    """
    folder = require_save(root, iteration)
    checkpoint = run.cfg.checkpoint
    stored = mcore_io.load_metadata(folder)
    common = mcore_io.load_common(folder)
    _require_architecture(run, folder, common)
    metadata = _metadata(stored.get(SHARDING))
    state = _model_state(run, metadata)
    fresh = checkpoint.finetune or weights_only
    with_optimizer = not (fresh or checkpoint.no_load_optim)
    if with_optimizer:
        _require_optimizer(run, folder, stored, common)
        _require_number_format(run, folder, common)
        state["optimizer"] = run.optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    with_rng = not (fresh or checkpoint.no_load_rng) and _layout(run) == common["layout"]
    if with_rng:
        state["rng_state"] = _rng_state()
    spread = checkpoint.ckpt_fully_parallel_load and data_group().size() > 1
    loaded = mcore_io.load(folder, state, group=data_group() if spread else None)
    for name, chunk in _bare_chunks(run).items():
        chunk.load_state_dict(loaded[name])
    if with_optimizer:
        bounds = _schedule_bounds(run)
        run.optimizer.load_state_dict(fitted(loaded["optimizer"], common["optimizer"], run.optimizer))
        if run.cfg.schedule.override_opt_param_scheduler:
            for group, own in zip(run.optimizer.param_groups, bounds, strict=True):
                group.update(own)
        _take_up_schedule(run, common)
    else:
        run.optimizer.reload_model_params()
    if with_rng:
        _set_rng_state(loaded["rng_state"])
    if not fresh:
        run.progress.load_state_dict(common["progress"])
    logger.info("loaded checkpoint %s", folder)


def _require_architecture(run: Run, folder: Path, common: dict[str, Any]) -> None:
    """A model that computes something else would load every tensor that happens to fit, and drop the others."""
    if "config" not in common:
        raise CheckpointError(
            f"{folder} is a checkpoint of other software",
            got=sorted(map(str, common))[:8],
            allowed="one that says which model it is of",
            fix="convert_ckpt.py --load-model-type mg --hf-cfg-dir MODEL makes one of its weights; --load that",
        )
    stored = {name: value for section in common["config"].values() for name, value in section.items()}
    differs = {
        name: (run.cfg.value(name), stored[name])
        for name in ARCHITECTURE_FIELDS
        if name in stored and run.cfg.value(name) != stored[name]
    }
    if differs:
        raise CheckpointError(
            f"the checkpoint {folder} is of another model",
            got=", ".join(f"{name} {ours}" for name, (ours, _) in differs.items()),
            allowed=", ".join(f"{name} {theirs}" for name, (_, theirs) in differs.items()),
            fix="give the --hf-config, or the architecture flags, of the run that saved it",
        )


def _schedule_bounds(run: Run) -> list[dict[str, float]]:
    """What the schedule reads in each group of parameters before it looks at its own values, as it was configured.

    megatron-core keeps them with the optimizer's state, so that a load would bring those of the save back.
    """
    names = ("max_lr", "min_lr", "start_wd", "end_wd")
    return [{name: group[name] for name in names if name in group} for group in run.optimizer.param_groups]


def _take_up_schedule(run: Run, common: dict[str, Any]) -> None:
    try:
        run.scheduler.load_state_dict(common["opt_param_scheduler"])
    except AssertionError as error:
        # megatron-core says iterations where it counts samples: iterations times the global batch size.
        what = str(error).replace("checkpointvalue", "checkpoint value").replace("iterations", "samples")
        ours, theirs = run.cfg.training.global_batch_size, common["config"].get("training", {}).get("global_batch_size")
        batch = f"; the global batch is {ours} samples" + (f", that of the checkpoint {theirs}" if theirs else "")
        raise CheckpointError(
            "the schedule of this command line is not the one that the checkpoint holds",
            got=what + batch,
            fix="--override-opt-param-scheduler goes on with that of the command line, "
            "--use-checkpoint-opt-param-scheduler with that of the checkpoint",
        ) from error


def _require_optimizer(run: Run, folder: Path, stored: dict[str, Any], common: dict[str, Any]) -> None:
    if "opt_param_scheduler" not in common:
        raise CheckpointError(
            f"{folder} holds no optimizer state", fix="--no-load-optim starts a fresh optimizer, --finetune a fresh run"
        )
    distributed = bool(run.cfg.value("use_distributed_optimizer"))
    if distributed and SHARDING not in stored:
        raise CheckpointError(
            f"{folder} was saved without the distributed optimizer",
            got="--use-distributed-optimizer",
            fix="drop the flag for this resume, or --no-load-optim",
        )
    if not distributed and SHARDING in stored:
        raise CheckpointError(
            f"{folder} was saved with the distributed optimizer",
            fix="--use-distributed-optimizer for this resume, or --no-load-optim",
        )
    if stored.get(SHARDING) == "dp_reshardable" and _layout(run) != common["layout"]:
        raise CheckpointError(
            f"the optimizer state of {folder} loads only at the layout that saved it",
            got=_layout(run),
            allowed=common["layout"],
            fix="the save at --train-iters loads at any layout; or --no-load-optim",
        )


def _require_number_format(run: Run, folder: Path, common: dict[str, Any]) -> None:
    """The optimizer keeps fp32 copies beside 16-bit weights, and none beside others: its state has other tensors."""
    stored = common["config"]["transformer"]
    theirs, ours = (
        "bf16" if bf16 else "fp16" if fp16 else "fp32"
        for bf16, fp16 in ((stored["bf16"], stored["fp16"]), (run.cfg.transformer.bf16, run.cfg.transformer.fp16))
    )
    if ours != theirs:
        flag = "leave out --bf16 and --fp16" if theirs == "fp32" else f"--{theirs}"
        raise CheckpointError(
            f"the optimizer state of {folder} belongs to a run in another number format",
            got=ours,
            allowed=theirs,
            fix=f"{flag}; or take the weights alone with --no-load-optim or --finetune",
        )


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    _tracker().set_states(state["tracker"])
