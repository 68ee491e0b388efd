"""Pipelines of the tokenizers library: a ``tokenizer.json``, GPT-2's two files, BERT's word pieces.

The ids are those of ``AutoTokenizer(...)(text).input_ids``: special tokens that the tokenizer itself adds (Llama's BOS)
are kept, as MindSpeed-LLM's ``PretrainedFromHF`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_llm.data.byte_bpe import ByteBpe
from mindspeed_llm.data.tokenizer.base import TextTokenizer
from mindspeed_llm.data.tokenizer.special import special_ids
from mindspeed_llm.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


class FastTokenizer(TextTokenizer):
    """A pipeline with the special tokens that the files beside it name.

    Args:
        path: as :class:`TextTokenizer`.
        backend: the pipeline.
        special_ids: as :class:`TextTokenizer`.
    """

    def __init__(self, path: str, backend: RustTokenizer, special_ids: Mapping[str, int]) -> None:
        # ``len(AutoTokenizer)`` for a vocabulary without holes.
        super().__init__(path, max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1, special_ids)
        self.backend = backend

    def content(self) -> dict[str, object]:
        """The parts of the pipeline.

        transformers' ``save_pretrained`` writes an empty post-processor where there was none, and "" for null: of the
        first only what it adds counts, of the model only what is set.
        """
        return self._content(json.loads(self.backend.to_str()))

    def _content(self, parts: Mapping[str, Any]) -> dict[str, object]:
        content: dict[str, object] = {name: parts[name] for name in ("added_tokens", "normalizer", "pre_tokenizer")}
        content["model"] = {name: value for name, value in parts["model"].items() if value}
        content["framed"] = self._framed()
        return content

    def _framed(self) -> list[int]:
        """A text with what is put around it; of a vocabulary that has no tokens for it, that alone."""
        try:
            return self.encode("a")
        except DataError:
            return self.encode("")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts -> ids of each.

        Raises:
            DataError: the model has no tokens for a text, and no unknown token.
        """
        try:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(texts)]
        except Exception as error:  # the library has no class of its own for a text that the model has no tokens for
            raise DataError("The tokenizer cannot encode a text.", got=f"{self.path}: {error}") from error

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`TextTokenizer.encode_flat`; by :mod:`mindspeed_llm.data.byte_bpe` where that knows the pipeline."""
        quick = self._byte_bpe
        return super().encode_flat(texts) if quick is None else quick.encode_flat(texts)

    @cached_property
    def _byte_bpe(self) -> ByteBpe | None:
        """Built for the first corpus: a training run encodes none."""
        parts = json.loads(self.backend.to_str())
        # Whoever encodes also writes a manifest, and taking a pipeline apart once is enough.
        self.hash = self.hash_of(self._content(parts))
        return ByteBpe.from_json(parts, self.backend)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_byte_bpe"}

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


def load_fast(file: Path, shown: str) -> FastTokenizer:
    """Read a ``tokenizer.json`` with whatever lies beside it.

    Args:
        file: the ``tokenizer.json``.
        shown: the path as the user gave it.

    Raises:
        DataError: when it cannot be read.
    """
    from tokenizers import Tokenizer as RustTokenizer

    try:
        backend = RustTokenizer.from_file(str(file))
    except Exception as error:
        raise DataError("The tokenizer file cannot be read.", got=f"{file}: {error}") from error
    # A saved tokenizer may carry the padding and truncation of its last use; neither belongs into a corpus.
    backend.no_padding()
    backend.no_truncation()
    return FastTokenizer(shown, backend, special_ids(file.parent, backend.token_to_id))
