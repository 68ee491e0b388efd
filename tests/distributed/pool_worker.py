"""The far side of the test pool: a warmed process that forks ranks, and the ranks themselves.

Started by :mod:`tests.distributed.pool` as ``python -m tests.distributed.pool_worker <fd>``. Imports are paid once, in
the first process, which stays single-threaded so that forking it is safe; gloo's threads only exist in the forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Set before torch is imported, since its thread pools read them once.
THREAD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: Looked up by name because they may be absent: the package grows, and the pool must not wait for it.
WARM_UP = (
    "mindspeed_llm.core",
    "megatron.core",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)
STACK_SIGNAL = signal.SIGUSR1
TIDY_UP = b"tidy up"
DEFAULT_SEED = 1234
_PR_SET_PDEATHSIG = 1
#: Seconds; a thread that has been told to end needs a turn on a processor for it.
_THREADS_END_WITHIN = 2.0
#: megatron-core names its groups so (``TENSOR_MODEL_PARALLEL_GROUP``); those go with the world and are not leaks.
_MEGATRON_GROUP = re.compile(r"[A-Z_]+_GROUP")


@dataclass(frozen=True)
class Case:
    """What one rank is asked to run."""

    target: str
    kwargs: Mapping[str, Any]
    rank: int
    world_size: int
    store: str
    master_port: int
    process_group: bool
    timeout: float


@dataclass
class Outcome:
    """What one rank sends back: a result, or the reasons why there is none."""

    result: bytes = b""
    failures: list[str] = field(default_factory=list)


class Leak(Exception):
    """A case left something behind that the next one would meet."""


# --------------------------------------------------------------------------------------------------------- the zygote


def zygote(control: socket.socket) -> None:
    """Import what the cases need, then fork a rank for each request until the other side hangs up."""
    os.environ.update(THREAD_ENVIRONMENT)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _warm_up()
    children: set[int] = set()
    control.sendall(b"ready\n")
    try:
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
            if not request:
                return
            command, _, argument = request.decode().partition(" ")
            if command == "fork":
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _become_rank(Connection(descriptors[0]), argument.strip())
                for descriptor in descriptors:
                    os.close(descriptor)
                children.add(pid)
                control.sendall(f"{pid}\n".encode())
            elif command == "reap":
                pid = int(argument)
                _, status = os.waitpid(pid, 0)
                children.discard(pid)
                control.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _warm_up() -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    for name in WARM_UP:
        package = name.rpartition(".")[0]
        if package.startswith("mindspeed_llm") and importlib.util.find_spec(name) is None:
            continue
        importlib.import_module(name)
    # What is imported stays: collections in the ranks need not look at it, nor copy its pages.
    gc.collect()
    gc.freeze()


# ----------------------------------------------------------------------------------------------------------- the ranks


def _become_rank(connection: Connection, folder: str) -> None:
    """Turn this fork into a rank that serves cases; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(os.path.join(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        stacks = open(os.path.join(folder, "stacks"), "w")  # noqa: SIM115 - open for the life of the process
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        faulthandler.enable()
        _serve(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(connection: Connection) -> None:
    """Run a case, say how it went, and tidy up once told that every rank is done with it.

    A rank that closed its groups by itself would cut off one that is still connecting.
    """
    while True:
        try:
            world = _World(pickle.loads(connection.recv_bytes()))
            _send(connection, world.run())
            if connection.recv_bytes() == TIDY_UP:
                _send(connection, world.close())
        except EOFError:
            return


def _send(connection: Connection, outcome: Outcome) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(pickle.dumps(outcome))


class _World:
    """The state that a case starts from, and the proof that it was left alone."""

    def __init__(self, case: Case) -> None:
        import torch

        self.case = case
        self.environment = dict(os.environ)
        self.folder = os.getcwd()
        modules = (torch, torch.cuda, torch.distributed, torch.nn.functional)
        self.modules = {module.__name__: (module, dict(vars(module))) for module in modules}
        self.default_dtype = torch.get_default_dtype()
        self.patches = _applied_patches()
        self.parallel_state = {}
        if parallel_state := sys.modules.get("megatron.core.parallel_state"):
            self.parallel_state = dict(vars(parallel_state))

    def _open(self) -> None:
        """Environment, seeds and, when asked for, the default process group."""
        case = self.case
        os.environ.update(
            RANK=str(case.rank),
            WORLD_SIZE=str(case.world_size),
            LOCAL_RANK=str(case.rank),
            LOCAL_WORLD_SIZE=str(case.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(case.master_port),
        )
        _seed()
        if case.process_group:
            _init_process_group(case)

    def run(self) -> Outcome:
        """Run the case in this fresh world: its result, or its exception."""
        try:
            self._open()
            module, _, name = self.case.target.partition(":")
            function = getattr(importlib.import_module(module), name)
            return Outcome(pickle.dumps(function(**self.case.kwargs), protocol=pickle.HIGHEST_PROTOCOL))
        except BaseException:
            # Every way of failing, SystemExit included, has to reach the test that asked.
            return Outcome(failures=[traceback.format_exc()])

    def close(self) -> Outcome:
        """Check and reset, each step even if an earlier one failed: what the case leaked."""
        outcome = Outcome()
        for step in (
            self._check_groups,
            self._destroy_megatron_state,
            _destroy_process_groups,
            self._restore_torch_state,
            self._check_modules,
            self._check_patches,
            self._restore_environment,
        ):
            try:
                step()
            except Leak as leak:
                outcome.failures.append(f"leaked: {leak}")
            except BaseException:
                outcome.failures.append(f"while tidying up after the case:\n{traceback.format_exc()}")
        return outcome

    def _check_groups(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        groups = dist.distributed_c10d._world.pg_map
        default = dist.group.WORLD
        left = [
            f"{group.group_desc} (ranks {dist.get_process_group_ranks(group)})"
            for group in groups
            if group is not default and not _MEGATRON_GROUP.search(group.group_desc)
        ]
        if left:
            raise Leak(f"{len(left)} process group(s) still open: {', '.join(left)}")

    def _check_modules(self) -> None:
        changed: list[str] = []
        for name, (module, before) in self.modules.items():
            after = vars(module)
            changed += [f"{name}.{key} replaced" for key, value in before.items() if after.get(key, value) is not value]
            changed += [f"{name}.{key} removed" for key in before if key not in after]
            # Importing a submodule adds it to its parent; anything else that is new was put there.
            changed += [
                f"{name}.{key} added"
                for key, value in after.items()
                if key not in before and getattr(value, "__name__", None) != f"{name}.{key}"
            ]
        if changed:
            raise Leak(f"torch differs from before the case: {', '.join(changed)}")

    def _check_patches(self) -> None:
        now = _applied_patches()
        left = [target for patch, target in now.items() if patch not in self.patches]
        gone = [target for patch, target in self.patches.items() if patch not in now]
        if left or gone:
            raise Leak(f"patches still applied: {left}; patches reverted that were there before: {gone}")

    def _destroy_megatron_state(self) -> None:
        """Put megatron-core's module globals back to their state before the case."""
        if "megatron.core" not in sys.modules:
            return
        from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
        from megatron.core.tensor_parallel import random as megatron_random

        parallel_state.destroy_model_parallel()
        # 0.16.1 forgets a dozen of its globals, one of them a process group (_INTRA_PARTIAL_..._WITH_CP).
        parallel_state.__dict__.update(self.parallel_state)
        num_microbatches_calculator.unset_num_microbatches_calculator()
        rerun_state_machine.destroy_rerun_state_machine()
        megatron_random._CUDA_RNG_STATE_TRACKER = None
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
        prediction = sys.modules.get("megatron.core.transformer.multi_token_prediction")
        if prediction is not None:
            prediction.MTPLossLoggingHelper.tracker.clear()

    def _restore_torch_state(self) -> None:
        import torch

        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)

    def _restore_environment(self) -> None:
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)


def _seed() -> None:
    import random

    import numpy
    import torch

    random.seed(DEFAULT_SEED)
    numpy.random.seed(DEFAULT_SEED)
    torch.manual_seed(DEFAULT_SEED)


def _init_process_group(case: Case) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(case.store, case.world_size),
        rank=case.rank,
        world_size=case.world_size,
        timeout=timedelta(seconds=max(case.timeout, 1.0)),
    )


def _destroy_process_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    left = len(dist.distributed_c10d._world.pg_map)
    if left:
        raise Leak(f"{left} process group(s) survive destroy_process_group()")
    # A gloo group ends its three threads only when nothing refers to it any more. What hung on the optimizer's views,
    # in C++, shows as garbage only once the optimizer is gone: hence twice.
    gc.collect()
    gc.collect()
    limit = time.monotonic() + _THREADS_END_WITHIN
    while alive := _gloo_threads():
        if time.monotonic() > limit:
            raise Leak(f"{alive} gloo threads are left: something still holds a process group of the case")
        time.sleep(0.01)


def _gloo_threads() -> int:
    names: list[str] = []
    for task in os.listdir("/proc/self/task"):
        # A thread may end between the two looks.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(Path("/proc/self/task", task, "comm").read_text())
    return sum("gloo" in name for name in names)


def _applied_patches() -> dict[int, str]:
    """Identity and target of the patches of megatron-core that are in force."""
    if "mindspeed_llm.patching" not in sys.modules:
        return {}
    from mindspeed_llm.patching import applied_patches

    return {id(patch): patch.target for patch in applied_patches()}


def _main() -> None:
    # A terminal's Ctrl-C goes to the test session, which then hangs up; dying here first would lose the ranks' stacks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    zygote(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    # Cases are pickled under the importable name, so serve from that module and not from __main__.
    from tests.distributed import pool_worker

    pool_worker._main()
