"""Preparation: text files -> Megatron's indexed datasets, one per key.

The parent reads and writes, worker processes parse and encode; blocks of lines travel one way and bytes of ids the
other, in the order of the input. Nothing here imports torch: a worker is a fork that shares the parent's tokenizer.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from mindspeed_llm import __version__
from mindspeed_llm.data.indexed import IndexedWriter, token_dtype
from mindspeed_llm.data.manifest import Manifest, Source, manifest_path, write_manifest
from mindspeed_llm.data.rows import BadRow, read_rows
from mindspeed_llm.data.sources import Block, read_blocks, resolve_inputs
from mindspeed_llm.data.tokenizer import TextTokenizer
from mindspeed_llm.errors import DataError

logger = logging.getLogger(__name__)

SKIP, STOP = "skip", "stop"


@dataclass(frozen=True)
class PrepareSettings:
    """What to prepare and how.

    Attributes:
        inputs: files, read in this order.
        output_prefix: datasets are ``<output_prefix>_<key>_document``.
        keys: JSON fields, one dataset each.
        append_eod: end each document with the tokenizer's end of document.
        workers: processes that encode; 1 encodes in this one.
        log_interval: documents between two progress lines.
        on_bad_row: ``skip`` or ``stop``.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    log_interval: int = 1000
    on_bad_row: str = SKIP


@dataclass(frozen=True)
class PrepareResult:
    """What was prepared.

    Attributes:
        prefixes: key -> the prefix to give to ``--data-path``.
        documents: in each dataset.
        tokens: key -> tokens.
        bad_rows: rows skipped, listed in :attr:`bad_rows_path`.
        bad_rows_path: None when every row was good.
    """

    prefixes: dict[str, str]
    documents: int
    tokens: dict[str, int]
    bad_rows: int
    bad_rows_path: str | None


@dataclass(frozen=True)
class EncodedBlock:
    """The documents of one block as they go into the files.

    Attributes:
        ids: ``[key]`` bytes of ids, end to end.
        lengths: ``[key]`` bytes of int32, tokens in each document.
        documents: their number.
        block: where they come from, without what it held.
        rows: rows of the block.
        bad: the rows that gave no document, by their number within the block.
    """

    ids: list[bytes]
    lengths: list[bytes]
    documents: int
    block: Block
    rows: int
    bad: list[tuple[int, str]] = field(default_factory=list)


class BlockEncoder:
    """Parses and encodes blocks of lines.

    Args:
        tokenizer: its ids are written as they are.
        keys: JSON fields.
        append_eod: end each document with ``tokenizer.eod``.
    """

    def __init__(self, tokenizer: TextTokenizer, keys: tuple[str, ...], append_eod: bool) -> None:
        self.tokenizer = tokenizer
        self.keys = list(keys)
        self.eod = tokenizer.eod if append_eod else None
        self.dtype = token_dtype(tokenizer.vocab_size)

    def encode(self, block: Block) -> EncodedBlock:
        """Encode the good rows; a row in which any key has no tokens is a bad one, so that keys stay aligned."""
        rows = read_rows(block, self.keys)
        bad = rows.bad
        columns = [self.tokenizer.encode_batch(column) for column in rows.texts]
        empty = {row for column in columns for row, ids in enumerate(column) if not ids}
        if empty:
            bad = sorted([*bad, *((rows.numbers[row], "no tokens") for row in empty)])
            columns = [[ids for row, ids in enumerate(column) if row not in empty] for column in columns]
        if self.eod is not None:
            for ids in chain.from_iterable(columns):
                ids.append(self.eod)
        lengths = [np.fromiter(map(len, column), dtype=np.int32, count=len(column)) for column in columns]
        packed = [
            np.fromiter(chain.from_iterable(column), dtype=self.dtype, count=int(counts.sum()))
            for column, counts in zip(columns, lengths, strict=True)
        ]
        return EncodedBlock(
            ids=[ids.tobytes() for ids in packed],
            lengths=[counts.tobytes() for counts in lengths],
            documents=len(columns[0]),
            block=replace(block, payload=(0, 0)),
            rows=rows.count,
            bad=bad,
        )


def dataset_prefix(output_prefix: str, key: str) -> str:
    """Megatron's name for the dataset of one key."""
    return f"{output_prefix}_{key}_document"


