"""Tokenizers as preparation and training need them: ids, special ids and an identity. No torch, no transformers.

The ids are those of ``AutoTokenizer(...)(text).input_ids``: special tokens that the tokenizer itself adds (Llama's BOS)
are kept, as MindSpeed-LLM's ``PretrainedFromHF`` and Megatron's ``HuggingFaceTokenizer`` do.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mindspeed_llm.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

HF_TYPES = ("PretrainedFromHF", "HuggingFaceTokenizer")
NULL_TYPE = "NullTokenizer"
TOKENIZER_TYPES = (*HF_TYPES, NULL_TYPE)
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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


@dataclass(frozen=True)
class TextTokenizer:
    """A ``tokenizer.json`` with the special tokens that the files beside it name.

    Build one with :func:`load_tokenizer`.
    """

    path: str
    backend: RustTokenizer
    special_ids: dict[str, int] = field(default_factory=dict)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, which is ``len(AutoTokenizer)`` for a vocabulary without holes."""
        vocab = self.backend.get_vocab(with_added_tokens=True)
        return max(len(vocab), max(vocab.values(), default=-1) + 1)

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
                allowed="eos_token in tokenizer_config.json or special_tokens_map.json, eos_token_id in config.json",
                fix="give the whole Hugging Face folder instead of a single file",
            )
        return self.special_ids["eos_token"]

    @property
    def pad(self) -> int | None:
        """The padding id, if the tokenizer names one."""
        return self.special_ids.get("pad_token")

    @cached_property
    def hash(self) -> str:
        """Identity: equal for tokenizers that give the same ids, however their files are laid out.

        transformers' ``save_pretrained`` writes an empty post-processor where there was none, and "" for null: of the
        first only what it adds counts, of the model only what is set.
        """
        parts = json.loads(self.backend.to_str())
        content = {name: parts[name] for name in ("added_tokens", "normalizer", "pre_tokenizer")}
        content["model"] = {name: value for name, value in parts["model"].items() if value}
        content["framed"] = self.backend.encode("a").ids
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What megatron-core puts into the key of its index cache."""
        return OrderedDict({"class": "TextTokenizer", "hash": self.hash})

    def encode(self, text: str) -> list[int]:
        """Text -> ids."""
        return self.backend.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts -> ids of each."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


Tokenizer = NullTokenizer | TextTokenizer


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """Read a Hugging Face folder, or a ``tokenizer.json`` with whatever lies beside it.

    Raises:
        DataError: when there is no readable ``tokenizer.json``.
    """
    from tokenizers import Tokenizer as RustTokenizer

    given = Path(path)
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise DataError(
            "There is no tokenizer at this path.",
            got=file,
            allowed="a Hugging Face folder with tokenizer.json, or that file",
            fix="--tokenizer-name-or-path; for a folder with other files only, save it once with "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    try:
        backend = RustTokenizer.from_file(str(file))
    except Exception as error:
        raise DataError("The tokenizer file cannot be read.", got=f"{file}: {error}") from error
    # A saved tokenizer may carry the padding and truncation of its last use; neither belongs into a corpus.
    backend.no_padding()
    backend.no_truncation()
    return TextTokenizer(str(given), backend, _special_ids(file.parent, backend))


def build_tokenizer(kind: str, path: str | Path | None, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` and its companions ask for.

    Args:
        kind: one of :data:`TOKENIZER_TYPES`.
        path: ``--tokenizer-name-or-path`` or ``--tokenizer-model``.
        vocab_size: ``--vocab-size``, for the null tokenizer.

    Raises:
        DataError: when the type is unknown or what it needs is missing.
    """
    if kind == NULL_TYPE:
        if vocab_size is None:
            raise DataError("The null tokenizer needs a vocabulary size.", fix="--vocab-size")
        return NullTokenizer(vocab_size)
    if kind not in HF_TYPES:
        raise DataError("Unknown tokenizer type.", got=kind, allowed=", ".join(TOKENIZER_TYPES), fix="--tokenizer-type")
    if path is None:
        raise DataError(f"{kind} needs a tokenizer.", fix="--tokenizer-name-or-path DIR, or --tokenizer-model FILE")
    return load_tokenizer(path)


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError("A file of the tokenizer is not valid JSON.", got=f"{path}: {error}") from error
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _special_ids(folder: Path, backend: RustTokenizer) -> dict[str, int]:
    """Role -> id, from the files that transformers reads, in its order of preference."""
    ids: dict[str, int] = {}
    for source in (_read_json(folder / "tokenizer_config.json"), _read_json(folder / "special_tokens_map.json")):
        for role in _ROLES:
            token = _content(source.get(role))
            found = backend.token_to_id(token) if token is not None else None
            if role not in ids and found is not None:
                ids[role] = found
    config = _read_json(folder / "config.json")
    for role in ("bos_token", "eos_token", "pad_token"):
        number = _first_number(config.get(f"{role}_id"))
        if role not in ids and number is not None:
            ids[role] = number
    return ids


def _content(token: object) -> str | None:
    """The text of a special token, which is written as it is or as an object."""
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    return token if isinstance(token, str) else None


def _first_number(value: object) -> int | None:
    """An id, or the first of several."""
    if isinstance(value, list) and value:
        value = cast("list[object]", value)[0]
    return value if isinstance(value, int) else None
