"""Process groups, model-parallel state and random seeds of a run."""

from __future__ import annotations

import datetime
import functools
import gc
import logging
import os
import random
import tempfile
import time
import uuid

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_llm import ops
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.build import model_dtype
from mindspeed_llm.device import Device, current
from mindspeed_llm.errors import ConfigError

from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)

logger = logging.getLogger(__name__)


def initialize(cfg: RunConfig) -> None:
    """Join the process group, cut it into model-parallel groups, seed every generator.

    A process group that exists already is used as it is. Without a launcher (no ``RANK`` in the environment) the run
    is one process.

    Raises:
        ConfigError: the device has no such communication library.
    """
    device = current()
    backend = backend_of(cfg, device)
    device.bind()
    if not dist.is_initialized():
        timeout = datetime.timedelta(minutes=cfg.distributed.distributed_timeout_minutes)
        if "RANK" in os.environ:
            launch = tuple(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
            store, rank, world = _meeting_point(launch)
            store.set_timeout(timeout)
            store = dist.PrefixStore(_agree_on_name(store, rank, world, timeout), store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        else:
            store = dist.FileStore(os.path.join(tempfile.mkdtemp(prefix="mindspeed_llm."), "rendezvous"), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    layout = cfg.transformer
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        distributed_timeout_minutes=cfg.distributed.distributed_timeout_minutes,  # pyright: ignore
        # The second set of groups is for saves from a device whose backend cannot move CPU tensors.
        create_gloo_process_groups=device.type != "cpu",
    )
    seed_everything(cfg)
    activate_ops(cfg)
    unset_num_microbatches_calculator()
    training = cfg.training
    init_num_microbatches_calculator(
        dist.get_rank(),
        list(training.rampup_batch_size) if training.rampup_batch_size else None,
        training.global_batch_size,  # pyright: ignore[reportArgumentType]  derived by now
        training.micro_batch_size,  # pyright: ignore[reportArgumentType]
        parallel_state.get_data_parallel_world_size(),
    )


def backend_of(cfg: RunConfig, device: Device) -> str:
    """The communication library of a run on ``device``: nccl, which recipes name, means the device's own.

    Raises:
        ConfigError: HCCL is asked for on another device than an NPU.
    """
    asked = cfg.distributed.distributed_backend
    if asked == "hccl" and device.type != "npu":
        raise ConfigError(
            f"HCCL is the library of Ascend NPUs; this is {device.type}",
            got="--distributed-backend hccl",
            allowed="nccl (the device's own) or gloo",
            fix="--distributed-backend nccl",
        )
    return "gloo" if asked == "gloo" else device.backend


@functools.lru_cache(maxsize=1)
def _meeting_point(launch: tuple[str, ...]) -> tuple[dist.Store, int, int]:
    """The launcher's store, this rank, the number of ranks. A second store could not listen on the same port."""
    return next(dist.rendezvous("env://"))


def _agree_on_name(store: dist.Store, rank: int, world: int, timeout: datetime.timedelta) -> str:
    """A name that the ranks of this run share and no other run has had.

    The store outlives a run: the next one of this process, or the launcher's next attempt, would read in it the
    addresses of processes that are gone. Nothing that a launcher tells its workers numbers the attempts alike on all
    nodes. So each rank shows rank 0 a word that it has just made up, and hears the name under that word.

    Raises:
        TimeoutError: a rank did not come.
    """
    mine = uuid.uuid4().hex
    if rank != 0:
        store.set(f"hello/{rank}", mine)
        name = store.get(f"name/{mine}").decode()
        store.set(f"heard/{name}/{rank}", "")
        return name
    missing, deadline = set(range(1, world)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"heard/{mine}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                # Perhaps the word of an earlier run: then nobody listens, and the right one comes in a moment.
                store.set(f"name/{store.get(f'hello/{other}').decode()}", mine)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} did not come within {timeout.total_seconds():g} s")
        time.sleep(0.01)
    return mine


def activate_ops(cfg: RunConfig) -> None:
    """Choose the implementation of every fused op, once, and say which.

    Raises:
        OpUnavailableError: ``--op`` asks for one that does not exist or cannot run here.
    """
    choices = ops.parse_choices(cfg.training.op)
    table = ops.choose(ops.registry(), device=current().type, dtype=model_dtype(cfg), choices=choices)
    ops.activate(table)
    for row in table.rows():
        logger.info("op %s: %s (%s; %s)", row.op, row.impl, row.reason, row.status)


def seed_everything(cfg: RunConfig) -> None:
    """Seed Python, numpy, torch and the model-parallel generators, as Megatron-LM does.

    Pipeline stages differ by 100 per stage, data-parallel replicas only with ``--data-parallel-random-init``;
    tensor-parallel ranks share the default generator and differ in the tracker's model-parallel one.
    """
    seed = cfg.training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if cfg.training.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    if cfg.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)


def finalize() -> None:
    """Leave the model-parallel groups and the process group, and the choice of ops."""
    ops.activate(None)
    parallel_state.destroy_model_parallel()
    unset_num_microbatches_calculator()
    if dist.is_initialized():
        dist.destroy_process_group()
    # A gloo group ends its threads only when nothing refers to it any more. What hung on the optimizer's views, in C++,
    # shows as garbage only once the optimizer is gone: hence twice.
    gc.collect()
    gc.collect()
