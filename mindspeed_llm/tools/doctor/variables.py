"""Variables of the environment that a run listens to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mindspeed_llm.config.files import NOT_FLAGS, PREFIX, read_environment
from mindspeed_llm.tools.doctor.finding import Check, Finding, Surroundings, note, ok, problem, warning
from mindspeed_llm.tools.doctor.software import installed

_HCCL_CONNECT_RANGE = (120, 7200)
"""Seconds, as CANN's reference of variables has it; the first is the default."""
_HCCL_EXEC_DEFAULT = 1836
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "ASCEND_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_SHM_DISABLE": ("1",),
    "NCCL_IB_DISABLE": ("1",),
    "NCCL_DEBUG": ("TRACE",),
}
"""Switches for finding a fault; left on they cost speed."""


def suite(s: Surroundings) -> Iterator[Finding]:
    """Flags that are set by variables, for every run of this shell."""
    reading = read_environment(s.environ)
    for error in reading.errors:
        yield problem(
            " ".join(str(error.what).split()) + (f": {error.got}" if error.got is not None else ""),
            "every run refuses it",
            error.fix or "unset it",
        )
    elsewhere = (*NOT_FLAGS, f"{PREFIX}DISTRIBUTED_TIMEOUT_MINUTES")  # the recipes set it, and timeouts tells of it
    given = sorted(name for name in s.environ if name.startswith(PREFIX) and name not in elsewhere)
    if given and not reading.errors:
        yield note(
            f"flags from the environment: {', '.join(f'{name}={s.environ[name]}' for name in given)}",
            "they hold for every run of this shell that does not give the flag itself",
            f"unset {' '.join(given)}",
        )
    elif not given:
        yield ok(f"no flag is set by {PREFIX}*")


def timeouts(s: Surroundings) -> Iterator[Finding]:
    """HCCL's times to wait, against that of the run; the recipes set theirs in ``examples/_shared/environment.sh``."""
    limit = 60 * s.timeout_minutes
    connect, executing = (s.environ.get(f"HCCL_{name}_TIMEOUT") for name in ("CONNECT", "EXEC"))
    for name, text in (("HCCL_CONNECT_TIMEOUT", connect), ("HCCL_EXEC_TIMEOUT", executing)):
        low, high = _HCCL_CONNECT_RANGE if name == "HCCL_CONNECT_TIMEOUT" else (0, 2**31 - 1)
        if text is None:
            continue
        if not (text.isdecimal() and low <= int(text) <= high):
            yield warning(
                f"{name}={text}: {low} to {high} seconds are allowed", "HCCL does not take it", f"unset {name}"
            )
        elif int(text) == 0:
            yield note(
                f"{name}=0: HCCL waits for ever",
                f"only --distributed-timeout-minutes {s.timeout_minutes:g} ends a run whose peer is missing",
                f"unset {name}",
            )
        elif int(text) > limit:
            yield warning(
                f"{name}={text} s is longer than --distributed-timeout-minutes {s.timeout_minutes:g}",
                "the run ends itself before HCCL says which peer is missing",
                f"--distributed-timeout-minutes {int(text) // 60 + 1}",
            )
        else:
            yield ok(f"{name}={text} s, within --distributed-timeout-minutes {s.timeout_minutes:g}")
    if s.probe.device == "npu" and s.nodes > 1 and connect is None:
        yield note(
            f"HCCL_CONNECT_TIMEOUT is not set: {_HCCL_CONNECT_RANGE[0]} s",
            "nodes that start more than this apart do not meet",
            "export HCCL_CONNECT_TIMEOUT=1800, with --distributed-timeout-minutes 31",
        )
    if s.probe.device == "npu" and executing is None and limit < _HCCL_EXEC_DEFAULT:
        yield note(
            f"HCCL_EXEC_TIMEOUT is not set: {_HCCL_EXEC_DEFAULT} s",
            "the run ends itself before HCCL does",
            f"export HCCL_EXEC_TIMEOUT={int(limit) - 60 if limit > 120 else 60}",
        )


