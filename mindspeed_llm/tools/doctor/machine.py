"""Devices, processors, memory, limits of processes, clock, encoding."""

from __future__ import annotations

import locale
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mindspeed_llm.tools.doctor.finding import PACKAGE, Check, Finding, Surroundings, note, ok, problem, warning

GIB = 1 << 30
_OPEN_FILES = 4096
"""Each rank holds a connection to every other one, files of data, and those of a save."""
_PROCESS_BYTES = GIB // 2
"""What a process holds before it has a model (0.3 GiB on CPU), and some room."""
_SHARED_BYTES = GIB


def device(s: Surroundings) -> Iterator[Finding]:
    """The device that a run would take, and those that it would leave lying about."""
    seen = s.probe.stages.get("device")
    if seen is None:
        return
    torch = s.probe.stages["torch"]
    what = f"{seen['type']} ({seen['backend']}), torch {torch['version']}"
    if seen["type"] != "cpu" and s.processes > seen["count"]:
        yield problem(
            f"{s.processes} processes on this node, {seen['count']} {seen['type']} devices",
            "a process without a device fails: invalid device ordinal",
            f"NPUS_PER_NODE={seen['count']}, or look at the variable of visible devices",
        )
        return
    if seen["type"] != "cpu":
        yield ok(f"{seen['count']} x {what}")
        return
    chosen = s.environ.get("MINDSPEED_LLM_DEVICE") == "cpu"
    cards = {"nvidia[0-9]*": "a torch that is built for CUDA", "davinci[0-9]*": "torch_npu, and CANN's set_env.sh"}
    there = [(pattern, lacks) for pattern, lacks in cards.items() if any((s.root / "dev").glob(pattern))]
    if there and not chosen:
        for pattern, lacks in there:
            found = sorted(path.name for path in (s.root / "dev").glob(pattern))
            yield problem(
                f"{', '.join(found)} in /dev, and torch {torch['version']} does not see a device",
                "the run would train on the CPU",
                f"install {lacks}; MINDSPEED_LLM_DEVICE=cpu says that the CPU is meant",
            )
    elif torch["cuda"] is not None and not chosen:
        yield warning(
            f"torch is built for CUDA {torch['cuda']}, and there is no GPU",
            "the run would train on the CPU",
            "in a container: docker run --gpus all; MINDSPEED_LLM_DEVICE=cpu says that the CPU is meant",
        )
    else:
        yield ok(what)