def prepare(settings: PrepareSettings, tokenizer: TextTokenizer) -> PrepareResult:
    """Prepare ``settings.inputs``; the datasets appear complete or not at all.

    Raises:
        DataError: an input cannot be read, a row is bad and the policy is ``stop``, no row is good, or a worker died.
    """
    started = time.monotonic()
    inputs = resolve_inputs(settings.inputs)
    sources = tuple(Source(file.path, file.bytes) for file in inputs)
    encoder = BlockEncoder(tokenizer, settings.keys, settings.append_eod)
    output = Path(settings.output_prefix)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            "The output folder cannot be made.", got=f"{output.parent}: {error.strerror}", fix="--output-prefix"
        ) from error
    prefixes = {key: dataset_prefix(settings.output_prefix, key) for key in settings.keys}
    progress = _Progress(settings, started)
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefixes[key], encoder.dtype)) for key in settings.keys]
        bad_rows = stack.enter_context(_BadRows(Path(f"{settings.output_prefix}.bad_rows.jsonl"), settings.on_bad_row))
        next_row = 1
        for encoded in _encode_all(read_blocks(inputs), encoder, settings.workers):
            first_row = encoded.block.first_row or next_row
            next_row = first_row + encoded.rows
            bad_rows.add([BadRow(encoded.block.path, first_row + number, reason) for number, reason in encoded.bad])
            for writer, ids, lengths in zip(writers, encoded.ids, encoded.lengths, strict=True):
                writer.add_documents(ids, lengths)
            progress.advance(encoded)
        documents = writers[0].documents
        if documents == 0:
            raise DataError(
                "No row gave a document; nothing was written.",
                got=bad_rows.summary() or "no rows at all",
                allowed=f"text under {', '.join(map(repr, settings.keys))}",
                fix="--json-keys, or mend the input",
            )
        bad_path = bad_rows.commit()
        for key, writer in zip(settings.keys, writers, strict=True):
            manifest_path(prefixes[key]).unlink(missing_ok=True)
            writer.commit()
            write_manifest(
                prefixes[key],
                Manifest(
                    tool=f"mindspeed_llm {__version__}",
                    key=key,
                    tokenizer=tokenizer.path,
                    tokenizer_hash=tokenizer.hash,
                    vocab_size=tokenizer.vocab_size,
                    eod=tokenizer.special_ids.get("eos_token"),
                    append_eod=settings.append_eod,
                    dtype=encoder.dtype.name,
                    documents=writer.documents,
                    tokens=writer.tokens,
                    bad_rows=bad_rows.count,
                    sources=sources,
                ),
            )
    tokens = {key: writer.tokens for key, writer in zip(settings.keys, writers, strict=True)}
    return PrepareResult(prefixes, documents, tokens, bad_rows.count, str(bad_path) if bad_path else None)


class _BadRows:
    """Counts bad rows and lists them in a file that exists only when there are some."""

    def __init__(self, path: Path, policy: str) -> None:
        self.path = path
        self.policy = policy
        self.reasons: Counter[str] = Counter()
        self._partial = Path(f"{path}.partial")
        self._stream = open(self._partial, "w", encoding="utf-8")  # noqa: SIM115 - closed by commit or __exit__

    @property
    def count(self) -> int:
        return self.reasons.total()

    def summary(self) -> str:
        """Reasons with their counts, the most frequent first."""
        return ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common(5))

    def add(self, rows: list[BadRow]) -> None:
        if rows and self.policy == STOP:
            first = rows[0]
            raise DataError(
                "A row gives no document.",
                got=f"{first.path}:{first.line}: {first.reason}",
                fix="mend the row, or --on-bad-row skip",
            )
        for row in rows:
            self.reasons[row.reason.split(":")[0]] += 1
            self._stream.write(json.dumps({"file": row.path, "line": row.line, "reason": row.reason}) + "\n")

    def commit(self) -> Path | None:
        """Make the list visible; remove the one of an earlier run when there is nothing to list."""
        self._stream.close()
        if self.count == 0:
            self.path.unlink(missing_ok=True)
            return None
        self._partial.replace(self.path)
        logger.warning("%d bad rows skipped (%s), listed in %s", self.count, self.summary(), self.path)
        return self.path

    def __enter__(self) -> _BadRows:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()
        self._partial.unlink(missing_ok=True)


class _Progress:
    """A log line every so many documents."""

    def __init__(self, settings: PrepareSettings, started: float) -> None:
        self.interval = max(1, settings.log_interval)
        self.started = started
        self.documents = 0
        self.bytes = 0

    def advance(self, encoded: EncodedBlock) -> None:
        before = self.documents
        self.documents += encoded.documents
        self.bytes += encoded.block.size
        if self.documents // self.interval > before // self.interval:
            seconds = max(time.monotonic() - self.started, 1e-9)
            logger.info(
                "Processed %d documents (%.0f docs/s, %.2f MB/s).",
                self.documents,
                self.documents / seconds,
                self.bytes / seconds / 1024 / 1024,
            )


_worker_encoder: BlockEncoder | None = None
"""The encoder of a worker process, inherited through the fork so that no tokenizer is read twice."""


def _adopt_encoder(encoder: BlockEncoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    # Rust threads inside each of the workers would fight over the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode_in_worker(block: Block) -> EncodedBlock:
    if _worker_encoder is None:
        raise RuntimeError("the worker was not initialised")
    return _worker_encoder.encode(block)


def _encode_all(blocks: Iterator[Block], encoder: BlockEncoder, workers: int) -> Iterator[EncodedBlock]:
    """Encode blocks in order; only a few are under way, so that memory does not grow with the input."""
    if workers <= 1:
        yield from map(encoder.encode, blocks)
        return
    window: deque[Future[EncodedBlock]] = deque()
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), initializer=_adopt_encoder, initargs=(encoder,)
    ) as pool:
        try:
            for block in blocks:
                window.append(pool.submit(_encode_in_worker, block))
                if len(window) > 2 * workers:
                    yield window.popleft().result()
            while window:
                yield window.popleft().result()
        except BrokenProcessPool as error:
            raise DataError("A worker process died, most likely for want of memory.", fix="fewer --workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
