"""Lets megatron-core run off CUDA without changing torch.

megatron-core says ``torch.cuda`` and ``device="cuda"`` in hundreds of places. Instead of patching torch for the whole
process, every ``megatron.core`` module gets its own ``torch``: a copy of torch's namespace in which ``cuda`` and the
factories answer for the real device. An import hook does the same for modules that are loaded later. On CUDA there is
no seam.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_llm.device.base import Device, current

PREFIX = "megatron.core"

_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)


class _TorchFor(types.ModuleType):
    """torch as megatron-core sees it on ``device``; what is not there yet is fetched from torch."""

    def __init__(self, device: Device) -> None:
        super().__init__("torch", torch.__doc__)
        self.__dict__.update({name: value for name, value in vars(torch).items() if name not in self.__dict__})
        self.__dict__.update(_overrides(device))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _overrides(device: Device) -> dict[str, Any]:
    here = device.torch_device

    def placed(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def place(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = here
            if here.type == "cpu":
                kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return place

    class DeviceMeta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.device)

    class MappedDevice(metaclass=DeviceMeta):
        def __new__(cls, kind: Any = "cuda", *index: Any) -> torch.device:  # type: ignore[misc]
            return here if _is_cuda(kind) else torch.device(kind, *index)

    class MappedAutocast(torch.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(here.type if device_type == "cuda" else device_type, *args, **kwargs)

    return {
        "cuda": device.namespace,
        "device": MappedDevice,
        "autocast": MappedAutocast,
        **{name: placed(getattr(torch, name)) for name in _FACTORIES},
    }


def _rebind_random(module: types.ModuleType, device: Device) -> None:
    """``tensor_parallel.random`` imports torch.cuda's lazy calls by name: made when CUDA starts, which it never does.

    On the CPU, moreover, "the CPU's state" is not a second one beside the device's: the tracker forks torch's CPU
    generator itself, so megatron-core's check that a fork left the *CPU* state alone would always fail, and the CPU
    half of what recomputation saves is the device half.
    """
    proxy = _TorchFor(device)
    if device.type == "cpu":
        nothing = torch.zeros(1, dtype=torch.uint8)
        proxy.__dict__["get_rng_state"] = lambda: nothing
        proxy.__dict__["set_rng_state"] = lambda state: None
    module.__dict__.update(torch=proxy, _lazy_call=lambda call: call(), _lazy_init=lambda: None)


class _Rebinder:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.proxy = _TorchFor(device)

    def __call__(self, module: types.ModuleType) -> None:
        """Give ``module`` the device's torch; without a compiler no function is compiled at its first call."""
        if vars(module).get("torch") is torch:
            module.__dict__["torch"] = self.proxy
        if module.__name__ == f"{PREFIX}.jit":
            module.__dict__["disable_jit_fuser"]()
        elif module.__name__ == f"{PREFIX}.tensor_parallel.random":
            _rebind_random(module, self.device)


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, rebind: _Rebinder) -> None:
        self.inner = inner
        self.rebind = rebind

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self.inner.exec_module(module)
        self.rebind(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, rebind: _Rebinder) -> None:
        self.rebind = rebind

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PREFIX and not name.startswith(PREFIX + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.abc.Loader) and spec.origin != "namespace":
            spec.loader = _Loader(spec.loader, self.rebind)
        return spec


def install() -> None:
    """Install the seam for this process's device; a second call does nothing, on CUDA neither does the first."""
    device = current()
    if device.type == "cuda" or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    rebind = _Rebinder(device)
    for name, module in list(sys.modules.items()):
        if name == PREFIX or name.startswith(PREFIX + "."):
            rebind(module)
    sys.meta_path.insert(0, _Finder(rebind))
