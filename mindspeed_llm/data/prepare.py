"""Preparation: text files -> Megatron's indexed datasets, one per key.

The parent plans and writes, worker processes read and encode (``data.encode``). Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_llm import __version__
from mindspeed_llm.data.bad_rows import SKIP, BadRows
from mindspeed_llm.data.encode import BlockEncoder, EncodedBlock, encode_blocks
from mindspeed_llm.data.indexed import IndexedWriter, idx_path
from mindspeed_llm.data.manifest import Manifest, Source, commit_dataset, shard_prefix
from mindspeed_llm.data.rows import BadRow
from mindspeed_llm.data.sentences import sentence_splitter
from mindspeed_llm.data.sources import InputFile, read_blocks, resolve_inputs
from mindspeed_llm.data.tokenizer import Tokenizer
from mindspeed_llm.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrepareSettings:
    """What to prepare and how.

    Attributes:
        inputs: files, folders, patterns, or ``-`` for stdin, read in this order (see ``data.sources``).
        output_prefix: datasets are ``<output_prefix>_<key>_document``; the prefix is taken as it is.
        keys: fields of a row, one dataset each.
        append_eod: end each document with the tokenizer's end of document.
        workers: processes that encode; 1 encodes in this one.
        log_interval: documents between two progress lines.
        on_bad_row: ``skip`` or ``stop``.
        pad_to_multiple_of: pad each document to a multiple of this many tokens.
        split_sentences: write each sentence as a sequence of its document; datasets are ``..._sentence``.
        keep_newlines: keep the white space between sentences.
        lang: of the sentences.
        max_samples: stop after this many documents.
        shard: prepare one part of the input (number from 0, count) under the prefix of that shard.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    log_interval: int = 1000
    on_bad_row: str = SKIP
    pad_to_multiple_of: int = 1
    split_sentences: bool = False
    keep_newlines: bool = False
    lang: str = "english"
    max_samples: int | None = None
    shard: tuple[int, int] | None = None

    @property
    def prefix(self) -> str:
        """What the names of all files begin with."""
        return shard_prefix(self.output_prefix, self.shard)

    @property
    def level(self) -> str:
        """What a sequence is: the last part of Megatron's name of a dataset."""
        return "sentence" if self.split_sentences else "document"


@dataclass(frozen=True)
class PrepareResult:
    """What was prepared.

    Attributes:
        prefixes: key -> the prefix to give to ``--data-path``.
        documents: in each dataset.
        tokens: key -> tokens.
        text_bytes: key -> bytes of UTF-8 that the documents were made from.
        bad_rows: rows skipped, listed in :attr:`bad_rows_path`.
        bad_rows_path: None when every row was good.
        bad_reasons: why rows were skipped -> how many.
    """

    prefixes: dict[str, str]
    documents: int
    tokens: dict[str, int]
    text_bytes: dict[str, int]
    bad_rows: int
    bad_rows_path: str | None
    bad_reasons: Mapping[str, int]


def dataset_prefix(output_prefix: str, key: str, level: str = "document") -> str:
    """Megatron's name for the dataset of one key."""
    return f"{output_prefix}_{key}_{level}"


def prepare(settings: PrepareSettings, tokenizer: Tokenizer) -> PrepareResult:
    """Prepare ``settings.inputs``; the datasets appear complete or not at all.

    Raises:
        DataError: an input cannot be read, a row is bad and the policy is ``stop``, no row is good, a worker died, or
            another process prepares the same datasets.
    """
    files = resolve_inputs(settings.inputs)
    stamps = _stamps(files)
    encoder = _encoder(settings, tokenizer)
    make_parent(settings.output_prefix)
    prefixes = {key: dataset_prefix(settings.prefix, key, settings.level) for key in settings.keys}
    text_bytes = dict.fromkeys(settings.keys, 0)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(prefix, encoder.dtype, split=settings.split_sentences))
            for prefix in prefixes.values()
        ]
        bad_rows = stack.enter_context(BadRows(settings.prefix, settings.on_bad_row))
        for encoded, bad in _encode(files, settings, encoder):
            bad_rows.add(bad)
            for writer, column in zip(writers, encoded.columns, strict=True):
                sequences = column.counts.tobytes() if settings.split_sentences else None
                writer.add_documents(column.ids.tobytes(), column.lengths.tobytes(), sequences)
            for key, size in zip(settings.keys, encoded.text_bytes, strict=True):
                text_bytes[key] += size
        _check_unchanged(files, stamps)
        documents = writers[0].documents
        if documents == 0 and settings.shard is None:
            raise _no_document(bad_rows, settings.keys)
        common = Manifest(
            tool=f"mindspeed_llm {__version__}",
            key="",
            tokenizer=tokenizer.path,
            tokenizer_hash=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.special_ids.get("eos_token"),
            append_eod=settings.append_eod,
            dtype=encoder.dtype.name,
            documents=documents,
            tokens=0,
            bad_rows=bad_rows.count,
            sources=tuple(Source(file.path, file.bytes) for file in files),
            pad_to_multiple_of=settings.pad_to_multiple_of,
            split_sentences=settings.split_sentences,
            keep_newlines=settings.keep_newlines,
            lang=settings.lang if settings.split_sentences else None,
            shard=settings.shard,
        )
        for writer in writers:
            writer.complete()
        for prefix in prefixes.values():
            # From here on the keys of an earlier preparation are gone, so that nobody reads old and new ones together.
            idx_path(prefix).unlink(missing_ok=True)
        bad_path = bad_rows.commit()
        for key, writer in zip(settings.keys, writers, strict=True):
            commit_dataset(writer, replace(common, key=key, tokens=writer.tokens, text_bytes=text_bytes[key]))
    tokens = {key: writer.tokens for key, writer in zip(settings.keys, writers, strict=True)}
    path = str(bad_path) if bad_path else None
    return PrepareResult(prefixes, documents, tokens, text_bytes, bad_rows.count, path, dict(bad_rows.reasons))


