"""RMS norm by the C++ kernels of ``csrc/cpu/rms_norm.cpp``, as torch.library ops with fake and autograd.

``torch.ops.mindspeed_llm.rms_norm`` returns ``(y, rstd)``; :func:`rms_norm` is what modules call. Results do not depend
on the number of threads or on the instruction set.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mindspeed_llm.ops import cpu_kernels
from mindspeed_llm.ops.cpu_kernels import unavailable

__all__ = ["backward", "forward", "rms_norm", "unavailable"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`mindspeed_llm.ops.rms_norm.reference.rms_norm`.

    Args:
        x: ``[..., h]`` in float32, bfloat16 or float16; read in place when its last dimension is adjacent.
        weight: ``[h]`` in x's dtype.
        eps: added to the mean square.

    Returns:
        ``[..., h]``, contiguous.

    Raises:
        TypeError: dtypes other than these, or not equal.
        ValueError: weight's shape is not ``[h]``.
    """
    return torch.ops.mindspeed_llm.rms_norm.default(x, weight, eps)[0]


def forward(x: Tensor, weight: Tensor, eps: float, level: int | None = None) -> tuple[Tensor, Tensor]:
    """``y: [..., h]`` and ``rstd: [rows]`` (float32); ``level`` indexes ``cpu_kernels.LEVELS``, the best by default."""
    _check(x, weight)
    y = torch.empty(x.shape, dtype=x.dtype)
    x, rows = cpu_kernels.with_row_layout(x)
    rstd = torch.empty(_rows(x), dtype=torch.float32)
    if y.numel():
        kernels = cpu_kernels.module()
        weight = weight.contiguous()
        kernels.rms_norm_forward(
            cpu_kernels.DTYPE_CODES[x.dtype],
            rows,
            x.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            rstd.data_ptr(),
            eps,
            torch.get_num_threads(),
            kernels.BEST_LEVEL if level is None else level,
        )
    return y, rstd


def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, level: int | None = None) -> tuple[Tensor, Tensor]:
    """``dx: [..., h]`` and ``dw: [h]`` of the forward's arguments, from ``dy: [..., h]`` and its ``rstd``."""
    _check(x, weight)
    if dy.shape != x.shape or dy.dtype != x.dtype or rstd.dtype != torch.float32 or rstd.shape != (_rows(x),):
        raise ValueError("rms_norm_backward takes dy like x, and the rstd of the forward")
    dx = torch.empty(x.shape, dtype=x.dtype)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    dw = torch.empty(weight.shape, dtype=weight.dtype)
    x, rows = cpu_kernels.with_row_layout(x)
    dy, weight, rstd = dy.contiguous(), weight.contiguous(), rstd.contiguous()
    kernels = cpu_kernels.module()
    kernels.rms_norm_backward(
        cpu_kernels.DTYPE_CODES[x.dtype],
        rows,
        dy.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        rstd.data_ptr(),
        dx.data_ptr(),
        dw.data_ptr(),
        torch.get_num_threads(),
        kernels.BEST_LEVEL if level is None else level,
    )
    return dx, dw


def _check(x: Tensor, weight: Tensor) -> None:
    # The kernels read addresses: what is let through here must be safe.
    if x.dtype not in cpu_kernels.DTYPE_CODES or weight.dtype != x.dtype:
        raise TypeError(
            f"rms_norm takes x and weight in one of float32, bfloat16, float16; got {x.dtype}, {weight.dtype}"
        )
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm takes weight: [h] for x: [..., h]; got {tuple(weight.shape)} for {tuple(x.shape)}")


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _fake_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((_rows(x),), dtype=torch.float32)


def _fake_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _gradients(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
    dx, dw = torch.ops.mindspeed_llm.rms_norm_backward.default(dy, *ctx.saved_tensors)
    return dx, dw, None


# define + impl cost 10 us less per call than the custom_op decorator, which checks for aliases each time.
_library = torch.library.Library("mindspeed_llm", "FRAGMENT")
_library.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)")
_library.define("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor dx, Tensor dw)")
_library.impl("rms_norm", forward, "CPU")
_library.impl("rms_norm_backward", backward, "CPU")
torch.library.register_fake("mindspeed_llm::rms_norm", _fake_forward, lib=_library)
torch.library.register_fake("mindspeed_llm::rms_norm_backward", _fake_backward, lib=_library)
torch.library.register_autograd("mindspeed_llm::rms_norm", _gradients, setup_context=_save, lib=_library)
