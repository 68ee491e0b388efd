"""Byte-level BPE in C++: the ids of the ``tokenizers`` library, several times faster on one core.

:meth:`ByteBpe.from_json` takes a ``tokenizer.json`` only when everything in it that decides ids is known here to the
letter: GPT-2's, Qwen2's, Llama 3's and DeepSeek-V3's cuts into words. A text is encoded here only when its code points
have certain classes and its form is certain; any other goes through the library itself.
"""

from __future__ import annotations

import functools
import importlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

# A parsed tokenizer.json is untyped; what is read of it is compared with known values.
Json = Any
Ids = NDArray[np.int32]

_MODULE = "mindspeed_llm.data._byte_bpe"
_INTERFACE = 1

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    # Its line ends are written as themselves.
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
PATTERNS: dict[tuple[str, ...], int] = {(GPT2,): 0, (QWEN2,): 1, (LLAMA3,): 2, DEEPSEEK_V3: 3}
"""Regular expressions that isolate words, one after the other -> ``Pattern`` in ``csrc/cpu/byte_bpe_words.h``."""

_CODE_POINTS = 0x40000
"""Above lie only private characters, tags and variation selectors; texts with those go to the library."""


class ByteBpe:
    """An encoder whose ids are those of the ``tokenizers`` library, without truncation and padding.

    Build one with :meth:`from_json`. Threads may share it; each call uses one.
    """

    def __init__(self, native: Any, nfc: bool, library: Library) -> None:
        self._native = native
        self._nfc = nfc
        self._library = library

    @classmethod
    def from_json(cls, content: Mapping[str, Json], library: Library | None = None) -> ByteBpe | None:
        """The encoder for a parsed ``tokenizer.json``.

        Args:
            content: the whole of it.
            library: the same tokenizer as the library reads it, if it is there already.

        Returns:
            None when anything in it is not exactly understood, or the C++ module is not built.
        """
        module, model = _module(), content["model"]
        if module is None or not _is_plain(model):
            return None
        pattern = PATTERNS.get(_words(content.get("pre_tokenizer")) or ())
        nfc = _is_nfc(content.get("normalizer"))
        frame = _frame(content.get("post_processor"))
        added = _added_tokens(content.get("added_tokens") or [], model["vocab"])
        classes = code_point_classes()
        if pattern is None or nfc is None or frame is None or added is None or classes is None:
            return None
        try:
            native = module.ByteBpe(
                pattern=pattern,
                ignore_merges=bool(model.get("ignore_merges")),
                prefix=frame[0],
                suffix=frame[1],
                majors=classes,
                vocabulary=model["vocab"],
                merges=model["merges"],
                raw_added=added[0],
                normalized_added=added[1],
            )
        except (ValueError, RuntimeError):  # merges that are not of bytes; a number that is too large, or far too large
            return None
        return cls(native, nfc, library or _load_library(content))

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Ids]:
        """Encode texts, with the special tokens that the tokenizer adds.

        Returns:
            ids: of all texts end to end.
            lengths: ids of each text.
        """
        settled = [text if _is_settled(text) else None for text in texts] if self._nfc else texts
        ids, lengths = self._native.encode(settled)
        left = np.flatnonzero(lengths < 0)
        if len(left) == 0:
            return ids, lengths
        others = self._library.encode_batch_fast([texts[row] for row in left])
        places = np.cumsum(np.maximum(lengths, 0))[left]
        pieces: list[Ids] = []
        start = 0
        for row, place, other in zip(left, places, others, strict=True):
            pieces += [ids[start:place], np.array(other.ids, dtype=np.int32)]
            start, lengths[row] = place, len(other.ids)
        return np.concatenate([*pieces, ids[start:]]), lengths


# What must not match anywhere in the code points of a class, for the library to agree on it.
_FOREIGN = {letter: rf"\P{{{letter}}}" for letter in "LMNPS"} | {"Z": r"\S", "C": r"[\p{L}\p{M}\p{N}\p{P}\p{S}]"}


