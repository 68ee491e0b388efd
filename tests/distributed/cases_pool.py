"""What the ranks run in the tests of the pool itself."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


def all_reduce(scale: float) -> dict[str, object]:
    rank = dist.get_rank()
    total = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(total)
    return {
        "rank": rank,
        "environment": os.environ["RANK"],
        "total": total,
        "random": torch.rand(2),
        "pid": os.getpid(),
    }


def big_result(elements: int) -> torch.Tensor:
    return torch.arange(elements) + dist.get_rank()


def raise_on(rank: int) -> None:
    sys.stdout.write(f"rank {dist.get_rank()} was here\n")
    if dist.get_rank() == rank:
        raise ValueError("seven is not a prime's square")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        _sleep_here_for_ever()


def _sleep_here_for_ever() -> None:
    while True:
        time.sleep(1)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def leak_group() -> None:
    dist.new_group(list(range(dist.get_world_size())), group_desc="forgotten")


def close_group() -> None:
    group = dist.new_group(list(range(dist.get_world_size())), group_desc="remembered")
    assert isinstance(group, dist.ProcessGroup), "this rank is in the group"
    # A rank that closes it at once would cut off one that is still connecting.
    dist.barrier(group)
    dist.destroy_process_group(group)


def leak_attribute(rank: int) -> None:
    if dist.get_rank() == rank:
        torch.cuda.is_available = lambda: True


def leave_a_patch() -> None:
    from mindspeed_llm.patching import Patch, apply

    def name(original: object) -> object:
        return lambda: "not Megatron's"

    apply([Patch(target=PATCHED, kind="wrap", new=name, why="a test", remove_when="the test ends")])


PATCHED = "megatron.core.parallel_state:get_all_ranks"


def leave_megatron_initialised() -> int:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    init_num_microbatches_calculator(0, None, 8, 1, 1)
    initialize_rng_tracker()
    return parallel_state.get_tensor_model_parallel_rank()


def own_world() -> int:
    dist.init_process_group("gloo", init_method="env://")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def change_environment() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)


def environment_and_dtype() -> tuple[str | None, str, torch.dtype]:
    return os.environ.get("LEFT_BEHIND"), os.getcwd(), torch.get_default_dtype()


def start_child() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    if dist.get_rank() == 0:
        raise ValueError(f"child {pid}")
    return pid
