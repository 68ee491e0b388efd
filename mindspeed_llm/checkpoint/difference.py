"""How far two checkpoints are apart, whatever the layouts in which they were saved."""

# pyright: basic, reportMissingTypeStubs=false
# What a save says about itself is plain dictionaries.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mindspeed_llm.checkpoint.summary import optimizer_form
from mindspeed_llm.checkpoint.survey import Box, Checkpoint, HfModel, Save
from mindspeed_llm.errors import CheckpointError

_BLOCK = 2**20
"""Elements that are compared at a time, in float64."""


@dataclass
class TensorDifference:
    """What two tensors of one name have in common.

    Args:
        name: of both.
        numel: elements that were compared.
        same: of these, those with the same bits.
        beyond: those further apart than ``atol + rtol |b|``, or a NaN on one side alone.
        max_abs: the largest ``|a - b|``; infinite where one side alone is a NaN.
        max_rel: the largest ``|a - b| / |b|``.
        reason: why they cannot be equal: shapes or dtypes.
        note: what was left out of the comparison.
    """

    name: str
    numel: int = 0
    same: int = 0
    beyond: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    reason: str = ""
    note: str = ""


@dataclass
class Difference:
    """Two checkpoints, tensor by tensor."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)

    def differing(self, *, exact: bool) -> list[TensorDifference]:
        """The tensors that are not equal: not bit for bit, or beyond the tolerance."""
        return [t for t in self.tensors if t.reason or (t.same < t.numel if exact else t.beyond)]


def compare(
    a: Save | HfModel, b: Save | HfModel, *, group: str | None = None, atol: float = 0.0, rtol: float = 0.0
) -> Difference:
    """Compare all tensors, in memory near that of the largest piece.

    Args:
        a: one checkpoint.
        b: the other; relative differences are relative to it.
        group: ``weights`` or ``optimizer`` alone.
        atol: absolute tolerance.
        rtol: relative tolerance.

    Raises:
        CheckpointError: the two are not of one kind, their optimizer states are cut in ways that cannot be compared, or
            something cannot be read.
    """
    if type(a) is not type(b):
        raise CheckpointError(
            "a save and a Hugging Face folder have other tensors",
            got=f"{a.folder}, {b.folder}",
            fix="compare with the export of the save (--save-hf)",
        )
    rows: dict[str, tuple[int, int]] = {}
    if isinstance(a, Save) and isinstance(b, Save):
        one, two = a.common(), b.common()
        if group != "weights":
            _require_comparable_optimizers(one, two)
        rows = {"a": _vocabulary(one), "b": _vocabulary(two)}
    names_a, names_b = (
        {name for name, stored in side.tensors.items() if group in (None, stored.group)} for side in (a, b)
    )
    found = Difference(sorted(names_a - names_b), sorted(names_b - names_a))
    for name in sorted(names_a & names_b):
        found.tensors.append(_compare_tensor(name, a, b, rows, atol, rtol))
    return found


def _require_comparable_optimizers(a: dict[str, Any], b: dict[str, Any]) -> None:
    forms = optimizer_form(a), optimizer_form(b)
    if None in forms:
        return
    layouts = a.get("layout"), b.get("layout")
    if forms[0] != forms[1]:
        got = f"{forms[0]}, {forms[1]}"
    elif forms[0] == "dp_reshardable" and layouts[0] != layouts[1]:
        got = f"dp_reshardable of {layouts[0]}, {layouts[1]}"
    else:
        return
    raise CheckpointError(
        "the optimizer states of the two saves are cut differently",
        got=got,
        allowed="one form; dp_reshardable at one tensor and pipeline layout",
        fix="--only weights",
    )


def _vocabulary(common: dict[str, Any]) -> tuple[int, int]:
    """Rows of the vocabulary, and with the padding that the tensor-parallel layout asked for."""
    model = common.get("config", {}).get("model", {})
    return model.get("vocab_size") or 0, model.get("padded_vocab_size") or 0


def _compare_tensor(
    name: str, a: Checkpoint, b: Checkpoint, rows: dict[str, tuple[int, int]], atol: float, rtol: float
) -> TensorDifference:
    one, two = a.tensors[name], b.tensors[name]
    found = TensorDifference(name)
    shape = one.shape
    if one.shape != two.shape:
        cut = _unpadded(one.shape, two.shape, rows)
        if cut is None:
            found.reason = f"shape {one.shape}, {two.shape}"
            return found
        shape = cut
        found.note = f"the first {cut[0]} rows, without the padding of the vocabulary"
    if one.dtype != two.dtype:
        found.reason = f"dtype {one.dtype}, {two.dtype}".replace("torch.", "")
    # Boxes of the side that has fewer: the smaller pieces of the other are then read once.
    pieces = min(one, two, key=lambda stored: len(stored.pieces))
    for box in [_clip(piece.box, shape) for piece in pieces.pieces if not pieces.is_padding(piece)]:
        if 0 not in box[1]:
            _compare_values(found, a.read(name, box), b.read(name, box), atol, rtol)
    return found


def _unpadded(a: tuple[int, ...], b: tuple[int, ...], rows: dict[str, tuple[int, int]]) -> tuple[int, ...] | None:
    """The shape of both without vocabulary padding, where that is all in which they differ."""
    if not rows or a[1:] != b[1:] or not a or not b:
        return None
    (vocab, padded_a), (vocab_b, padded_b) = rows["a"], rows["b"]
    if vocab and vocab == vocab_b and (a[0], b[0]) == (padded_a, padded_b):
        return (vocab, *a[1:])
    return None


def _clip(box: Box, shape: tuple[int, ...]) -> Box:
    ends = [min(offset + size, end) for offset, size, end in zip(*box, shape, strict=True)]
    return box[0], tuple(max(0, end - offset) for offset, end in zip(box[0], ends, strict=True))


def _compare_values(found: TensorDifference, a: Tensor, b: Tensor, atol: float, rtol: float) -> None:
    found.numel += a.numel()
    for x, y in _blocks(a, b):
        if x.dtype == y.dtype:
            # As bytes, since every dtype can be seen so.
            size = x.dtype.itemsize
            found.same += int((x.view(torch.uint8) == y.view(torch.uint8)).view(-1, size).all(dim=1).sum())
        x, y = x.double(), y.double()
        # Equal infinities have no difference; a NaN has none to a NaN, and an infinite one to anything else.
        equal = (x == y) | (x.isnan() & y.isnan())
        apart = torch.where(equal, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        found.beyond += int((apart > atol + rtol * y.abs().nan_to_num(nan=0.0)).sum())
        found.max_abs = max(found.max_abs, float(apart.max()))
        relative = torch.where(apart == 0, 0.0, apart / y.abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        found.max_rel = max(found.max_rel, float(relative.max()))


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(a.reshape(-1).split(_BLOCK), b.reshape(-1).split(_BLOCK), strict=True)
