"""Fill in the middle: documents rearranged so that a model learns to write what stands between two given texts.

A document is cut in three at two random characters, and becomes ``<prefix> A <suffix> C <middle> B`` (PSM) or
``<prefix> <suffix> C <middle> A B`` (SPM). With the same random numbers the result is that of Megatron-LM's
``GPTFIMDataset``, except where that loses or invents tokens:

- The random numbers of a sample follow from the seed, the data and the number of the sample. Megatron-LM draws them
  from one generator in the order of reading, so its samples depend on the workers and are others after a resume.
- An empty document stays what it is. Megatron-LM drops its end, and makes sentinels of an empty one at the end.
- A document cut within a character, or of special tokens alone, stays as it is. Megatron-LM writes the replacement
  character into it.
- The loss of the padding is masked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mindspeed_llm.config.data import DataConfig
from mindspeed_llm.data.tokenizer import Tokenizer
from mindspeed_llm.data.tokenizer.fast import FastTokenizer
from mindspeed_llm.errors import DataError

_UNDECODABLE = "\ufffd"


@dataclass(frozen=True)
class Sentinels:
    """Ids of the tokens that mark the parts, each named by a flag ``--fim-<name>-token``."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int


@dataclass(frozen=True)
class FillInTheMiddle:
    """The transformation of samples. Build one with :func:`build_fim`.

    Attributes:
        tokenizer: text <-> ids.
        sentinels: ids that mark the parts.
        rate: share of documents that are rearranged.
        spm_rate: share of the rearranged ones in the order SPM.
        split: id around which a document is split into fragments, each rearranged by itself; None splits nothing.
        fragment_rate: share of fragments that are rearranged, of documents that are split.
        no_prefix: texts that begin with it stay as they are.
    """

    tokenizer: FastTokenizer
    sentinels: Sentinels
    rate: float
    spm_rate: float
    split: int | None = None
    fragment_rate: float = 0.0
    no_prefix: str | None = None

    def __call__(self, sample: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Rearrange the documents of a sample.

        Args:
            sample: int64 ``[n]``, documents that end with ``sentinels.eod``; the first and last may be parts.
            random: advanced by what is drawn.

        Returns:
            int64 ``[n]``: longer results lose their end, shorter ones are filled with ``sentinels.pad``.
        """
        parts: list[np.ndarray] = []
        for document, end in _pieces(sample, self.sentinels.eod):
            parts += [self._document(document, random), end]
        result = np.concatenate(parts)[: len(sample)]
        return np.concatenate([result, np.full(len(sample) - len(result), self.sentinels.pad, dtype=np.int64)])

    def _document(self, ids: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        if self.split is None or self.split not in ids:
            return self._rearranged(ids, self.rate, random)
        if not random.binomial(1, self.rate):
            return ids
        parts: list[np.ndarray] = []
        for fragment, separator in _pieces(ids, self.split):
            parts += [self._rearranged(fragment, self.fragment_rate, random), separator]
        return np.concatenate(parts)

    def _rearranged(self, ids: np.ndarray, rate: float, random: np.random.RandomState) -> np.ndarray:
        if not random.binomial(1, rate):
            return ids
        text = self.tokenizer.backend.decode(ids.tolist(), skip_special_tokens=True)
        if not text or _UNDECODABLE in text or (self.no_prefix is not None and text.startswith(self.no_prefix)):
            return ids
        first, second = sorted(random.randint(low=0, high=len(text) + 1, size=2))
        before, middle, after = (self._encode(part) for part in (text[:first], text[first:second], text[second:]))
        mark = self.sentinels
        if random.binomial(1, self.spm_rate):
            result = [mark.prefix, mark.suffix, *after, mark.middle, *before, *middle]
        else:
            result = [mark.prefix, *before, mark.suffix, *after, mark.middle, *middle]
        return np.array(result, dtype=np.int64)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids


def sample_random(seed: int, source: str, split: str, number: int) -> np.random.RandomState:
    """The generator of one sample: the same in every process and after every resume.

    Args:
        seed: of the run.
        source: identity of the data.
        split: train, valid or test.
        number: of the sample within its dataset.
    """
    digest = hashlib.sha256(f"{seed} {number} {split} {source}".encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4"))


def build_fim(data: DataConfig, tokenizer: Tokenizer) -> FillInTheMiddle | None:
    """The transformation that the flags ask for; None without ``--fim-data``.

    Raises:
        DataError: when the tokenizer lacks a token, or its documents end with another one.
    """
    if not data.fim_data:
        return None
    if not isinstance(tokenizer, FastTokenizer):
        raise DataError(
            "Filling in the middle takes text apart and needs a tokenizer of the Hugging Face kind.",
            got=type(tokenizer).__name__,
            allowed="a tokenizer with tokenizer.json",
            fix="--tokenizer-name-or-path, or leave --fim-data out",
        )
    texts = {
        "prefix": data.fim_prefix_token,
        "middle": data.fim_middle_token,
        "suffix": data.fim_suffix_token,
        "pad": data.fim_pad_token,
        "eod": data.fim_eod_token,
    }
    ids = {name: _token_id(tokenizer, text, f"--fim-{name}-token") for name, text in texts.items()}
    if len(set(ids.values())) < len(ids):
        raise DataError(
            "The tokens of filling in the middle must differ from each other.",
            got=", ".join(f"--fim-{name}-token {text}" for name, text in texts.items()),
        )
    if ids["eod"] != tokenizer.eod:
        raise DataError(
            "Documents end with another token than filling in the middle looks for.",
            got=f"--fim-eod-token {texts['eod']} is id {ids['eod']}",
            allowed=f"id {tokenizer.eod}, {tokenizer.backend.id_to_token(tokenizer.eod)}",
            fix="--fim-eod-token",
        )
    return FillInTheMiddle(
        tokenizer=tokenizer,
        sentinels=Sentinels(**ids),
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        split=None if data.fim_split_sample is None else _split_id(tokenizer, data.fim_split_sample),
        fragment_rate=data.fim_fragment_rate or 0.0,
        no_prefix=data.fim_no_prefix,
    )


def _token_id(tokenizer: FastTokenizer, text: str, flag: str) -> int:
    number = tokenizer.backend.token_to_id(text)
    if number is None:
        near = [token for token in _added_tokens(tokenizer) if "fim" in token.lower() or "endoftext" in token]
        raise DataError(
            "The tokenizer has no such token.",
            got=f"{flag} {text} with {tokenizer.path}",
            allowed="a token of its vocabulary" + (f", such as {', '.join(near)}" if near else ""),
            fix=flag,
        )
    return number


def _added_tokens(tokenizer: FastTokenizer) -> list[str]:
    return [token.content for _, token in sorted(tokenizer.backend.get_added_tokens_decoder().items())]


def _split_id(tokenizer: FastTokenizer, text: str) -> int:
    """The one id of a text: a token's name, or text such as a line feed that is encoded as one token."""
    named = tokenizer.backend.token_to_id(text)
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids if named is None else [named]
    if len(ids) != 1:
        raise DataError(
            "A sample can be split around a single token only.",
            got=f"--fim-split-sample {text!r} is {len(ids)} tokens",
            fix="--fim-split-sample",
        )
    return ids[0]


def _pieces(ids: np.ndarray, separator: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What stands between the separators, each with the separator after it (``[1]``, or ``[0]`` at the end)."""
    start = 0
    for place in np.flatnonzero(ids == separator).tolist():
        yield ids[start:place], ids[place : place + 1]
        start = place + 1
    yield ids[start:], ids[len(ids) :]
