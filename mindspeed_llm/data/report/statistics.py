"""What is in a prepared dataset: one pass over the ``.bin`` in chunks, and the lengths that its index holds.

Memory does not grow with the ``.bin``. It takes about 32 bytes for each document: 16 for the hash by which duplicates
are found, 8 for the length, 8 while hashes are sorted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import BinaryIO, Protocol

import numpy as np

from mindspeed_llm.data.indexed import IndexSummary, bin_path, read_index
from mindspeed_llm.errors import DataError

CHUNK_TOKENS = 1 << 20
TOP_TOKENS = 30
LARGEST_GROUPS = 10
_BLOCK_DOCUMENTS = 1 << 16
_HASH_BYTES = 16
_EXCERPT_TOKENS = 96
_EXCERPT_CHARACTERS = 160


class Decoder(Protocol):
    """What the report asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids in all."""
        ...

    @property
    def eod(self) -> int:
        """The end-of-document id; :class:`DataError` when there is none."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Role -> id."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text."""
        ...


@dataclass(frozen=True)
class Lengths:
    """Tokens per document; percentiles are interpolated."""

    minimum: int
    mean: float
    median: float
    p90: float
    p99: float
    maximum: int


@dataclass(frozen=True)
class Histogram:
    """Lengths in bins of two to an octave.

    Attributes:
        edges: ``[bins + 1]`` whole numbers from 1; a bin holds lengths from its edge to below the next one.
        documents: ``[bins]`` documents of such a length.
        tokens: ``[bins]`` tokens in them.
    """

    edges: tuple[int, ...]
    documents: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TokenCount:
    """How often an id occurs.

    Attributes:
        id: the id.
        text: what it adds to a text; empty for an id without text of its own.
        roles: of a special id, for instance ``eos_token``.
        count: occurrences.
        share: of all tokens.
    """

    id: int
    text: str
    roles: tuple[str, ...]
    count: int
    share: float


@dataclass(frozen=True)
class DuplicateGroup:
    """Documents with the same ids.

    Attributes:
        documents: how many there are.
        first: number of the first of them, counted from 0.
        length: tokens in each.
        excerpt: how it begins.
    """

    documents: int
    first: int
    length: int
    excerpt: str


@dataclass(frozen=True)
class Duplicates:
    """Exact duplicates: documents with the ids of an earlier one.

    Attributes:
        documents: how many could go without a loss.
        share: of all documents.
        tokens: in them.
        token_share: of all tokens.
        groups: sets of equal documents.
        largest: the groups with the most documents, the earliest first among equals.
    """

    documents: int
    share: float
    tokens: int
    token_share: float
    groups: int
    largest: tuple[DuplicateGroup, ...]


@dataclass(frozen=True)
class Vocabulary:
    """Use of the vocabulary.

    Attributes:
        size: ids of the tokenizer.
        used: of them, how many occur.
        unused: of them, how many never occur.
        outside: tokens whose id is not in the vocabulary.
        covering_99: the most frequent ids that together make up 99 % of the tokens.
        unknown: tokens that stand for unknown text; None for a tokenizer without such an id.
        unknown_share: of all tokens.
        top: the most frequent ids.
    """

    size: int
    used: int
    unused: int
    outside: int
    covering_99: int
    unknown: int | None
    unknown_share: float | None
    top: tuple[TokenCount, ...]


@dataclass(frozen=True)
class EndOfDocument:
    """Where the end-of-document id stands.

    Attributes:
        id: the id.
        documents: those that end with it.
        inside: occurrences elsewhere.
        alone: documents that consist of nothing else.
    """

    id: int
    documents: int
    inside: int
    alone: int


@dataclass(frozen=True)
class DatasetStatistics:
    """One dataset.

    Attributes:
        prefix: path without suffix.
        documents: their number.
        tokens: their number.
        empty: documents without a single token.
        text_bytes: UTF-8 bytes of the text that was encoded; None when not known.
        bytes_per_token: None when not known, or without tokens.
        lengths: None without documents.
        histogram: without the empty documents.
        duplicates: exact ones.
        vocabulary: which ids occur.
        end_of_document: None for a tokenizer that names none.
    """

    prefix: str
    documents: int
    tokens: int
    empty: int
    text_bytes: int | None
    bytes_per_token: float | None
    lengths: Lengths | None
    histogram: Histogram
    duplicates: Duplicates
    vocabulary: Vocabulary
    end_of_document: EndOfDocument | None


def measure(
    prefix: str, tokenizer: Decoder, *, text_bytes: int | None = None, chunk_tokens: int = CHUNK_TOKENS
) -> DatasetStatistics:
    """Read a dataset once and describe it.

    Args:
        prefix: path without suffix.
        tokenizer: the one that made it.
        text_bytes: UTF-8 bytes of the text that was encoded, without the rows that were dropped.
        chunk_tokens: tokens that are read at a time.

    Raises:
        DataError: the dataset is missing, damaged, or does not hold ids.
    """
    index = read_index(prefix)
    if index.dtype.kind == "f":
        raise DataError("The dataset holds no token ids.", got=f"{prefix}: {index.dtype}", allowed="integers")
    lengths = _document_lengths(index)
    eod = _end_of_document(tokenizer)
    with open(bin_path(prefix), "rb") as stream:
        scan = _Scan(stream, index.dtype, tokenizer.vocab_size, eod, chunk_tokens)
        digests = scan.read(lengths)
        duplicates = _duplicates(digests, lengths, scan, tokenizer)
    documents, tokens = len(lengths), index.tokens
    end = None
    if eod is not None:
        occurrences = int(scan.counts[eod]) if 0 <= eod < len(scan.counts) else 0
        end = EndOfDocument(eod, scan.ended, occurrences - scan.ended, scan.only_eod)
    return DatasetStatistics(
        prefix=prefix,
        documents=documents,
        tokens=tokens,
        empty=int(np.count_nonzero(lengths == 0)),
        text_bytes=text_bytes,
        bytes_per_token=None if text_bytes is None or tokens == 0 else text_bytes / tokens,
        lengths=_length_summary(lengths) if documents else None,
        histogram=_histogram(lengths),
        duplicates=duplicates,
        vocabulary=_vocabulary(scan, tokens, eod, tokenizer),
        end_of_document=end,
    )


def _end_of_document(tokenizer: Decoder) -> int | None:
    try:
        return tokenizer.eod
    except DataError:
        return None


def _blocks(count: int) -> list[slice]:
    """Runs of documents, so that temporaries of a few bytes per document do not add up."""
    return [slice(first, min(first + _BLOCK_DOCUMENTS, count)) for first in range(0, count, _BLOCK_DOCUMENTS)]


def _document_lengths(index: IndexSummary) -> np.ndarray:
    """``[documents]`` int64; a document may have several sequences, or none."""
    lengths = np.empty(len(index.boundaries) - 1, dtype=np.int64)
    for block in _blocks(len(lengths)):
        bounds = index.boundaries[block.start : block.stop + 1]
        sequences = index.lengths[bounds[0] : bounds[-1]]
        ends = np.concatenate([[0], np.cumsum(sequences, dtype=np.int64)])
        lengths[block] = np.diff(ends[bounds - bounds[0]])
    return lengths


class _Scan:
    """The pass over the ``.bin``; documents are hashed across the borders of chunks.

    Attributes:
        counts: ``[vocab_size]`` occurrences of each id.
        outside: tokens whose id is not in the vocabulary.
        ended: documents that end with ``eod``.
        only_eod: documents that consist of ``eod`` alone.
    """

    def __init__(self, stream: BinaryIO, dtype: np.dtype, vocab_size: int, eod: int | None, chunk_tokens: int) -> None:
        self.stream = stream
        self.dtype = dtype
        self.eod = eod
        self.chunk_tokens = chunk_tokens
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.outside = 0
        self.ended = 0
        self.only_eod = 0

    def read(self, lengths: np.ndarray) -> np.ndarray:
        """Read all documents; returns ``[documents, 2]`` uint64, the hash of each."""
        digests = np.empty((len(lengths), _HASH_BYTES // 8), dtype=np.uint64)
        for block in _blocks(len(lengths)):
            found = self._read_block(lengths[block])
            digests[block] = np.frombuffer(found, dtype=np.uint64).reshape(-1, digests.shape[1])
        return digests

    def _read_block(self, lengths: np.ndarray) -> bytes:
        """Read whole documents, a chunk at a time; the hashes end to end."""
        ends = np.cumsum(lengths)
        digests: list[bytes] = []
        begun = blake2b(digest_size=_HASH_BYTES)
        offset = 0
        while len(digests) < len(lengths):
            size = min(self.chunk_tokens, int(ends[-1]) - offset)
            chunk = np.fromfile(self.stream, dtype=self.dtype, count=size)
            self._count(chunk)
            first, stop = len(digests), int(np.searchsorted(ends, offset + size, side="right"))
            inside = ends[first:stop] - offset
            self._look_at_ends(chunk, inside, lengths[first:stop])
            data = memoryview(chunk.tobytes())
            start = 0
            for end in (inside * self.dtype.itemsize).tolist():
                begun.update(data[start:end])
                digests.append(begun.digest())
                begun = blake2b(digest_size=_HASH_BYTES)
                start = end
            begun.update(data[start:])
            offset += size
        return b"".join(digests)

    def _count(self, chunk: np.ndarray) -> None:
        known = chunk[(chunk >= 0) & (chunk < len(self.counts))]
        self.outside += len(chunk) - len(known)
        self.counts += np.bincount(known, minlength=len(self.counts))

    def _look_at_ends(self, chunk: np.ndarray, ends: np.ndarray, lengths: np.ndarray) -> None:
        if self.eod is None:
            return
        with_tokens = lengths > 0
        ended = chunk[ends[with_tokens] - 1] == self.eod
        self.ended += int(np.count_nonzero(ended))
        self.only_eod += int(np.count_nonzero(ended & (lengths[with_tokens] == 1)))

    def excerpt(self, lengths: np.ndarray, document: int, tokenizer: Decoder) -> str:
        """How a document begins."""
        self.stream.seek(int(lengths[:document].sum()) * self.dtype.itemsize)
        count = min(int(lengths[document]), _EXCERPT_TOKENS)
        ids = np.fromfile(self.stream, dtype=self.dtype, count=count).tolist()
        if any(not 0 <= token < len(self.counts) for token in ids):
            return "ids that the tokenizer does not have"
        text = tokenizer.decode(ids)
        if len(text) > _EXCERPT_CHARACTERS or count < lengths[document]:
            # The cut may go through the bytes of a character.
            return text[:_EXCERPT_CHARACTERS].rstrip("\ufffd") + " …"
        return text


def _duplicates(digests: np.ndarray, lengths: np.ndarray, scan: _Scan, tokenizer: Decoder) -> Duplicates:
    documents, first = _repeated(digests)
    # documents: those with an equal, equal ones together and in order; first: where each group begins in them.
    counts = np.diff(np.append(first, len(documents)))
    later = np.ones(len(documents), dtype=bool)
    later[first] = False
    extra = int(np.count_nonzero(later))
    tokens = int(lengths[documents[later]].sum())
    leaders = documents[first]
    largest = [
        DuplicateGroup(
            documents=int(counts[group]),
            first=int(leaders[group]),
            length=int(lengths[leaders[group]]),
            excerpt=scan.excerpt(lengths, int(leaders[group]), tokenizer),
        )
        for group in np.lexsort((leaders, -counts))[:LARGEST_GROUPS]
    ]
    return Duplicates(
        documents=extra,
        share=_share(extra, len(lengths)),
        tokens=tokens,
        token_share=_share(tokens, int(lengths.sum())),
        groups=len(first),
        largest=tuple(largest),
    )


def _repeated(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Documents whose hash occurs more than once.

    Half a hash tells which documents to look at, so that only these need more memory.

    Returns:
        ``[found]`` document numbers, equal hashes together and in order; ``[groups]`` where each group begins.
    """
    ordered = np.sort(digests[:, 0])
    candidates = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not len(candidates):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    position = np.searchsorted(candidates, digests[:, 0])
    np.minimum(position, len(candidates) - 1, out=position)
    found = np.flatnonzero(candidates[position] == digests[:, 0])
    del position
    found = found[np.lexsort((found, digests[found, 1], digests[found, 0]))]
    same = np.all(digests[found[1:]] == digests[found[:-1]], axis=1)
    begins = np.append(True, ~same)
    # A document of which only the first half of the hash has an equal is a group of its own: not a duplicate.
    kept = ~(begins & np.append(~same, True))
    return found[kept], np.flatnonzero(begins[kept])


