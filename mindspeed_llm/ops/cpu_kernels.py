"""The compiled module of C++ CPU kernels: whether it is here, and how tensors are handed to it."""

from __future__ import annotations

import functools
import importlib
import math
import platform
from types import ModuleType

import torch  # first: the kernels then use the OpenMP runtime that torch brought
from torch import Tensor

_MODULE = "mindspeed_llm.ops._cpu_kernels"
_INTERFACE = 1
_BUILD = "python setup.py build_ext --inplace"

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")

RowLayout = tuple[int, int, int, int, int]
"""``(outer, inner, outer_stride, inner_stride, width)``, strides in elements."""


@functools.cache
def _load() -> ModuleType | str:
    """The module, or why there is none."""
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name != _MODULE:
            raise
        return f"the C++ kernels are not built (`{_BUILD}` builds them; it needs g++, Python's headers and pybind11)"
    except ImportError as error:
        return f"the C++ kernels do not load: {error}"
    if module.INTERFACE != _INTERFACE:
        return (
            f"the C++ kernels are built from other sources (interface {module.INTERFACE}, not {_INTERFACE}): `{_BUILD}`"
        )
    return module


def unavailable() -> str | None:
    """Why the kernels cannot run here, or None."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def module() -> ModuleType:
    """The compiled module.

    Raises:
        RuntimeError: there is none; :func:`unavailable` says so beforehand.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded


def best_level() -> int:
    """Index into :data:`LEVELS` of the widest instruction set of this processor."""
    return int(module().BEST_LEVEL)


def describe() -> str:
    """For the start-up print: ``avx512_bf16 on x86_64``."""
    return f"{LEVELS[best_level()]} on {platform.machine()}"


def with_row_layout(x: Tensor) -> tuple[Tensor, RowLayout]:
    """``x: [..., h]`` and how its rows lie; a contiguous copy where two strides cannot say it."""
    width = x.shape[-1]
    layout = None if x.is_contiguous() else _strided_layout(x)
    if layout is None:
        return x.contiguous(), (1, math.prod(x.shape[:-1]), 0, width, width)
    return x, layout


def _strided_layout(x: Tensor) -> RowLayout | None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    dims: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 2:
        return None
    (outer, outer_stride), (inner, inner_stride) = [(1, 0)] * (2 - len(dims)) + dims
    return (outer, inner, outer_stride, inner_stride, x.shape[-1])
