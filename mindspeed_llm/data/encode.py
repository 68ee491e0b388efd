"""Blocks of rows -> documents of ids, in worker processes, in the order of the input.

Nothing here imports torch: a worker is a fork that shares the parent's tokenizer.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import numpy as np

from mindspeed_llm.data.indexed import token_dtype
from mindspeed_llm.data.rows import read_rows
from mindspeed_llm.data.sentences import Splitter
from mindspeed_llm.data.sources import Block
from mindspeed_llm.data.tokenizer import Tokenizer
from mindspeed_llm.errors import DataError

NO_TOKENS = "no tokens"


@dataclass(frozen=True)
class Column:
    """Documents of one key.

    Attributes:
        ids: ``[tokens]``, end to end.
        lengths: ``[sequences]`` int32, tokens in each.
        counts: ``[documents]`` int32, sequences in each: 1 unless documents are split into sentences.
    """

    ids: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """``[documents]`` int64: tokens in each."""
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        bounds = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        return np.diff(ends[bounds])

    def keep(self, wanted: np.ndarray) -> Column:
        """The documents where ``wanted`` (bool ``[documents]``) is true."""
        if wanted.all():
            return self
        sequences = np.repeat(wanted, self.counts)
        return Column(self.ids[np.repeat(sequences, self.lengths)], self.lengths[sequences], self.counts[wanted])

    def close(self, eod: int | None, pad: int, multiple: int) -> Column:
        """End each document with ``eod``, if there is one, then with ``pad`` up to a ``multiple`` of tokens."""
        if (eod is None and multiple == 1) or not len(self.counts):
            return self
        sizes = self.sizes
        own = 0 if eod is None else 1
        extra = own + -(sizes + own) % multiple
        added = np.full(extra.sum(), pad, dtype=self.ids.dtype)
        if eod is not None:
            added[np.cumsum(extra) - extra] = eod
        lengths = self.lengths.copy()
        lengths[np.cumsum(self.counts) - 1] += extra.astype(np.int32)
        return Column(np.insert(self.ids, np.repeat(np.cumsum(sizes), extra), added), lengths, self.counts)


@dataclass(frozen=True)
class EncodedBlock:
    """The documents of one block.

    Attributes:
        columns: ``[key]``, the same number of documents in each.
        text_bytes: ``[key]``, bytes of UTF-8 that the documents were made from.
        rows: rows in the block, good and bad.
        bad: row in the block, from 0, and why it gave no document.
    """

    columns: list[Column]
    text_bytes: list[int]
    rows: int
    bad: list[tuple[int, str]] = field(default_factory=list)

    @property
    def documents(self) -> int:
        """Their number."""
        return len(self.columns[0].counts)


class BlockEncoder:
    """Reads and encodes blocks.

    Args:
        tokenizer: its ids are written as they are.
        keys: fields of a row, one dataset each.
        append_eod: end each document with ``tokenizer.eod``.
        pad_to_multiple_of: pad each document with ``tokenizer.pad``, or ``eod`` where there is none.
        splitter: cuts documents into sentences.

    Raises:
        DataError: the tokenizer has no end of document and one is asked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        keys: Sequence[str],
        *,
        append_eod: bool = False,
        pad_to_multiple_of: int = 1,
        splitter: Splitter | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.keys = list(keys)
        self.splitter = splitter
        self.eod = tokenizer.eod if append_eod else None
        self.multiple = pad_to_multiple_of
        self.pad = 0
        if pad_to_multiple_of > 1:
            self.pad = tokenizer.eod if tokenizer.pad is None else tokenizer.pad
        self.dtype = token_dtype(tokenizer.vocab_size)

    def encode(self, block: Block, limit: int | None = None) -> EncodedBlock:
        """Encode the good rows; a row in which any key has no tokens is a bad one, so that keys stay aligned.

        Args:
            block: to read.
            limit: the rows behind this many documents, good or bad, are left alone.
        """
        rows = read_rows(block, self.keys)
        columns = [self._encode_texts(texts) for texts in rows.texts]
        good = np.ones(len(rows.numbers), dtype=bool)
        for column in columns:
            good &= column.sizes > 0
        texts, bad, count = rows.texts, rows.bad, rows.count
        if limit is not None and good.sum() >= limit:
            last = rows.numbers[int(np.flatnonzero(good)[limit - 1])]
            good &= np.cumsum(good) <= limit
            bad, count = [row for row in bad if row[0] < last], last + 1
        if not good.all():
            empty = [
                (number, NO_TOKENS)
                for number, kept in zip(rows.numbers, good, strict=True)
                if not kept and number < count
            ]
            bad = sorted([*bad, *empty])
            texts = [[text for text, kept in zip(column, good, strict=True) if kept] for column in texts]
        columns = [column.keep(good).close(self.eod, self.pad, self.multiple) for column in columns]
        return EncodedBlock(
            [Column(column.ids.astype(self.dtype), column.lengths, column.counts) for column in columns],
            [sum(map(_utf8_size, column)) for column in texts],
            count,
            bad,
        )

    def _encode_texts(self, texts: list[str]) -> Column:
        if self.splitter is None:
            ids, lengths = self._encode_flat(texts)
            return Column(ids, lengths, np.ones(len(texts), dtype=np.int32))
        sentences = [self.splitter(text) for text in texts]
        ids, lengths = self._encode_flat([sentence for document in sentences for sentence in document])
        document = np.repeat(np.arange(len(texts)), [len(document) for document in sentences])
        used = lengths > 0  # a sentence without tokens is none
        return Column(ids, lengths[used], np.bincount(document[used], minlength=len(texts)).astype(np.int32))

    def _encode_flat(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids and lengths; a text that the tokenizer gives up (tiktoken does so on some very long ones) has none."""
        try:
            return self.tokenizer.encode_flat(texts)
        except DataError:
            if len(texts) == 1:
                return np.zeros(0, np.int32), np.zeros(1, np.int32)
        middle = len(texts) // 2
        first, second = self._encode_flat(texts[:middle]), self._encode_flat(texts[middle:])
        return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def encode_blocks(
    blocks: Iterable[Block], encoder: BlockEncoder, workers: int
) -> Generator[tuple[Block, EncodedBlock], None, None]:
    """Encode blocks in their order; only a few are under way, so that memory does not grow with the input.

    Raises:
        DataError: an input is damaged, or a worker died.
    """
    if workers <= 1:
        for block in blocks:
            yield block, encoder.encode(block)
        return
    encoder.tokenizer.encode_flat([])  # what the first text would have built is built before the forks, which share it
    window: deque[tuple[Block, Future[EncodedBlock]]] = deque()
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), initializer=_become_worker, initargs=(encoder, os.getpid())
    ) as pool:
        try:
            for block in blocks:
                window.append((block, pool.submit(_encode_in_worker, block)))
                if len(window) > 2 * workers:
                    first, future = window.popleft()
                    yield first, future.result()
            for first, future in window:
                yield first, future.result()
        except BrokenProcessPool as error:
            raise DataError("A worker process died, most likely for want of memory.", fix="fewer --workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker_encoder: BlockEncoder | None = None
"""The encoder of a worker process, inherited through the fork so that no tokenizer is read twice."""


def _become_worker(encoder: BlockEncoder, parent: int) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    # Rust threads inside each of the workers would fight over the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The parent decides when to stop, also at Ctrl-C, which the terminal sends to all; killed, it takes these along.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _encode_in_worker(block: Block) -> EncodedBlock:
    if _worker_encoder is None:
        raise RuntimeError("the worker was not initialised")
    return _worker_encoder.encode(block)
