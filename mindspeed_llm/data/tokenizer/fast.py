"""A ``tokenizer.json``, read by the tokenizers library.

The ids are those of ``AutoTokenizer(...)(text).input_ids``: special tokens that the tokenizer itself adds (Llama's BOS)
are kept, as MindSpeed-LLM's ``PretrainedFromHF`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mindspeed_llm.data.tokenizer.base import TextTokenizer
from mindspeed_llm.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FastTokenizer(TextTokenizer):
    """A pipeline of the tokenizers library with the special tokens that the files beside it name.

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
        parts = json.loads(self.backend.to_str())
        content = {name: parts[name] for name in ("added_tokens", "normalizer", "pre_tokenizer")}
        content["model"] = {name: value for name, value in parts["model"].items() if value}
        content["framed"] = self.backend.encode("a").ids
        return content

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts -> ids of each."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts)]

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
    return FastTokenizer(shown, backend, _special_ids(file.parent, backend))


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
