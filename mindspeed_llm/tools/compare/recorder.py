"""Records what chosen modules give, and the gradients that come back to them, and leaves it on disk.

A side's folder gets ``rank-N.safetensors`` with each recorded tensor (``forward NAME`` or ``backward NAME``, then the
number of the micro-batch), ``rank-N.json`` about them, and ``gradients/NAME.safetensors`` for each parameter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mindspeed_llm.tools.compare.points import ROTARY

INPUT = "input of "


@dataclass(frozen=True)
class RankFacts:
    """What is to know of a rank's tensors.

    Attributes:
        tp: place among the ranks that hold parts of a tensor; likewise ``dp`` among replicas.
        order: names in the order of the forward pass, with the stage of each.
        micro_batches: that this rank took.
        scale: of the gradients of what modules give, to be multiplied with.
        loss: sum over this rank's tokens in nats and their number, or None where the last stage is elsewhere.
    """

    tp: int
    dp: int
    order: list[tuple[int, str]]
    micro_batches: int
    scale: float
    loss: tuple[float, float] | None


class Recorder:
    """Hooks on modules; leaving the ``with`` block takes them off.

    Attributes:
        tensors: ``forward NAME`` and ``backward NAME`` to one tensor for each micro-batch, on the CPU.
        order: names in the order in which they were first complete, with the stage of their module.

    Args:
        folder: of the side. ``progress-N`` in it always says what was recorded last, for whoever finds the process
            stuck.
        rank: number of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        (folder / "gradients").mkdir(parents=True, exist_ok=True)
        self.tensors: dict[str, list[Tensor]] = {}
        self.order: list[tuple[int, str]] = []
        self._progress = os.open(folder / f"progress-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        os.close(self._progress)

    def watch(self, modules: Iterable[tuple[str, nn.Module]], wanted: set[str], stage: int = 0) -> None:
        """Record those of ``modules`` whose name, or ``input of`` it, is wanted.

        Args:
            modules: with their names in the whole model.
            wanted: names of points.
            stage: place of the modules in the pipeline.
        """
        for name, module in modules:
            if name in wanted:
                self._handles.append(module.register_forward_hook(self._on_output(name, stage)))
            if INPUT + name in wanted:
                self._handles.append(module.register_forward_pre_hook(self._on_input(INPUT + name, stage)))

    def save_gradient(self, name: str, gradient: Tensor) -> None:
        """Write the gradient of the parameter that transformers calls ``name``."""
        path = self._folder / "gradients" / f"{name}.safetensors"
        save_file({"gradient": gradient.detach().float().cpu().contiguous()}, path)

    def save(self, facts: RankFacts) -> None:
        """Write what was recorded."""
        numbered = {f"{name} {number}": t for name, each in self.tensors.items() for number, t in enumerate(each)}
        save_file(numbered, self._folder / f"rank-{self._rank}.safetensors")
        (self._folder / f"rank-{self._rank}.json").write_text(json.dumps(asdict(facts)))

    def _on_output(self, name: str, stage: int) -> Any:
        def record(module: nn.Module, _args: Any, output: Any) -> None:
            read = _rotation if name in (ROTARY.ours, *ROTARY.hf) else _value
            self.record(name, stage, *read(module, output))

        return record

    def _on_input(self, name: str, stage: int) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.record(name, stage, *_value(module, args[0]))

        return record

    def record(self, name: str, stage: int, tensor: Tensor, value: Tensor) -> None:
        """Keep ``value`` now, and the gradient of ``tensor`` when it comes."""
        # Within a backward pass, modules run again to recompute what they gave.
        if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportAttributeAccessIssue]
            if f"forward {name}" not in self.tensors:
                self.order.append((stage, name))
            self._keep(f"forward {name}", value)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._keep(f"backward {name}", gradient))

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.tensors.setdefault(name, []).append(tensor.detach().to("cpu", copy=True).contiguous())
        os.pwrite(self._progress, f"{name:<200}".encode(), 0)


def _value(_module: nn.Module, given: Any) -> tuple[Tensor, Tensor]:
    """The tensor that carries the gradient, and what is compared."""
    first, *others = given if isinstance(given, tuple) else (given,)
    second = others[0] if others else None
    if isinstance(second, Tensor) and second.dim() == 1 and second.shape[0] == first.shape[-1]:
        # megatron-core hands a bias on, to be added together with the residual.
        return first, first.detach() + second.detach()
    return first, first


def _rotation(module: nn.Module, given: Any) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[..., pairs of channels]``, which transformers gives for each channel, scaled, and of which
    megatron-core gives the angles ``[s, 1, 1, channels]``."""
    if isinstance(given, tuple):
        cosines, sines = given
        scale: float = getattr(module, "attention_scaling", 1.0)  # pyright: ignore[reportAssignmentType]
        halves = [part[..., : part.shape[-1] // 2] for part in (cosines, sines)]
        return cosines, torch.cat(halves, dim=-1) / scale
    pairs = given.shape[-1] // 2
    angles = given.squeeze(-2)
    angles = angles[..., ::2] if getattr(module, "rotary_interleaved", False) else angles[..., :pairs]
    return given, torch.cat([angles.cos(), angles.sin()], dim=-1)
