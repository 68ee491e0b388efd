"""What a side left on disk, as whole tensors under the names of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mindspeed_llm.errors import ConversionError
from mindspeed_llm.models.family import Replicated
from mindspeed_llm.tools.compare.points import ROTARY, Point
from mindspeed_llm.tools.compare.sides import Side

Copies = list[Tensor]
"""One whole tensor; of one that is not cut, that of each tensor-parallel rank, since they may differ."""


class Captured:
    """The tensors of one side.

    Args:
        side: what ran.
        folder: what :class:`~mindspeed_llm.tools.compare.recorder.Recorder` left.
        length: tokens in each sequence.
        stack: closes the files.
    """

    def __init__(self, side: Side, folder: Path, length: int, stack: ExitStack) -> None:
        self.side = side
        self._length = length
        self._gradients = folder / "gradients"
        self._ranks = [
            (json.loads((folder / f"rank-{rank}.json").read_text()), self._open(folder, rank, stack))
            for rank in range(side.world)
        ]
        self._keys = [set(file.keys()) for _, file in self._ranks]
        self._values = side.values

    @staticmethod
    def _open(folder: Path, rank: int, stack: ExitStack) -> Any:
        return stack.enter_context(safe_open(folder / f"rank-{rank}.safetensors", framework="pt"))

    @cached_property
    def order(self) -> list[str]:
        """Names in the order of the forward pass: of our modules, or of transformers'."""
        placed = sorted(
            (stage, place, name)
            for facts, _ in self._ranks
            for place, (stage, name) in enumerate(facts["order"])
            if facts["tp"] == facts["dp"] == 0
        )
        return list(dict.fromkeys(name for _, _, name in placed))

    @property
    def loss(self) -> float:
        """Mean over all tokens, in nats."""
        parts = {facts["dp"]: facts["loss"] for facts, _ in self._ranks if facts["loss"]}
        return sum(total for total, _ in parts.values()) / sum(count for _, count in parts.values())

    def tensors(self, kind: str, point: Point) -> dict[str, Copies]:
        """The tensors ``[b, s, f]`` of ``point`` by transformers' names; none where there is nothing to compare.

        Args:
            kind: ``forward`` or ``backward``.
            point: whose.
        """
        if self.side.kind == "hf":
            return {name: [part] for name in point.hf if (part := self._of_hf(kind, name)) is not None}
        try:
            return self._of_ours(kind, point)
        except ConversionError:
            return {}

    def _of_hf(self, kind: str, name: str) -> Tensor | None:
        key = f"{kind} {name} 0"
        # A module that runs twice in a pass has no one output.
        if key not in self._keys[0] or f"{kind} {name} 1" in self._keys[0]:
            return None
        tensor: Tensor = self._ranks[0][1].get_tensor(key)
        if tensor.dim() == 4:
            # Heads come before the sequence or after it; where both are as long, nothing tells.
            places = [axis for axis in (1, 2) if tensor.shape[axis] == self._length]
            if len(places) != 1:
                return None
            tensor = tensor.movedim(places[0], 1)
        return tensor.flatten(2)[:1] if name in ROTARY.hf else tensor.flatten(2)

    def _of_ours(self, kind: str, point: Point) -> dict[str, Copies]:
        found: dict[str, list[Copies]] = {}
        for parts in self._micro_batches(kind, point):
            cut = not isinstance(point.shard, Replicated)
            for copy, held in enumerate([parts] if cut else [[part] for part in parts]):
                for name, tensor in point.whole(held, self._values).items():
                    found.setdefault(name, []).append([]) if copy == 0 else None
                    found[name][-1].append(tensor)
        return {name: [torch.cat(copy) for copy in zip(*each, strict=True)] for name, each in found.items()}

    def _micro_batches(self, kind: str, point: Point) -> Iterator[list[Tensor]]:
        """For each micro-batch, in the order of the sequences, ``[b, s, f]`` of each tensor-parallel rank."""
        first = f"{kind} {point.ours} 0"
        holders = [rank for rank, keys in zip(self._ranks, self._keys, strict=True) if first in keys]
        if not holders:
            return
        count = 1 if point == ROTARY else holders[0][0]["micro_batches"]
        replicas = sorted({facts["dp"] for facts, _ in holders})[: 1 if point == ROTARY else None]
        for number in range(count):
            for replica in replicas:
                # Where several stages have the module, the last of them stands for all.
                group = {facts["tp"]: (facts, file) for facts, file in holders if facts["dp"] == replica}
                yield self._join(
                    [
                        file.get_tensor(f"{kind} {point.ours} {number}") * (facts["scale"] if kind == "backward" else 1)
                        for _, (facts, file) in sorted(group.items())
                    ]
                )

    def _join(self, parts: list[Tensor]) -> list[Tensor]:
        """``[s, b, ...]`` of each rank to ``[b, s, ...]``, whole in the sequence and in heads ``[s, b, n, d]``."""
        if parts[0].shape[0] * len(parts) == self._length:
            parts = [torch.cat(parts)]
        elif parts[0].dim() == 4:
            parts = [torch.cat(parts, dim=2)]
        return [part.transpose(0, 1) for part in parts]

    def gradients(self) -> dict[str, Path]:
        """The file of each parameter's gradient, by transformers' name."""
        return {path.stem: path for path in sorted(self._gradients.iterdir())}
