"""The manifest beside a prepared dataset: what it was made from, and with which tokenizer."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_llm.data.indexed import IndexedWriter, idx_path
from mindspeed_llm.data.tokenizer import NullTokenizer, Tokenizer
from mindspeed_llm.errors import DataError

FORMAT = 1


@dataclass(frozen=True)
class Source:
    """An input file and its size in bytes."""

    path: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """What a dataset was made from.

    Attributes:
        tool: package and version that wrote it.
        key: JSON key of the text.
        tokenizer: path as it was given.
        tokenizer_hash: identity, see ``TextTokenizer.hash``.
        vocab_size: ids of the tokenizer.
        eod: end-of-document id, or None when the tokenizer names none.
        append_eod: whether each document ends with ``eod``.
        dtype: what ids are stored as.
        documents: their number.
        tokens: their number.
        bad_rows: rows skipped.
        sources: input files, in order.
        text_bytes: bytes of UTF-8 that the documents were made from.
        pad_to_multiple_of: each document was padded to a multiple of this many tokens.
        split_sentences: documents are split into sentences.
        keep_newlines: the white space between these is kept.
        lang: their language; None where documents are not split.
        shard: the part of the input, from 0, and the number of parts; None for the whole.
    """

    tool: str
    key: str
    tokenizer: str
    tokenizer_hash: str
    vocab_size: int
    eod: int | None
    append_eod: bool
    dtype: str
    documents: int
    tokens: int
    bad_rows: int
    sources: tuple[Source, ...]
    text_bytes: int = 0
    pad_to_multiple_of: int = 1
    split_sentences: bool = False
    keep_newlines: bool = False
    lang: str | None = None
    shard: tuple[int, int] | None = None
    format: int = FORMAT


def manifest_path(prefix: str | Path) -> Path:
    """``<prefix>.manifest.json``."""
    return Path(f"{prefix}.manifest.json")


def write_manifest(prefix: str | Path, manifest: Manifest) -> None:
    """Write the manifest, complete or not at all."""
    path = manifest_path(prefix)
    partial = Path(f"{path}.partial")
    try:
        # A name that is no UTF-8 holds surrogates, which become the escapes that JSON has for them.
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as stream:
            json.dump(asdict(manifest), stream, ensure_ascii=False, indent=2)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def shard_prefix(output_prefix: str, shard: tuple[int, int] | None) -> str:
    """The output prefix of one shard (number from 0, count); that of the whole when there is none."""
    return output_prefix if shard is None else f"{output_prefix}.shard-{shard[0]:05d}-of-{shard[1]:05d}"


def commit_dataset(writer: IndexedWriter, manifest: Manifest | None) -> None:
    """Make a dataset visible together with its manifest, never with that of an earlier dataset of the same name."""
    idx_path(writer.prefix).unlink(missing_ok=True)
    if manifest is None:
        manifest_path(writer.prefix).unlink(missing_ok=True)
    else:
        write_manifest(writer.prefix, manifest)
    writer.commit()


def read_manifest(prefix: str | Path) -> Manifest | None:
    """The manifest of a dataset; None for data of another tool, which has none.

    Raises:
        DataError: the manifest is unreadable.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored["sources"] = tuple(Source(**source) for source in stored["sources"])
        stored["shard"] = tuple(stored["shard"]) if stored.get("shard") else None
        return Manifest(**stored)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "The manifest cannot be read.", got=f"{path}: {error!r}", fix="prepare the data again"
        ) from error


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer, *, needs_eod: bool = False) -> None:
    """Refuse data that another tokenizer made.

    Data without a manifest (Megatron's own tool) passes, and so does a null tokenizer, which claims nothing about text,
    unless the run looks for the ends of documents.

    Args:
        prefix: of the data.
        tokenizer: of the run.
        needs_eod: a flag of the run depends on where documents end.

    Raises:
        DataError: when the manifest is unreadable, or names another tokenizer or another end of document.
    """
    stored = read_manifest(prefix)
    if stored is None:
        return
    path = manifest_path(prefix)
    if isinstance(tokenizer, NullTokenizer):
        if needs_eod and stored.append_eod and stored.eod != tokenizer.eod:
            raise DataError(
                "Documents end with another id than the run looks for.",
                got=f"{tokenizer.eod}, as no tokenizer is named",
                allowed=f"{stored.eod}, as {path} says",
                fix="--tokenizer-name-or-path with the tokenizer of the data",
            )
        return
    fix = "--tokenizer-name-or-path with the tokenizer of the data, or prepare the data again"
    if stored.tokenizer_hash != tokenizer.hash:
        raise DataError(
            "The data was made with another tokenizer.",
            got=f"tokenizer {tokenizer.hash[:12]}",
            allowed=f"tokenizer {stored.tokenizer_hash[:12]} ({stored.tokenizer}), as {path} says",
            fix=fix,
        )
    if stored.append_eod and stored.eod != tokenizer.eod:
        raise DataError(
            "The documents end with another token than this tokenizer's end of document.",
            got=f"eod {tokenizer.eod}",
            allowed=f"eod {stored.eod}, as {path} says",
            fix=fix,
        )