def _length_summary(lengths: np.ndarray) -> Lengths:
    median, p90, p99 = np.percentile(lengths, [50, 90, 99])
    return Lengths(
        minimum=int(lengths.min()),
        mean=float(lengths.mean()),
        median=float(median),
        p90=float(p90),
        p99=float(p99),
        maximum=int(lengths.max()),
    )


def _histogram(lengths: np.ndarray) -> Histogram:
    longest = int(lengths.max(initial=0))
    if longest == 0:
        return Histogram((1,), (), ())
    octaves = longest.bit_length()
    edges = sorted({round(2 ** (half / 2)) for half in range(2 * octaves + 1)})
    while edges[-2] > longest:
        edges.pop()
    documents = np.zeros(len(edges) - 1, dtype=np.int64)
    tokens = np.zeros_like(documents)
    for block in _blocks(len(lengths)):
        with_tokens = lengths[block][lengths[block] > 0]
        bins = np.searchsorted(edges, with_tokens, side="right") - 1
        documents += np.bincount(bins, minlength=len(documents))
        np.add.at(tokens, bins, with_tokens)
    return Histogram(tuple(edges), tuple(documents.tolist()), tuple(tokens.tolist()))


def _vocabulary(scan: _Scan, tokens: int, eod: int | None, tokenizer: Decoder) -> Vocabulary:
    counts = scan.counts
    used = int(np.count_nonzero(counts))
    order = np.argsort(-counts, kind="stable")[:used]
    total = int(counts.sum())
    covering = int(np.searchsorted(100 * np.cumsum(counts[order]), 99 * total)) + 1 if used else 0
    unknown = tokenizer.special_ids.get("unk_token")
    # GPT-2's unknown token is its end of document: a count of that would say nothing.
    unknown_count = None if unknown is None or unknown == eod else int(counts[unknown])
    return Vocabulary(
        size=len(counts),
        used=used,
        unused=len(counts) - used,
        outside=scan.outside,
        covering_99=covering,
        unknown=unknown_count,
        unknown_share=None if unknown_count is None else _share(unknown_count, tokens),
        top=tuple(_token_count(int(token), int(counts[token]), tokens, tokenizer) for token in order[:TOP_TOKENS]),
    )


def _token_count(token: int, count: int, tokens: int, tokenizer: Decoder) -> TokenCount:
    """Describe an id by what a second one adds: SentencePiece drops the space with which a text begins."""
    once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    text = twice[len(once) :] if twice.startswith(once) else once
    roles = tuple(role for role, number in tokenizer.special_ids.items() if number == token)
    return TokenCount(token, text, roles, count, _share(count, tokens))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