def processors(s: Surroundings) -> Iterator[Finding]:
    """Cores that the processes of this node may use, and threads that they will start."""
    cores: float = len(os.sched_getaffinity(0))
    what = f"{cores:g} cores"
    quota = _words(s.root / "sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdecimal() and int(quota[0]) / int(quota[1]) < cores:
        cores = int(quota[0]) / int(quota[1])
        what += f", of which the container may use {cores:g}"
    threads = s.environ.get("OMP_NUM_THREADS")
    if threads is not None and not threads.isdecimal():
        yield warning(f"OMP_NUM_THREADS={threads} is no number", "it is ignored", "export OMP_NUM_THREADS=1")
    elif threads is not None and int(threads) * s.processes > cores:
        yield warning(
            f"{what}, and {s.processes} processes with OMP_NUM_THREADS={threads}",
            "threads that wait for each other's cores are slower than fewer threads",
            f"export OMP_NUM_THREADS={max(1, int(cores // s.processes))}",
        )
    else:
        yield ok(f"{what}, OMP_NUM_THREADS={threads or 'not set (torchrun sets 1)'}")


def memory(s: Surroundings) -> Iterator[Finding]:
    """Memory that is free, for the machine and for the container."""
    table = {words[0].rstrip(":"): int(words[1]) for line in _lines(s.root / "proc/meminfo") if (words := line.split())}
    if "MemAvailable" not in table:
        return
    total, free = table["MemTotal"] * 1024, table["MemAvailable"] * 1024
    limit, used = (_words(s.root / f"sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and limit[0].isdecimal() and int(limit[0]) < total:
        total, free = int(limit[0]), min(free, int(limit[0]) - int(used[0]))
    what = f"{free / GIB:.1f} of {total / GIB:.1f} GiB of memory are free"
    if free < s.processes * _PROCESS_BYTES:
        yield warning(
            what,
            f"{s.processes} processes hold {s.processes * _PROCESS_BYTES / GIB:g} GiB before they have a model;"
            " the kernel kills one of them (SIGKILL, exit status -9) when memory runs out",
            "end what takes it (ps aux --sort -rss), start fewer processes, or give the container more",
        )
    else:
        yield ok(what)


def shared_memory(s: Surroundings) -> Iterator[Finding]:
    """The size of /dev/shm, through which processes of a node exchange data."""
    folder = s.root / "dev/shm"
    if not folder.is_dir():
        return
    seen = os.statvfs(folder)
    size, free = seen.f_blocks * seen.f_frsize, seen.f_bavail * seen.f_frsize
    what = f"/dev/shm has {free / GIB:.2g} of {size / GIB:.2g} GiB free"
    if free < _SHARED_BYTES:
        yield warning(
            what,
            "NCCL and the data workers (--num-workers) exchange data there: bus error (SIGBUS) when it is full",
            "docker run --shm-size=16g; in Kubernetes an emptyDir with medium: Memory at /dev/shm",
        )
    else:
        yield ok(what)


def limits(s: Surroundings) -> Iterator[Finding]:
    """What the shell allows a process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    core, _ = resource.getrlimit(resource.RLIMIT_CORE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    clean = True
    if files != resource.RLIM_INFINITY and files < _OPEN_FILES:
        clean = False
        yield warning(
            f"a process may open {files} files (ulimit -n)",
            "connections between ranks and files of data count: 'Too many open files' in large runs",
            "ulimit -n 65536, or LimitNOFILE of the service that starts the run",
        )
    if size != resource.RLIM_INFINITY:
        clean = False
        yield problem(
            f"no file may be larger than {size} bytes (ulimit -f)",
            "saves, prepared data and logs end there with 'File too large'",
            "ulimit -f unlimited",
        )
    if locked != resource.RLIM_INFINITY and (s.root / "dev/infiniband").is_dir():
        clean = False
        yield warning(
            f"a process may lock {locked} bytes of memory (ulimit -l), and there is InfiniBand or RoCE",
            "RDMA registers its buffers as locked memory",
            "ulimit -l unlimited; docker run --ulimit memlock=-1",
        )
    if core:
        clean = False
        yield note(
            "a process that crashes writes a core file (ulimit -c)",
            "it is as large as the process; a failing run with many ranks fills the disk",
            "ulimit -c 0",
        )
    if clean:
        yield ok(f"limits: {files if files != resource.RLIM_INFINITY else 'any number of'} open files, no core files")


def clock(_: Surroundings) -> Iterator[Finding]:
    """A clock that is plainly behind."""
    installed, now = (PACKAGE / "__init__.py").stat().st_mtime, time.time()
    if now + 60 < installed:
        yield warning(
            f"the clock says {time.ctime(now)}; this package was installed {time.ctime(installed)}",
            "TLS certificates look invalid, make builds too much or too little, logs of nodes cannot be put in order",
            "timedatectl set-ntp true",
        )
    else:
        yield ok(f"clock: {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(now))}")


def text_encoding(_: Surroundings) -> Iterator[Finding]:
    """Names and output in UTF-8."""
    found = {"file names": sys.getfilesystemencoding(), "text files": locale.getencoding()}
    if sys.flags.utf8_mode:
        found["text files"] = "utf-8"
    if sys.stdout.encoding is not None:
        found["output"] = sys.stdout.encoding
    odd = [f"{what} in {name}" for what, name in found.items() if name.lower().replace("-", "") != "utf8"]
    if odd:
        yield warning(
            ", ".join(odd),
            "paths and texts beyond ASCII end in UnicodeEncodeError or UnicodeDecodeError",
            "export LANG=C.UTF-8 LC_ALL=C.UTF-8, or PYTHONUTF8=1",
        )
    else:
        yield ok("file names, text files and output are UTF-8")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


CHECKS: tuple[Check, ...] = (device, processors, memory, shared_memory, limits, clock, text_encoding)