@functools.cache
def code_point_classes() -> bytes | None:
    """The first letter of each code point's general category; 0 where Python's Unicode assigns none.

    None when the library does not agree on all that are assigned, as when its Unicode is the older one.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    categories = list(map(unicodedata.category, map(chr, range(_CODE_POINTS))))
    first = {category: 0 if category in ("Cn", "Cs") else ord(category[0]) for category in set(categories)}
    classes = bytes(map(first.__getitem__, categories))
    members: dict[int, list[str]] = {ord(letter): [] for letter in _FOREIGN} | {0: []}
    for code_point, letter in enumerate(classes):
        members[letter].append(chr(code_point))
    for letter, foreign in _FOREIGN.items():
        text = "".join(members[ord(letter)])
        if Split(Regex(foreign), "isolated").pre_tokenize_str(text) != [(text, (0, len(text)))]:
            return None
    return classes


@functools.cache
def _module() -> ModuleType | None:
    """The C++ module, if one is built from these sources and loads."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return None
    return module if module.INTERFACE == _INTERFACE else None


def _load_library(content: Mapping[str, Json]) -> Library:
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(json.dumps(content))
    library.no_truncation()
    library.no_padding()
    return library


def _words(pre_tokenizer: Json) -> tuple[str, ...] | None:
    """The regular expressions that isolate words, or None when it is not they and the change to bytes alone."""
    parts: list[Json] = _flat(pre_tokenizer, "pretokenizers")
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space") is not False:
        return None
    if len(parts) == 1:
        return (GPT2,) if parts[0].get("use_regex", True) is True else None
    if parts[-1].get("use_regex") is not False:
        return None
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    if any({**part, "pattern": None} != {**isolated, "pattern": None} for part in parts[:-1]):
        return None
    patterns: list[Json] = [part["pattern"] for part in parts[:-1]]
    if any(list(pattern) != ["Regex"] for pattern in patterns):
        return None
    return tuple(pattern["Regex"] for pattern in patterns)


def _is_nfc(normalizer: Json) -> bool | None:
    """Whether texts are brought into NFC; None when anything else happens to them."""
    parts = _flat(normalizer, "normalizers")
    return bool(parts) if all(part == {"type": "NFC"} for part in parts) else None


def _is_plain(model: Json) -> bool:
    """Whether the model is BPE with no option but ``ignore_merges``."""
    unset = {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"}
    if model.get("type") != "BPE" or not set(model) <= unset | {"type", "vocab", "merges", "ignore_merges"}:
        return False
    return not any(model.get(name) for name in unset) and len(set(model["vocab"].values())) == len(model["vocab"])


def _added_tokens(tokens: Sequence[Json], vocab: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]] | None:
    """Added tokens -> id: those found in the text as it is, and those found after normalisation.

    None when one has an option that changes where it is found, or an id other than the one that the library gives it.
    """
    raw: dict[str, int] = {}
    normalized: dict[str, int] = {}
    following = len(vocab)
    for token in tokens:
        text = token["content"]
        expected = vocab.get(text, following)
        following += text not in vocab
        if not text or text in raw or text in normalized or token["id"] != expected:
            return None
        if any(token.get(name) for name in ("single_word", "lstrip", "rstrip")) or not _is_settled(text):
            return None
        (normalized if token["normalized"] else raw)[text] = expected
    return raw, normalized


def _is_settled(text: str) -> bool:
    """Whether normalisation leaves a text as it is; certain for code points that Python's Unicode assigns."""
    return unicodedata.is_normalized("NFC", text)


def _frame(post_processor: Json) -> tuple[list[int], list[int]] | None:
    """The ids that go before and after each text; None when they are not fixed."""
    parts = _flat(post_processor, "processors")
    templates = [part for part in parts if part.get("type") == "TemplateProcessing"]
    if len(templates) > 1 or any(part.get("type") != "ByteLevel" for part in parts if part not in templates):
        return None
    around: tuple[list[int], list[int]] = ([], [])
    for template in templates:
        side = 0
        for piece in cast("list[dict[str, Json]]", template["single"]):
            if "SpecialToken" in piece:
                around[side].extend(template["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
            elif piece["Sequence"]["id"] == "A" and side == 0:
                side = 1
            else:
                return None
        if side == 0:
            return None
    return around


def _flat(part: Json, members: str) -> list[Json]:
    """The members of a Sequence, one after the other; nothing for null; else the thing itself."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [inner for member in cast("list[Json]", part[members]) for inner in _flat(member, members)]
