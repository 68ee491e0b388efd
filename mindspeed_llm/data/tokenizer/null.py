"""Ids without text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NullTokenizer:
    """Ids without text, for mock data: ids ``0 .. n-1`` and the end-of-document id ``n``.

    Args:
        size: ``n``, Megatron's ``--vocab-size``.
    """

    size: int

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

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> ids written out with spaces."""
        return " ".join(str(token) for token in ids)
