"""What stands for ``torch.cuda`` when megatron-core runs on the CPU.

One device, one stream: work is done when a call returns, so streams and events have nothing to order.
"""

from __future__ import annotations

import contextlib
import resource
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

CPU = torch.device("cpu")


class Stream:
    """A stream that is always done. A context manager that may be entered again while entered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds between two events: none, as neither marks queued work."""
        return 0.0


class StreamContext:
    """``torch.cuda.stream``: a class, since megatron-core enters one context twice."""

    def __init__(self, stream: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@contextlib.contextmanager
def _device(_index: Any) -> Iterator[None]:
    yield


def _resident_peak(*_: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_now(*_: Any) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _nothing(*_: Any, **__: Any) -> None: ...


def _build() -> types.SimpleNamespace:
    stream = Stream()
    names: dict[str, Any] = {
        "current_device": lambda: CPU,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "device": _device,
        # megatron-core divides by the count and asserts on availability only where a GPU would be used.
        "device_count": lambda: 1,
        "is_available": lambda: False,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: (0, 0),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _manual_seed,
        "default_generators": defaultdict(lambda: torch.default_generator),
        "memory_allocated": _resident_now,
        "memory_reserved": _resident_now,
        "max_memory_allocated": _resident_peak,
        "max_memory_reserved": _resident_peak,
        "memory_stats": lambda *_: {},
        "OutOfMemoryError": torch.cuda.OutOfMemoryError,
        "CUDAGraph": torch.cuda.CUDAGraph,
        "amp": torch.cuda.amp,
        "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    }
    names |= dict.fromkeys(("set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect"), _nothing)
    for scalar in ("Float", "Double", "Half", "BFloat16", "Byte", "Int", "Long"):
        names[f"{scalar}Tensor"] = getattr(torch, f"{scalar}Tensor")
    namespace = types.SimpleNamespace(**names)
    namespace.random = namespace
    return namespace


NAMESPACE = _build()
