"""How each fault that the doctor finds is made: a table."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mindspeed_llm.checkpoint import in_use
from mindspeed_llm.tools.doctor import network, software
from mindspeed_llm.tools.doctor.finding import Probe, Surroundings, run_probe

CUDA, NPU = (Probe({"torch": {"version": "2", "cuda": None}, "device": {"type": t, "backend": b, "count": 8}})
             for t, b in (("cuda", "nccl"), ("npu", "hccl")))  # fmt: skip


def on_cpu(cuda: str | None = None, **stages: Any) -> Probe:
    device = {"type": "cpu", "backend": "gloo", "count": 1}
    return Probe({"torch": {"version": "2", "cuda": cuda}, "device": device, **stages})


def given(probe: Probe | None = None, /, **environ: str) -> Surroundings:
    return Surroundings(environ, probe or on_cpu())


class Scene(NamedTuple):
    """What a fault is made with."""

    patch: pytest.MonkeyPatch
    folder: Path

    def write(self, name: str, text: str = "") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def installed(self, name: str, version: str) -> None:
        """A package's metadata, before the real ones."""
        self.write(f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.patch.syspath_prepend(str(self.folder))

    def limit(self, what: int, soft: int) -> None:
        """One of the shell's limits; ``restore_limits`` takes it back."""
        resource.setrlimit(what, (soft, resource.getrlimit(what)[1]))

    def rooted(self, probe: Probe | None = None, **environ: str) -> Surroundings:
        return Surroundings(environ, probe or on_cpu(), root=self.folder)

    def saving(self, **environ: str) -> Surroundings:
        return Surroundings(environ, on_cpu(), save=self.folder / "save")


Fault = Callable[[Scene], Surroundings]
FAULTS: list[tuple[str, str, str, Fault]] = []
"""``section.check``, severity, a part of what is told, and how the fault is made."""


def fault(check: str, severity: str, text: str) -> Callable[[Fault], Fault]:
    def add(make: Fault) -> Fault:
        FAULTS.append((check, severity, text, make))
        return make

    return add


def variable_fault(check: str, severity: str, text: str, probe: Probe | None = None, **environ: str) -> None:
    FAULTS.append((check, severity, text, lambda _: given(probe, **environ)))


# Software -----------------------------------------------------------------------------------------------------------


@fault("software.python", "warning", "Python 3")
def _(scene: Scene) -> Surroundings:
    scene.patch.setattr(sys, "version_info", (3, 12, 0, "final", 0))
    return given()


@fault("software.imports", "problem", "torch fails: ended by SIGSEGV")
def _(scene: Scene) -> Surroundings:
    scene.write("torch/__init__.py", "import os\nos.kill(os.getpid(), 11)")
    return given(run_probe({**os.environ, "PYTHONPATH": str(scene.folder)}))


@fault("software.imports", "problem", "torch fails: ImportError: libhccl.so: cannot open shared object file")
def _(scene: Scene) -> Surroundings:
    scene.write("torch/__init__.py", "raise ImportError('libhccl.so: cannot open shared object file')")
    return given(run_probe({**os.environ, "PYTHONPATH": str(scene.folder)}))


@fault("software.imports", "problem", "did not end within 0.5 s; last words: waiting for the driver")
def _(scene: Scene) -> Surroundings:
    scene.patch.setattr("mindspeed_llm.tools.doctor.finding._PROBE_SECONDS", 0.5)
    scene.write("torch/__init__.py", "import sys, time\nsys.stderr.write('waiting for the driver\\n')\ntime.sleep(60)")
    return given(run_probe({**os.environ, "PYTHONPATH": str(scene.folder), "PYTHONUNBUFFERED": "1"}))


@fault("software.imports", "problem", "device fails: device cuda is not available in this process")
def _(_: Scene) -> Surroundings:
    return given(run_probe({**os.environ, "MINDSPEED_LLM_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}))


@fault("software.packages", "problem", "megatron-core is 0.9.0, not ==0.16.1")
def _(scene: Scene) -> Surroundings:
    scene.installed("megatron_core", "0.9.0")
    return given()


@fault("software.packages", "warning", "numpy is 1.0, not ==")
def _(scene: Scene) -> Surroundings:
    scene.installed("numpy", "1.0")
    return given()


@fault("software.names", "warning", "is another mindspeed_llm")
def _(scene: Scene) -> Surroundings:
    scene.write("mindspeed_llm/__init__.py")
    scene.patch.setattr(sys, "path", [*sys.path, str(scene.folder)])
    return given()


def _megatron(scene: Scene, name: str, *, first: bool) -> Surroundings:
    scene.write(name)
    scene.patch.setattr(sys, "path", [str(scene.folder), *sys.path] if first else [*sys.path, str(scene.folder)])
    return given()


@fault("software.names", "problem", "is another megatron")
def _(scene: Scene) -> Surroundings:
    return _megatron(scene, "megatron/core/__init__.py", first=True)


@fault("software.names", "warning", "is another megatron")
def _(scene: Scene) -> Surroundings:
    return _megatron(scene, "megatron/core/__init__.py", first=False)


@fault("software.names", "problem", "is another megatron")
def _(scene: Scene) -> Surroundings:
    return _megatron(scene, "megatron/__init__.py", first=False)


@fault("software.neighbours", "warning", "apex is installed without its kernels")
def _(scene: Scene) -> Surroundings:
    scene.write("apex/__init__.py")
    scene.patch.syspath_prepend(str(scene.folder))
    return given()


@fault("software.neighbours", "warning", "mindspeed (MindSpeed core) is installed")
def _(scene: Scene) -> Surroundings:
    scene.write("mindspeed/__init__.py")
    scene.patch.syspath_prepend(str(scene.folder))
    return given()


@fault("software.neighbours", "problem", "torch_npu 2.1.0 is made for another torch than")
def _(scene: Scene) -> Surroundings:
    scene.installed("torch_npu", "2.1.0")
    return given()


@fault("software.compiled", "warning", "the C++ module of ops is older than csrc/cpu/new.cpp")
def _(scene: Scene) -> Surroundings:
    later = time.time() + 1e6
    os.utime(scene.write("csrc/cpu/new.cpp"), (later, later))
    scene.patch.setattr(software, "ROOT", scene.folder)
    scene.write("mindspeed_llm/ops/_cpu_kernels.x.so")
    scene.patch.setattr(software, "PACKAGE", scene.folder / "mindspeed_llm")
    return given(on_cpu(native={"ops": None, "tokenizers": None}))


@fault("software.compiled", "note", "no g++")
def _(scene: Scene) -> Surroundings:
    scene.patch.setenv("PATH", str(scene.folder))
    return given()


# Machine ------------------------------------------------------------------------------------------------------------


@fault("machine.device", "problem", "davinci0 in /dev")
def _(scene: Scene) -> Surroundings:
    scene.write("dev/davinci0")
    return scene.rooted()


@fault("machine.device", "warning", "torch is built for CUDA 12.8, and there is no GPU")
def _(_: Scene) -> Surroundings:
    return given(on_cpu(cuda="12.8"))


variable_fault("machine.device", "problem", "16 processes on this node, 8 npu devices", NPU, LOCAL_WORLD_SIZE="16")
variable_fault("machine.processors", "warning", "4 processes with OMP_NUM_THREADS=9999",
               OMP_NUM_THREADS="9999", LOCAL_WORLD_SIZE="4")  # fmt: skip
variable_fault("machine.processors", "warning", "OMP_NUM_THREADS=many is no number", OMP_NUM_THREADS="many")


@fault("machine.processors", "warning", "of which the container may use 0.5")
def _(scene: Scene) -> Surroundings:
    scene.write("sys/fs/cgroup/cpu.max", "50000 100000\n")
    return scene.rooted(OMP_NUM_THREADS="1")


@fault("machine.memory", "warning", "0.4 of 8.0 GiB of memory are free")
def _(scene: Scene) -> Surroundings:
    scene.write("proc/meminfo", f"MemTotal: {8 << 20} kB\nMemAvailable: {400 << 10} kB\nHugePages_Total:       0\n")
    return scene.rooted()


@fault("machine.memory", "warning", "1.0 of 2.0 GiB of memory are free")
def _(scene: Scene) -> Surroundings:
    scene.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    scene.write("sys/fs/cgroup/memory.max", f"{2 << 30}\n")
    scene.write("sys/fs/cgroup/memory.current", f"{1 << 30}\n")
    return scene.rooted(LOCAL_WORLD_SIZE="4")


@fault("machine.shared_memory", "warning", "/dev/shm has 0.062 of 0.062 GiB free")
def _(scene: Scene) -> Surroundings:
    (scene.folder / "dev/shm").mkdir(parents=True)
    seen = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 1, 1, 1, 0, 255))
    scene.patch.setattr(os, "statvfs", lambda path: seen)
    return scene.rooted()


@fault("machine.limits", "warning", "a process may open 1000 files")
def _(scene: Scene) -> Surroundings:
    scene.limit(resource.RLIMIT_NOFILE, 1000)
    return given()


@fault("machine.limits", "problem", "no file may be larger than 1048576 bytes")
def _(scene: Scene) -> Surroundings:
    scene.limit(resource.RLIMIT_FSIZE, 1 << 20)
    return given()


@fault("machine.limits", "note", "a process that crashes writes a core file")
def _(scene: Scene) -> Surroundings:
    scene.patch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    return given()


@fault("machine.limits", "warning", "a process may lock 65536 bytes of memory")
def _(scene: Scene) -> Surroundings:
    (scene.folder / "dev/infiniband").mkdir(parents=True)
    scene.patch.setattr(resource, "getrlimit", lambda what: (65536, 65536))
    return scene.rooted()


@fault("machine.clock", "warning", "the clock says")
def _(scene: Scene) -> Surroundings:
    scene.patch.setattr(time, "time", lambda: 0.0)
    return given()


# Network ------------------------------------------------------------------------------------------------------------


def _called(name: str) -> Fault:
    def make(scene: Scene) -> Surroundings:
        scene.patch.setattr(socket, "gethostname", lambda: name)
        return given(NNODES="2")

    return make


fault("network.host_name", "problem", "the host name localhost resolves to 127.")(_called("localhost"))
fault("network.host_name", "problem", "the host name nowhere.invalid resolves to nothing")(_called("nowhere.invalid"))
# An address of documentation (RFC 5737) is nobody's.
fault("network.host_name", "problem", "the host name 192.0.2.1 resolves to 192.0.2.1")(_called("192.0.2.1"))
variable_fault("network.gloo_interface", "problem", "nope0 does not exist", GLOO_SOCKET_IFNAME="lo,nope0")
variable_fault("network.collective_interface", "problem", "HCCL_SOCKET_IFNAME==nope0 fits no interface", NPU,
               HCCL_SOCKET_IFNAME="=nope0")  # fmt: skip


@fault("network.collective_interface", "warning", "NCCL chooses among eth0, ib0 by itself")
def _(scene: Scene) -> Surroundings:
    names = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "docker0": "172.17.0.1", "ib0": "10.1.0.1"}
    there = [network.Interface(name, True, address) for name, address in names.items()]
    scene.patch.setattr(network, "interfaces", lambda: there)
    return given(CUDA, NNODES="2")


variable_fault("network.launcher", "problem", "RANK is set, and WORLD_SIZE, MASTER_ADDR, MASTER_PORT not", RANK="0")
variable_fault("network.launcher", "problem", "WORLD_SIZE=8 without RANK", WORLD_SIZE="8")
variable_fault("network.launcher", "problem", "RANK=8 of WORLD_SIZE=8",
               RANK="8", WORLD_SIZE="8", MASTER_ADDR="localhost", MASTER_PORT="29500")  # fmt: skip
variable_fault("network.meeting_point", "problem", "MASTER_PORT=70000 is no port", MASTER_PORT="70000")
variable_fault("network.meeting_point", "problem", "MASTER_ADDR=nowhere.invalid does not resolve",
               MASTER_ADDR="nowhere.invalid")  # fmt: skip
variable_fault("network.meeting_point", "problem", "(127.0.0.1) on 2 nodes", MASTER_ADDR="127.0.0.1", NNODES="2")
variable_fault("network.meeting_point", "problem", "is not an address of this node, which is node 0",
               MASTER_ADDR="192.0.2.1", NNODES="2", NODE_RANK="0")  # fmt: skip


@fault("network.meeting_point", "problem", "Address already in use")
def _(scene: Scene) -> Surroundings:
    listening = socket.create_server(("", 0))
    scene.patch.setattr(Scene, "open", listening, raising=False)  # for as long as the test
    return given(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(listening.getsockname()[1]))


@fault("network.meeting_point", "warning", "timed out")
def _(scene: Scene) -> Surroundings:
    def nobody(*_: Any, **__: Any) -> None:
        raise TimeoutError("timed out")

    scene.patch.setattr(socket, "create_connection", nobody)
    return given(MASTER_ADDR="192.0.2.1", MASTER_PORT="29500", NNODES="2", NODE_RANK="1")


# Variables ----------------------------------------------------------------------------------------------------------

variable_fault("variables.suite", "problem", "MINDSPEED_LLM_LEARNING_RAT", MINDSPEED_LLM_LEARNING_RAT="1")
variable_fault("variables.suite", "note", "flags from the environment: MINDSPEED_LLM_SEED=7", MINDSPEED_LLM_SEED="7")
variable_fault("variables.timeouts", "warning", "HCCL_CONNECT_TIMEOUT=9000: 120 to 7200", HCCL_CONNECT_TIMEOUT="9000")
variable_fault(
    "variables.timeouts", "warning", "HCCL_CONNECT_TIMEOUT=1800 s is longer than", HCCL_CONNECT_TIMEOUT="1800"
)
variable_fault("variables.timeouts", "warning", "HCCL_EXEC_TIMEOUT=3600 s is longer than", HCCL_EXEC_TIMEOUT="3600")
variable_fault("variables.timeouts", "note", "HCCL_EXEC_TIMEOUT=0: HCCL waits for ever", HCCL_EXEC_TIMEOUT="0")
variable_fault("variables.timeouts", "note", "HCCL_CONNECT_TIMEOUT is not set: 120 s", NPU, NNODES="2")
variable_fault("variables.connections", "note", "CUDA_DEVICE_MAX_CONNECTIONS=8", CUDA, CUDA_DEVICE_MAX_CONNECTIONS="8")
variable_fault(
    "variables.allocator", "warning", "is not option:value", PYTORCH_NPU_ALLOC_CONF="expandable_segments=True"
)
variable_fault("variables.allocator", "note", "PYTORCH_NPU_ALLOC_CONF is not set", NPU)
variable_fault("variables.ascend", "warning", "names /nowhere/cann", ASCEND_HOME_PATH="/nowhere/cann")
variable_fault("variables.visible_devices", "problem", "2 devices for 8 processes", NPU,
               ASCEND_RT_VISIBLE_DEVICES="0,1", LOCAL_WORLD_SIZE="8")  # fmt: skip
variable_fault("variables.visible_devices", "problem", "names one twice", CUDA, CUDA_VISIBLE_DEVICES="0,0")
variable_fault("variables.switches", "warning", "ASCEND_LAUNCH_BLOCKING=1", ASCEND_LAUNCH_BLOCKING="1")


@fault("variables.ascend", "problem", "no ASCEND_HOME_PATH")
def _(scene: Scene) -> Surroundings:
    scene.write("dev/davinci3")
    return scene.rooted()


# Storage ------------------------------------------------------------------------------------------------------------


@fault("storage.save_folder", "problem", "is a file")
def _(scene: Scene) -> Surroundings:
    scene.write("save")
    return scene.saving()


@fault("storage.save_folder", "problem", "/proc cannot be written to")
def _(_: Scene) -> Surroundings:
    return Surroundings({}, save=Path("/proc/doctor/save"))


@fault("storage.save_folder", "problem", "write fails: File too large")
def _(scene: Scene) -> Surroundings:
    scene.limit(resource.RLIMIT_FSIZE, 1 << 20)
    return scene.saving()


def _without(name: str, error: int) -> Fault:
    """A file system that lacks a call."""

    def make(scene: Scene) -> Surroundings:
        def refuse(*_: Any) -> None:
            raise OSError(error, os.strerror(error))

        scene.patch.setattr(name, refuse)
        return scene.saving()

    return make


fault("storage.save_folder", "problem", "fsync fails: Input/output error")(_without("os.fsync", 5))
fault("storage.save_folder", "problem", "rename fails: Read-only file system")(_without("os.replace", 30))
fault("storage.save_folder", "note", "link fails: Operation not permitted")(_without("os.link", 1))
fault("storage.save_folder", "warning", "lock fails: No locks available")(_without("fcntl.lockf", 37))


@fault("storage.save_folder", "warning", "its server's clock differs from this node's by +100 s")
def _(scene: Scene) -> Surroundings:
    now = time.time
    scene.patch.setattr(time, "time", lambda: now() - 100)
    return scene.saving()


def _with_free(gib: float) -> Fault:
    def make(scene: Scene) -> Surroundings:
        usage = shutil.disk_usage(scene.folder)._replace(free=int(gib * (1 << 30)))
        scene.patch.setattr(shutil, "disk_usage", lambda path: usage)
        return scene.saving()

    return make


fault("storage.free_space", "problem", "0.5 GiB are free")(_with_free(0.5))
fault("storage.free_space", "warning", "5.0 GiB are free")(_with_free(5))


def _mounted(line: str) -> Fault:
    def make(scene: Scene) -> Surroundings:
        scene.write("proc/mounts", f"/dev/sda / ext4 rw 0 0\n{line.format(scene.folder)}\n")
        return Surroundings({}, save=scene.folder / "save", root=scene.folder)

    return make


fault("storage.file_system", "warning", "is on tmpfs (memory at")(_mounted("memory {} tmpfs rw 0 0"))
fault("storage.file_system", "warning", "is on overlay")(_mounted("overlay {} overlay rw,lowerdir=/l 0 0"))
fault("storage.file_system", "warning", "mounted with soft,nolock")(
    _mounted("nas:/x {} nfs4 rw,soft,nolock,vers=3 0 0")
)


@fault("storage.leftovers", "problem", f"is written to by process {os.getpid()}")
def _(scene: Scene) -> Surroundings:
    held = in_use.hold(scene.folder / "save")
    held.__enter__()
    scene.patch.setattr(Scene, "held", held, raising=False)  # for as long as the test
    return scene.saving()


@fault("storage.leftovers", "note", "which is gone")
def _(scene: Scene) -> Surroundings:
    with in_use.hold(scene.folder / "save"):
        mark = json.loads((scene.folder / "save" / in_use.NAME).read_text())
    scene.write(f"save/{in_use.NAME}", json.dumps({**mark, "start": "1"}))
    return scene.saving()


@fault("storage.leftovers", "note", "on node7, since")
def _(scene: Scene) -> Surroundings:
    with in_use.hold(scene.folder / "save"):
        mark = json.loads((scene.folder / "save" / in_use.NAME).read_text())
    scene.write(f"save/{in_use.NAME}", json.dumps({**mark, "system": "another", "host": "node7"}))
    return scene.saving()


@fault("storage.leftovers", "note", "saves that were cut off: iter_0000010.tmp")
def _(scene: Scene) -> Surroundings:
    (scene.folder / "save/iter_0000010.tmp").mkdir(parents=True)
    return scene.saving()


@fault("storage.leftovers", "problem", "names iteration 20")
def _(scene: Scene) -> Surroundings:
    scene.write("save/latest_checkpointed_iteration.txt", "20")
    return scene.saving()


@fault("storage.leftovers", "note", "rank 3 on")
def _(scene: Scene) -> Surroundings:
    from mindspeed_llm.training.failure import failure_here, tell

    (scene.folder / "save").mkdir()
    tell(failure_here("OSError: no space", {"RANK": "3"}), str(scene.folder / "save"))
    return scene.saving()


@fault("storage.training_data", "problem", "there are: corpus_text_document")
def _(scene: Scene) -> Surroundings:
    scene.write("corpus_text_document.idx")
    scene.write("corpus_text_document.bin")
    return Surroundings({}, data=("0.3", str(scene.folder / "corpus")))


@fault("storage.training_data", "problem", "has only one of .idx and .bin")
def _(scene: Scene) -> Surroundings:
    scene.write("corpus_text_document.idx")
    return Surroundings({}, data=(str(scene.folder / "corpus_text_document"),))
