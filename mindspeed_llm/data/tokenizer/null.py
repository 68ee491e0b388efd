"""Ids without text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class NullTokenizer:
    """Ids without text, for mock data: ids ``0 .. n-1`` and the end-of-document id ``n``.

    Args:
        size: ``n``, Megatron's ``--vocab-size``.
    """

    size: int

    @property
    def path(self) -> str:
        """It lies nowhere; this is how a manifest names it."""
        return "NullTokenizer"

    @property
    def vocab_size(self) -> int:
        """Ids in all, the end of document included."""
        return self.size + 1

    @property
    def eod(self) -> int:
        """The end-of-document id."""
        return self.size

    @property
    def pad(self) -> int | None:
        """There is no padding id."""
        return None

    @property
    def special_ids(self) -> dict[str, int]:
        """Role -> id."""
        return {"eos_token": self.eod}

    @property
    def hash(self) -> str:
        """Identity: equal for tokenizers that give the same ids."""
        return f"null:{self.size}"

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What megatron-core puts into the key of its index cache."""
        return OrderedDict({"class": "NullTokenizer", "hash": self.hash})

    def encode(self, text: str) -> list[int]:
        """Ids written out with spaces -> ids."""
        return [int(word) for word in text.split()]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Texts of ids -> ids int32, end to end, and how many each text has: none where it holds anything else."""
        rows: list[list[int]] = []
        for text in texts:
            words = text.split()
            right = all(word.isdecimal() and int(word) < self.vocab_size for word in words)
            rows.append([int(word) for word in words] if right else [])
        return np.array([number for row in rows for number in row], np.int32), np.array([*map(len, rows)], np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> ids written out with spaces."""
        return " ".join(str(token) for token in ids)
