"""What preparation and training ask of a tokenizer of text."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from mindspeed_llm.errors import DataError


class TextTokenizer(ABC):
    """Text -> ids, with the ids that have a role and an identity.

    Args:
        path: what the user named; shown in errors and kept in the manifest.
        vocab_size: one more than the largest id.
        special_ids: role -> id, under the names of Hugging Face (``eos_token``, ``pad_token``, ...).
    """

    def __init__(self, path: str, vocab_size: int, special_ids: Mapping[str, int]) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.special_ids = dict(special_ids)

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts -> ids of each."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text, special tokens included."""

    @abstractmethod
    def content(self) -> dict[str, object]:
        """All that decides the ids, as JSON; :attr:`hash` is made of it."""

    def encode(self, text: str) -> list[int]:
        """Text -> ids."""
        return self.encode_batch([text])[0]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Texts -> their ids end to end, and how many each has; both int32.

        A kind that has a quicker way than lists of Python numbers overrides this.
        """
        columns = self.encode_batch(texts)
        lengths = np.fromiter(map(len, columns), dtype=np.int32, count=len(columns))
        ids = np.fromiter(chain.from_iterable(columns), dtype=np.int32, count=int(lengths.sum(dtype=np.int64)))
        return ids, lengths

    @property
    def eod(self) -> int:
        """The end-of-document id, which is the EOS id.

        Raises:
            DataError: when the tokenizer's files name none.
        """
        if "eos_token" not in self.special_ids:
            raise DataError(
                "The tokenizer names no end-of-document token.",
                got=self.path,
                allowed="one in the model itself; or eos_token in tokenizer_config.json or special_tokens_map.json, "
                "eos_token_id in config.json",
                fix="the whole Hugging Face folder instead of a single file; --tiktoken-special-tokens for a rank file",
            )
        return self.special_ids["eos_token"]

    @property
    def pad(self) -> int | None:
        """The padding id, if the tokenizer names one."""
        return self.special_ids.get("pad_token")

    @cached_property
    def hash(self) -> str:
        """Identity: equal for tokenizers that give the same ids, however their files are laid out."""
        return self.hash_of(self.content())

    @staticmethod
    def hash_of(content: Mapping[str, object]) -> str:
        """The identity of a tokenizer of this :meth:`content`."""
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What megatron-core puts into the key of its index cache."""
        return OrderedDict({"class": "TextTokenizer", "hash": self.hash})
