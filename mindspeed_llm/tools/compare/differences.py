"""How far the tensors of two sides are apart, in the order in which they were computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.tools.compare.captured import Captured, Copies
from mindspeed_llm.tools.compare.points import Point, points
from mindspeed_llm.tools.compare.sides import Side


@dataclass(frozen=True)
class Difference:
    """One tensor on both sides.

    Attributes:
        ours: our name of the module, or of none where a parameter is compared.
        hf: transformers' name of it.
        norm_a: L2 norm on side A.
        norm_b: on side B.
        max_abs: largest difference of an element.
        relative_rms: ``rms(A - B) / rms(B)``.
    """

    ours: str
    hf: str
    norm_a: float
    norm_b: float
    max_abs: float
    relative_rms: float

    def beyond(self, tolerance: float) -> bool:
        """Whether the sides differ; where a NaN is, they do."""
        return not self.relative_rms <= tolerance


@dataclass
class Comparison:
    """What was compared, each list in the order of computation: a gradient that reaches a module's output comes before
    those of the modules that ran earlier."""

    forward: list[Difference] = field(default_factory=list)
    backward: list[Difference] = field(default_factory=list)
    parameters: list[Difference] = field(default_factory=list)
    loss: tuple[float, float] = (math.nan, math.nan)
    left_out: list[str] = field(default_factory=list)
    """Modules of one side only, or with other shapes."""

    def differs(self, tolerance: float) -> bool:
        """Whether any tensor does."""
        return any(row.beyond(tolerance) for row in (*self.forward, *self.backward, *self.parameters))


def measure(ours: str, hf: str, a: Copies, b: Copies) -> Difference:
    """The largest difference between a copy of A and one of B."""
    pairs = [(one.double(), other.double()) for one in a for other in b]
    return max((_measure(ours, hf, one, other) for one, other in pairs), key=_badness)


def _badness(difference: Difference) -> float:
    return math.inf if math.isnan(difference.relative_rms) else difference.relative_rms


def _measure(ours: str, hf: str, a: Tensor, b: Tensor) -> Difference:
    error, norm = (a - b).norm().item(), b.norm().item()
    relative = error / norm if norm else 0.0 if error == 0.0 else math.inf
    largest = (a - b).abs().max().item() if a.numel() else 0.0
    return Difference(ours, hf, a.norm().item(), norm, largest, relative)


def compare(a: Side, b: Side, folder_a: Path, folder_b: Path, length: int) -> Comparison:
    """Compare what both sides left in their folders.

    Args:
        a: one side.
        b: the other.
        folder_a: of A's tensors.
        folder_b: of B's.
        length: tokens in each sequence.

    Raises:
        ConversionError: the sides have no module in common.
    """
    with ExitStack() as stack:
        one, other = Captured(a, folder_a, length, stack), Captured(b, folder_b, length, stack)
        found = Comparison(loss=(one.loss, other.loss))
        at = _in_order(a, b, one, other)
        for kind, ordered in (("forward", at), ("backward", at[::-1])):
            rows: list[Difference] = getattr(found, kind)
            for point in ordered:
                rows += _rows(kind, point, one, other, found.left_out if kind == "forward" else [])
        if not found.forward:
            raise ConversionError("the two sides have no module in common", got=f"{a.text} and {b.text}")
        found.parameters = list(_parameters(one, other, found.left_out))
    return found


def _in_order(a: Side, b: Side, one: Captured, other: Captured) -> list[Point]:
    """The points of both models as they are computed; the order is ours, where a side is ours."""
    known = points(b.names) | points(a.names)
    ours = one if a.kind == "ours" else other if b.kind == "ours" else None
    if ours is not None:
        order = ours.order
    else:
        by_hf = {point.hf[-1]: point.ours for point in known.values()}
        order = [by_hf[name] for name in one.order if name in by_hf]
    return [known[name] for name in order]


def _rows(kind: str, point: Point, one: Captured, other: Captured, left_out: list[str]) -> Iterator[Difference]:
    a, b = one.tensors(kind, point), other.tensors(kind, point)
    for name in point.hf:
        if name not in a or name not in b:
            left_out.append(f"{point.ours} <-> {name}: on one side only")
        elif a[name][0].shape != b[name][0].shape:
            shapes = f"{list(a[name][0].shape)} and {list(b[name][0].shape)}"
            left_out.append(f"{point.ours} <-> {name}: shapes {shapes}")
        else:
            yield measure(point.ours, name, a[name], b[name])


def _parameters(one: Captured, other: Captured, left_out: list[str]) -> Iterator[Difference]:
    a, b = one.gradients(), other.gradients()
    left_out += [f"gradient of {name}: on one side only" for name in sorted(a.keys() ^ b.keys())]
    for name in sorted(a.keys() & b.keys()):
        yield measure("", name, [_read(a[name])], [_read(b[name])])


def _read(path: Path) -> torch.Tensor:
    with safe_open(path, framework="pt") as opened:
        file: Any = opened
        return file.get_tensor("gradient")
