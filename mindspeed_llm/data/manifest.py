"""The manifest beside a prepared dataset: what it was made from, and with which tokenizer."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

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
    format: int = FORMAT


def manifest_path(prefix: str | Path) -> Path:
    """``<prefix>.manifest.json``."""
    return Path(f"{prefix}.manifest.json")


def write_manifest(prefix: str | Path, manifest: Manifest) -> None:
    """Write the manifest, complete or not at all."""
    path = manifest_path(prefix)
    partial = Path(f"{path}.partial")
    with open(partial, "w", encoding="utf-8") as stream:
        json.dump(asdict(manifest), stream, ensure_ascii=False, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


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
    path = manifest_path(prefix)
    if not path.is_file():
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        known = (stored["tokenizer_hash"], stored["eod"], stored["append_eod"], stored["tokenizer"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "The manifest cannot be read.", got=f"{path}: {error!r}", fix="prepare the data again"
        ) from error
    stored_hash, stored_eod, append_eod, stored_path = known
    if isinstance(tokenizer, NullTokenizer):
        if needs_eod and append_eod and stored_eod != tokenizer.eod:
            raise DataError(
                "Documents end with another id than the run looks for.",
                got=f"{tokenizer.eod}, as no tokenizer is named",
                allowed=f"{stored_eod}, as {path} says",
                fix="--tokenizer-name-or-path with the tokenizer of the data",
            )
        return
    fix = "--tokenizer-name-or-path with the tokenizer of the data, or prepare the data again"
    if stored_hash != tokenizer.hash:
        raise DataError(
            "The data was made with another tokenizer.",
            got=f"tokenizer {tokenizer.hash[:12]}",
            allowed=f"tokenizer {stored_hash[:12]} ({stored_path}), as {path} says",
            fix=fix,
        )
    if append_eod and stored_eod != tokenizer.eod:
        raise DataError(
            "The documents end with another token than this tokenizer's end of document.",
            got=f"eod {tokenizer.eod}",
            allowed=f"eod {stored_eod}, as {path} says",
            fix=fix,
        )