def _stamps(files: Sequence[InputFile]) -> list[tuple[int, int] | None]:
    """Sizes and times of change; None for what is no file any more, such as standard input."""
    return [_stamp(file.path) for file in files]


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns


def _check_unchanged(files: Sequence[InputFile], before: Sequence[tuple[int, int] | None]) -> None:
    for file, old, new in zip(files, before, _stamps(files), strict=True):
        if old != new:
            raise DataError(
                "The data changed while it was prepared.", got=file.path, fix="start again when it is written"
            )


def _no_document(bad_rows: BadRows, keys: Sequence[str]) -> DataError:
    return DataError(
        "No row gave a document; nothing was written.",
        got=bad_rows.summary() or "no rows at all",
        allowed=f"text under {', '.join(map(repr, keys))}",
        fix="--json-keys, or mend the input; a .json file is one array of objects, or an object on each line",
    )


def _encoder(settings: PrepareSettings, tokenizer: Tokenizer) -> BlockEncoder:
    splitter = None
    if settings.split_sentences:
        splitter = sentence_splitter(settings.lang, keep_newlines=settings.keep_newlines)
    return BlockEncoder(
        tokenizer,
        settings.keys,
        append_eod=settings.append_eod,
        pad_to_multiple_of=settings.pad_to_multiple_of,
        splitter=splitter,
    )


def make_parent(output_prefix: str) -> None:
    """Make the folder of what begins with ``output_prefix``.

    Raises:
        DataError: it cannot be made.
    """
    parent = Path(f"{output_prefix}_").parent  # "dir/" names files in dir
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            "The output folder cannot be made.", got=f"{parent}: {error.strerror}", fix="--output-prefix"
        ) from error


def _encode(
    files: tuple[InputFile, ...], settings: PrepareSettings, encoder: BlockEncoder
) -> Iterator[tuple[EncodedBlock, list[BadRow]]]:
    """Encoded blocks and their bad rows, up to ``max_samples`` documents."""
    progress = _Progress(settings.log_interval)
    left = settings.max_samples
    next_row = 1
    blocks = encode_blocks(read_blocks(files, settings.shard or (0, 1), keys=settings.keys), encoder, settings.workers)
    for block, encoded in blocks:
        if left is not None and encoded.documents >= left:
            encoded = encoder.encode(block, left)
        first = next_row if block.first_row is None else block.first_row
        next_row = first + encoded.rows
        bad = [BadRow(block.path, first + row, reason) for row, reason in encoded.bad]
        yield encoded, bad
        progress.advance(encoded.documents, block.size)
        if left is not None:
            left -= encoded.documents
            if left == 0:
                blocks.close()
                return


class _Progress:
    """A log line every so many documents."""

    def __init__(self, interval: int) -> None:
        self.interval = max(1, interval)
        self.started = time.monotonic()
        self.documents = 0
        self.bytes = 0

    def advance(self, documents: int, size: int) -> None:
        before = self.documents
        self.documents += documents
        self.bytes += size
        if self.documents // self.interval > before // self.interval:
            seconds = max(time.monotonic() - self.started, 1e-9)
            logger.info(
                "Processed %d documents (%.0f docs/s, %.2f MB/s).",
                self.documents,
                self.documents / seconds,
                self.bytes / seconds / 1024 / 1024,
            )
