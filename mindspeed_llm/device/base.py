"""What the suite asks of a device, and the choice of the one to use."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_llm.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """A kind of device, bound to this process's local rank.

    Attributes:
        type: ``cpu``, ``cuda`` or ``npu``: torch's own name.
        backend: the torch.distributed backend that moves its tensors.
        index: the local rank; meaningless on the CPU.
        namespace: ``torch.cuda`` or what stands for it.
    """

    type: str
    backend: str
    index: int
    namespace: Any

    @property
    def torch_device(self) -> torch.device:
        """The torch device of this process's tensors."""
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    @property
    def tensor_type_prefix(self) -> str:
        """What ``Tensor.type()`` puts before ``FloatTensor`` for tensors that live here."""
        return "torch." if self.type == "cpu" else f"torch.{self.type}."

    def bind(self) -> None:
        """Make this the process's device."""
        if self.type != "cpu":
            self.namespace.set_device(self.index)

    def synchronize(self) -> None:
        """Wait for the work queued on the device."""
        self.namespace.synchronize()

    def max_memory_bytes(self) -> int:
        """The most memory this process has held: of the device, or resident on the CPU."""
        return int(self.namespace.max_memory_allocated())

    def manual_seed(self, seed: int) -> None:
        """Seed the device's default generator."""
        self.namespace.manual_seed(seed)


def _npu_available() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    importlib.import_module("torch_npu")
    return bool(torch.npu.is_available())  # pyright: ignore[reportAttributeAccessIssue]


_current: Device | None = None


def select(kind: str | None = None) -> Device:
    """Choose the process's device, once: ``kind``, or else the NPU, the GPU or the CPU, the first that is there.

    Raises:
        ConfigError: ``kind`` is unknown or not there.
    """
    global _current
    available = {"npu": _npu_available, "cuda": torch.cuda.is_available, "cpu": lambda: True}
    if kind is None:
        kind = next(name for name, there in available.items() if there())
    if kind not in available or not available[kind]():
        raise ConfigError(
            f"device {kind} is not available in this process",
            got=kind,
            allowed=[name for name, there in available.items() if there()],
            fix="set MINDSPEED_LLM_DEVICE to one of these or leave it unset",
        )
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cpu":
        from mindspeed_llm.device import cpu

        _current = Device("cpu", "gloo", 0, cpu.NAMESPACE)
    elif kind == "cuda":
        _current = Device("cuda", "nccl", index, torch.cuda)
    else:
        _current = Device("npu", "hccl", index, torch.npu)  # pyright: ignore[reportAttributeAccessIssue]
    return _current


def current() -> Device:
    """The process's device, chosen at the first call; ``MINDSPEED_LLM_DEVICE`` names one."""
    return _current or select(os.environ.get("MINDSPEED_LLM_DEVICE"))
