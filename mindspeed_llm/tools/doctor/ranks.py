"""Under a launcher: the processes of all nodes meet, exchange what they saw, and compare it."""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.processes import system
from mindspeed_llm.tools.doctor.finding import PACKAGE, Finding, Surroundings, nearest_folder, ok, problem, warning
from mindspeed_llm.tools.doctor.software import installed

_MEETING = datetime.timedelta(seconds=60)
"""For processes that the launcher has brought together already."""
_COMPARED = ("torch", "megatron-core", "transformers", "numpy", "mindspeed-llm", "torch_npu")
_VARIABLES = ("NCCL_", "HCCL_", "MINDSPEED_LLM_", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_", "PYTORCH_")
_CLOCK_SECONDS = 2.0
_REDUCED = 4 << 20
"""Numbers in fp32 that are summed over all ranks."""


@dataclass(frozen=True)
class Report:
    """What one rank is and saw.

    Attributes:
        kernel: the running system; ranks with different ones are on different machines.
        source: hash of the package's source.
        variables: those of the environment that ought to be the same everywhere.
        clock: seconds, when all ranks had just met.
    """

    rank: int
    host: str
    kernel: str | None
    python: str
    versions: dict[str, str | None]
    source: str
    device: str
    variables: dict[str, str]
    clock: float
    findings: list[Finding]


def report(s: Surroundings, findings: list[Finding]) -> Report:
    """That of this process."""
    return Report(
        rank=int(s.environ.get("RANK", "0")),
        host=socket.gethostname(),
        kernel=system(),
        python=sys.version.split()[0],
        versions={name: installed(name) for name in _COMPARED},
        source=_hash_of(PACKAGE),
        device=s.probe.device,
        variables={name: value for name, value in sorted(s.environ.items()) if name.startswith(_VARIABLES)},
        clock=time.time(),
        findings=findings,
    )


def _hash_of(package: Path) -> str:
    summed = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        summed.update(path.relative_to(package).as_posix().encode())
        summed.update(path.read_bytes())
    return summed.hexdigest()[:12]


def meet(s: Surroundings, findings: list[Finding]) -> list[Report]:
    """Gather every rank's report; what the ranks have in common is in that of rank 0.

    Raises:
        RuntimeError: the ranks do not meet, or lose each other.
    """
    import torch.distributed as dist

    from mindspeed_llm.device import current

    device = current()
    device.bind()
    dist.init_process_group("gloo", timeout=_MEETING)
    dist.barrier()
    reports: list[Report | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report(s, findings))
    gathered = [one for one in reports if one is not None]
    # Told by rank 0, and known to all: they end with the same exit status.
    gathered[0].findings.extend([*compare(gathered), *_seen_by_all(s, gathered), _reduce(device.backend)])
    return gathered


def part() -> None:
    """Leave together, when rank 0 has told: a launcher ends all processes as soon as one fails."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def _reduce(backend: str) -> Finding:
    import torch
    import torch.distributed as dist

    from mindspeed_llm.device import current

    world = dist.get_world_size()
    group = None if backend == "gloo" else dist.new_group(backend=backend, timeout=_MEETING)
    seconds: list[float] = []
    total = 0.0
    for _ in range(3):
        ones = torch.ones(_REDUCED, device=current().torch_device)
        dist.barrier()
        begun = time.monotonic()
        dist.all_reduce(ones, group=group)
        current().synchronize()
        seconds.append(time.monotonic() - begun)
        total = float(ones.sum(dtype=torch.float64))
    name = f"all-reduce of {_REDUCED * 4 >> 20} MiB over {world} ranks ({backend})"
    if total != float(world) * _REDUCED:
        return problem(f"{name}: a wrong sum", "training computes with wrong gradients", "look at the network", _CHECK)
    rate = 2 * (world - 1) / world * _REDUCED * 4 / min(seconds) / 1e9
    return ok(f"{name}: {1000 * min(seconds):.1f} ms, {rate:.2f} GB/s at each rank", check=_CHECK)


_CHECK = "ranks.all_reduce"


def _seen_by_all(s: Surroundings, reports: Sequence[Report]) -> list[Finding]:
    """Whether what rank 0 writes to --save is there for all ranks."""
    import torch.distributed as dist

    if s.save is None:
        return []
    rank, name = dist.get_rank(), [""]
    # Where --save is not there yet, the ranks would not agree on the folder above it: rank 0 names it.
    if rank == 0:
        with tempfile.NamedTemporaryFile(prefix=".doctor.", dir=nearest_folder(s.save), delete=False) as file:
            name[0] = file.name
    dist.broadcast_object_list(name, 0)
    seen: list[bool | None] = [None] * len(reports)
    # Opening asks a network file system for what is true now.
    dist.all_gather_object(seen, os.path.isdir(os.path.dirname(name[0])) and _opens(name[0]))
    if rank == 0:
        os.unlink(name[0])
    blind = [f"{one.rank} on {one.host}" for one, there in zip(reports, seen, strict=True) if not there]
    if blind:
        what = f"what rank 0 writes to {os.path.dirname(name[0])} is not seen by rank {', '.join(blind)}"
        return [problem(what, "a save needs one folder for all ranks", "--save on shared storage", "ranks.storage")]
    return [ok(f"all {len(seen)} ranks see one {os.path.dirname(name[0])}", check="ranks.storage")]


def _opens(path: str) -> bool:
    try:
        with open(path, "rb"):
            return True
    except OSError:
        return False


def compare(reports: Sequence[Report]) -> Iterator[Finding]:
    """What ought to be the same on all ranks, and is not."""
    found: list[Finding] = []
    for what, values, say, why, remedy in (
        *((name, {one.rank: one.versions[name] for one in reports}, problem, _OTHER, _SAME) for name in _COMPARED),
        ("Python", {one.rank: one.python for one in reports}, problem, _OTHER, _SAME),
        ("the source of mindspeed_llm", {one.rank: one.source for one in reports}, problem, _OTHER, _SAME),
        ("the device", {one.rank: one.device for one in reports}, problem, "they have no backend in common", _DEVICE),
    ):
        if len(set(values.values())) > 1:
            found.append(say(f"{what} differs: {_by_value(values)}", why, remedy))
    for name in sorted({name for one in reports for name in one.variables}):
        values = {one.rank: one.variables.get(name, "not set") for one in reports}
        if len(set(values.values())) > 1:
            what = f"{name} differs: {_by_value(values)}"
            found.append(warning(what, "nodes that are set up differently wait for each other", f"export {name} alike"))
    clocks = [one.clock for one in reports]
    if max(clocks) - min(clocks) > _CLOCK_SECONDS:
        what = f"clocks differ by {max(clocks) - min(clocks):.0f} s"
        found.append(warning(what, "logs of nodes cannot be put in order", "timedatectl set-ntp true, on every node"))
    kernels: dict[str, set[str | None]] = defaultdict(set)
    for one in reports:
        kernels[one.host].add(one.kernel)
    twice = sorted(host for host, known in kernels.items() if len(known) > 1)
    if twice:
        what = f"several machines are called {', '.join(twice)}"
        found.append(warning(what, "messages do not tell them apart", "hostnamectl set-hostname, a name for each"))
    if not found:
        found.append(ok(f"{len(reports)} ranks on {len(kernels)} hosts have the same software, source and variables"))
    for one in found:
        yield Finding(one.severity, one.what, one.why, one.remedy, "ranks.compare")


_OTHER = "ranks that compute differently give a wrong result, or wait for each other"
_SAME = "one image, or one environment on shared storage, for all nodes"
_DEVICE = "MINDSPEED_LLM_DEVICE, and the drivers of the nodes"


def _by_value(values: Mapping[int, str | None]) -> str:
    ranks: dict[str | None, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return "; ".join(f"{value} on rank {spans(where)}" for value, where in ranks.items())


def spans(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