def connections(s: Surroundings) -> Iterator[Finding]:
    """CUDA_DEVICE_MAX_CONNECTIONS, which orders kernels and communication on a GPU."""
    value = s.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if s.probe.device == "cuda" and value != "1":
        yield note(
            f"CUDA_DEVICE_MAX_CONNECTIONS={value or 'not set'}",
            "with tensor parallelism, communication that is to overlap with a kernel may start behind it",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        )


def allocator(s: Surroundings) -> Iterator[Finding]:
    """The options of torch's allocators."""
    for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = s.environ.get(name)
        if value is None:
            continue
        parts = re.sub(r"\[[^\]]*\]", "list", value).split(",")
        if all(re.fullmatch(r"\s*\w+\s*:\s*[\w.]+\s*", part) for part in parts):
            yield ok(f"{name}={value}")
        else:
            yield warning(
                f"{name}={value} is not option:value,option:value",
                "torch refuses it at the first allocation",
                f"export {name}=expandable_segments:True",
            )
    if s.probe.device == "npu" and "PYTORCH_NPU_ALLOC_CONF" not in s.environ:
        yield note(
            "PYTORCH_NPU_ALLOC_CONF is not set",
            "memory may be in pieces when a run is near the limit",
            "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        )


def ascend(s: Surroundings) -> Iterator[Finding]:
    """CANN's environment, where there is an NPU or torch_npu."""
    wanted = installed("torch_npu") or any((s.root / "dev").glob("davinci[0-9]*"))
    home = s.environ.get("ASCEND_HOME_PATH") or s.environ.get("ASCEND_TOOLKIT_HOME")
    if home is None and wanted:
        yield problem(
            "CANN's environment is not set: no ASCEND_HOME_PATH",
            "torch_npu does not load: libhccl.so cannot be found",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        )
    elif home is not None and not Path(home).is_dir():
        yield (problem if wanted else warning)(
            f"CANN's environment names {home}, which is not there",
            "its libraries cannot be found",
            "source the set_env.sh of the CANN that is installed",
        )
    elif home is not None:
        yield ok(f"CANN at {home}")


def visible_devices(s: Surroundings) -> Iterator[Finding]:
    """The devices that the processes of this node may see."""
    for device, name in (("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")):
        value = s.environ.get(name)
        if value is None:
            continue
        devices = [word.strip() for word in value.split(",") if word.strip()]
        here = s.probe.device == device
        if len(set(devices)) < len(devices):
            yield (problem if here else warning)(f"{name}={value} names one twice", "it is refused", f"unset {name}")
        elif here and len(devices) < s.processes:
            yield problem(
                f"{name}={value}: {len(devices)} devices for {s.processes} processes",
                "a process without a device fails: invalid device ordinal",
                f"unset {name}, or NPUS_PER_NODE={len(devices)}",
            )
        else:
            yield ok(f"{name}={value}")


def switches(s: Surroundings) -> Iterator[Finding]:
    """Switches of a search for faults that were left on."""
    left = [f"{name}={s.environ[name]}" for name, values in _SLOW.items() if s.environ.get(name) in values]
    if left:
        yield warning(
            ", ".join(left), "it slows every step", "unset " + " ".join(word.partition("=")[0] for word in left)
        )
    else:
        yield ok("no switch for finding faults is left on")


def internet(s: Surroundings) -> Iterator[Finding]:
    """Variables about downloads: a run makes none."""
    names = ("http_proxy", "https_proxy", "all_proxy", "HF_HUB_OFFLINE", "HF_ENDPOINT")
    given = sorted(name for name in s.environ if name in names or name.lower() in names[:3])
    words = f"{', '.join(given)} set; " if given else ""
    yield ok(f"{words}a run downloads nothing (only --wandb-project talks to a server)")


CHECKS: tuple[Check, ...] = (
    suite,
    timeouts,
    connections,
    allocator,
    ascend,
    visible_devices,
    switches,
    internet,
)
