"""Ranks of byte strings, read by the tiktoken library: rank files, Megatron's JSON of them, Mistral's tekken.

All three are byte-level BPE in which the rank of a token is its priority. They differ in where the special tokens are:
after the ranks in a plain file, before them in the other two.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from mindspeed_llm.config.option import names
from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.tokenizer.base import TextTokenizer
from mindspeed_llm.data.tokenizer.special import read_json
from mindspeed_llm.errors import DataError

if TYPE_CHECKING:
    import tiktoken

GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How GPT-4, Llama 3 and, for a file that says nothing, transformers cut text into words."""
_MEGATRON_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_MEGATRON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_MEGATRON_VOCAB_SIZE = 2**17
_MEGATRON_SPECIAL_COUNT = 1000
_TEKKEN_SPECIAL = names(
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
"""Those of files older than version 11, which do not list them."""
_END = ("</s>", "<|endoftext|>", "<|end_of_text|>")
_ROLES = {
    "<unk>": "unk_token",
    "<s>": "bos_token",
    "<|begin_of_text|>": "bos_token",
    "<mask>": "mask_token",
    "<pad>": "pad_token",
    "<cls>": "cls_token",
    "<sep>": "sep_token",
    **dict.fromkeys(_END, "eos_token"),
}


@dataclass(frozen=True)
class RankTable:
    """What decides the ids.

    Attributes:
        ranks: bytes -> id.
        special: text of a special token -> id.
        pattern: regular expression that cuts text into words.
        parse_special: find special tokens in text, too.
    """

    ranks: Mapping[bytes, int]
    special: Mapping[str, int]
    pattern: str
    parse_special: bool = True


class TiktokenTokenizer(TextTokenizer):
    """Ids of the tiktoken library.

    Args:
        path: as :class:`TextTokenizer`.
        table: ranks, special tokens and pattern.
        vocab_size: as :class:`TextTokenizer`.

    Raises:
        DataError: the table is none of byte-level BPE.
    """

    def __init__(self, path: str, table: RankTable, vocab_size: int) -> None:
        # The first that is named wins, and among the ends of a document the first of ``_END``.
        roles: dict[str, int] = {}
        for token in (*_END, *table.special):
            if token in table.special and token in _ROLES:
                roles.setdefault(_ROLES[token], table.special[token])
        super().__init__(path, vocab_size, roles)
        self.table = table
        self.encoding = _encoding(path, table)
        self._parsed = frozenset(table.special) if table.parse_special else frozenset[str]()

    def content(self) -> dict[str, object]:
        """Ranks, special tokens and the pattern."""
        digest = hashlib.sha256()
        for token, rank in sorted(self.table.ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d %s\n" % (rank, len(token), token))
        special = sorted(self.table.special.items())
        return {
            "ranks": digest.hexdigest(),
            "special": special,
            "pattern": self.table.pattern,
            "parse": bool(self._parsed),
        }

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts -> ids of each.

        Raises:
            DataError: a text has a run so long that the library gives up.
        """
        return [self._ids(text).tolist() for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`TextTokenizer.encode_flat`, without lists of Python numbers in between."""
        arrays = [self._ids(text) for text in texts]
        lengths = np.fromiter(map(len, arrays), dtype=np.int32, count=len(arrays))
        ids = np.concatenate(arrays) if arrays else np.empty(0)
        return ids.astype(np.int32), lengths

    def _ids(self, text: str) -> np.ndarray:
        try:
            return self.encoding.encode_to_numpy(text, allowed_special=self._parsed, disallowed_special=())
        except ValueError as error:
            raise DataError(
                "A text cannot be cut into words.",
                got=f"{len(text)} characters that begin with {text[:40]!r}: {error}",
                fix="leave this text out, or break up its run of white space",
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text, special tokens included."""
        return self.encoding.decode(list(ids))


def load_rank_file(file: Path, settings: TokenizerConfig, shown: str, pattern: str) -> TiktokenTokenizer:
    """A plain file of ranks, ``base64 rank`` a line; special tokens follow the ranks.

    Args:
        file: the file.
        settings: ``tiktoken_pattern`` and ``tiktoken_special_tokens``; by default ``<|endoftext|>`` is the only one.
        shown: the path as the user gave it.
        pattern: the one to take when the settings name none, ``v1``, ``v2`` or an expression.

    Raises:
        DataError: it is no such file.
    """
    if settings.tiktoken_num_special_tokens is not None:
        raise DataError(
            "A plain file of ranks leaves no place for a number of special tokens.",
            got=f"--tiktoken-num-special-tokens {settings.tiktoken_num_special_tokens}, {file}",
            fix="--tiktoken-special-tokens, which names those after the ranks",
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                "This is no file of ranks.",
                got=f"{file}:{number}",
                allowed="'base64 rank' a line, or a JSON list of rank, token_bytes, token_str",
                fix="--tokenizer-model FILE",
            ) from error
    first = max(ranks.values(), default=-1) + 1
    special = {token: first + i for i, token in enumerate(settings.tiktoken_special_tokens or ("<|endoftext|>",))}
    table = RankTable(ranks, special, _pattern(settings.tiktoken_pattern or pattern))
    return TiktokenTokenizer(shown, table, first + len(special))


def load_tiktoken(file: Path, settings: TokenizerConfig, vocab_size: int | None) -> TiktokenTokenizer:
    """Megatron's ``TikTokenizer``: a JSON list of ranks with special tokens before them, or a plain file of ranks.

    Args:
        file: the file.
        settings: the ``tiktoken_*`` flags.
        vocab_size: ``--vocab-size``: special tokens and ranks; by default 131072, and ranks above it are cut off.

    Raises:
        DataError: the file, or what the flags ask of it, cannot be.
    """
    if not file.is_file():
        raise DataError("The file of ranks does not exist.", got=file, fix="--tokenizer-model FILE")
    if file.suffix != ".json":
        return load_rank_file(file, settings, str(file), "v2")
    count = settings.tiktoken_num_special_tokens
    count = _MEGATRON_SPECIAL_COUNT if count is None else count
    size = vocab_size or _MEGATRON_VOCAB_SIZE
    special = settings.tiktoken_special_tokens or _MEGATRON_SPECIAL
    if (
        len(set(special)) < len(special)
        or not set(_MEGATRON_SPECIAL) <= set(special)
        or not len(special) <= count < size
    ):
        raise DataError(
            "These special tokens cannot be.",
            got=f"{' '.join(special)}; {count} of them in a vocabulary of {size}",
            allowed=f"each once, {' '.join(_MEGATRON_SPECIAL)} among them, no more than their number",
            fix="--tiktoken-special-tokens, --tiktoken-num-special-tokens, --vocab-size",
        )
    ranks = _json_ranks(file, read_json(file), size - count)
    table = RankTable(
        {token: rank + count for token, rank in ranks.items()},
        _filled(special, count),
        _pattern(settings.tiktoken_pattern or "v2"),
    )
    return TiktokenTokenizer(str(file), table, size)


def load_tekken(file: Path, shown: str) -> TiktokenTokenizer:
    """Mistral's ``tekken.json``; a special token is never found in text, as in mistral-common.

    Raises:
        DataError: it is no such file.
    """
    content = read_json(file)
    try:
        stored = cast("dict[str, dict[str, object]]", content)
        config, entries = stored["config"], stored["vocab"]
        size, count = int(str(config["default_vocab_size"])), int(str(config["default_num_special_tokens"]))
        listed = cast("list[dict[str, object]] | None", stored.get("special_tokens"))
        special = _TEKKEN_SPECIAL if listed is None else [str(token["token_str"]) for token in listed]
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            "This is no tekken file.",
            got=f"{file}: {error!r}",
            allowed="Mistral's tekken.json",
            fix="--tokenizer-model",
        ) from error
    ranks = _json_ranks(file, entries, size - count)
    shifted = {token: rank + count for token, rank in ranks.items()}
    return TiktokenTokenizer(shown, RankTable(shifted, _filled(special, count), pattern, parse_special=False), size)


def is_rank_file(file: Path) -> bool:
    """Whether a file looks like one of ranks, from its first line."""
    with open(file, "rb") as stream:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", stream.readline(1 << 16)) is not None


def _filled(special: Sequence[str], count: int) -> dict[str, int]:
    """Special tokens from id 0, with the names of megatron-core and mistral-common for those that have none."""
    return {token: i for i, token in enumerate([*special, *(f"<SPECIAL_{i}>" for i in range(len(special), count))])}


def _json_ranks(file: Path, entries: object, needed: int) -> dict[bytes, int]:
    """The first ``needed`` ranks of a list of ``{rank, token_bytes, token_str}``."""
    try:
        listed = cast("list[dict[str, object]]", entries)[:needed]
        ranks = {base64.b64decode(str(entry["token_bytes"])): int(str(entry["rank"])) for entry in listed}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise DataError(
            "This is no list of ranks.",
            got=f"{file}: {error!r}",
            allowed="JSON with rank, token_bytes and token_str of each token",
            fix="--tokenizer-model FILE",
        ) from error
    if sorted(ranks.values()) != list(range(needed)):
        raise DataError(
            "The ranks do not fill the vocabulary.",
            got=f"{file}: {len(ranks)} ranks for {needed} places",
            allowed="ranks from 0 without a hole, as many as --vocab-size less the special tokens",
            fix="--vocab-size, --tiktoken-num-special-tokens",
        )
    return ranks


def _pattern(name: str) -> str:
    """The expression that ``--tiktoken-pattern`` names or is.

    Raises:
        DataError: it is no known name and no expression.
    """
    if name in _MEGATRON_PATTERNS:
        return _MEGATRON_PATTERNS[name]
    if re.fullmatch(r"\w*", name):
        raise DataError(
            "Unknown pattern.", got=repr(name), allowed="v1, v2, or a regular expression", fix="--tiktoken-pattern"
        )
    return name


def _encoding(path: str, table: RankTable) -> tiktoken.Encoding:
    try:
        import tiktoken
    except ImportError as error:
        raise DataError("A file of ranks needs the package tiktoken.", fix="pip install tiktoken") from error
    # tiktoken itself panics over these.
    absent = [value for value in range(256) if bytes([value]) not in table.ranks]
    taken = [*table.ranks.values(), *table.special.values()]
    if absent or len(set(taken)) < len(taken):
        raise DataError(
            "These ranks are none of byte-level BPE.",
            got=f"{path}: {f'no rank for byte {absent[0]}' if absent else 'an id is given twice'}",
            fix="--tokenizer-model FILE, or other --tiktoken-special-tokens",
        )
    try:
        return tiktoken.Encoding(
            Path(path).name,
            pat_str=table.pattern,
            mergeable_ranks=dict(table.ranks),
            special_tokens=dict(table.special),
        )
    except ValueError as error:
        raise DataError("The pattern is no regular expression.", got=error, fix="--tiktoken-pattern") from error
