"""Raw files in ``--data-path``: prepared once, kept in a folder whose name is a key of all that decides its content.

    <folder of the file, or --data-cache-path>/_prepared/en.jsonl-3f0c.../data_text_document.bin, .idx, .manifest.json

Who prepares is settled by ``data.once``, before there are process groups. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_llm.data.indexed import idx_path, token_dtype
from mindspeed_llm.data.once import PACE, Pace, once
from mindspeed_llm.data.prepare import PrepareSettings, dataset_prefix, prepare
from mindspeed_llm.data.sources import resolve_inputs
from mindspeed_llm.data.tokenizer import NullTokenizer, TextTokenizer, Tokenizer
from mindspeed_llm.errors import DataError

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the folder and its content. Raise it when the same input would give other files."""

PIECE = 4096
_PIECES_OF_A_FILE = 64
_PIECES_OF_ALL = 16384
"""A folder of very many files would take longer to look at than to open; sizes and times say most of it."""

_KEY_DIGITS = 16
_FOLDER = "_prepared"
"""Begins with an underscore so that it is not taken for data where it lies in a folder of data (``data.sources``)."""

_NAME = "data"
_RECORD = "sources.json"


@dataclass(frozen=True)
class RawSettings:
    """How raw files become datasets.

    Attributes:
        key: field of a row that holds the text.
        cache: folder for what is prepared; None means beside the file.
        verify: read the whole of the files and compare them with those that were prepared.
        workers: processes that encode.
    """

    key: str = "text"
    cache: str | None = None
    verify: bool = False
    workers: int = 1


@dataclass(frozen=True)
class _File:
    """What tells a file from another without reading the whole of it."""

    path: str
    bytes: int
    mtime_ns: int
    sample: str


def is_raw(word: str) -> bool:
    """Whether a word of ``--data-path`` names raw data: it is there, and is no prefix of a prepared dataset.

    Where both are there, as in ``X`` and ``X.idx``, it is the prefix: what worked on prepared data goes on as it was.
    """
    if Path(word).suffix in (".bin", ".idx"):
        return False
    return os.path.exists(word) and not idx_path(word).is_file()


def require_tokenizer(word: str, tokenizer: Tokenizer) -> TextTokenizer:
    """``tokenizer``, which must be one that reads text.

    Raises:
        DataError: it is none.
    """
    if isinstance(tokenizer, NullTokenizer):
        raise DataError("Raw data needs a tokenizer.", got=word, fix="--tokenizer-name-or-path with that of the model")
    return tokenizer


def prepared_prefix(word: str, tokenizer: Tokenizer, settings: RawSettings, pace: Pace = PACE) -> str:
    """The prefix of the dataset made from ``word``, which is prepared now unless it was before.

    All processes of a run call this. One of those that share the storage prepares, the others wait. Each document ends
    with the tokenizer's end of document.

    Args:
        word: a raw file, or a folder of them, see :func:`is_raw`.
        tokenizer: that of the run.
        settings: see :class:`RawSettings`.
        pace: of waiting.

    Raises:
        DataError: there is no tokenizer, the files cannot be prepared, changed meanwhile, or are not those that were
            prepared; or there is no place to write to.
    """
    tokenizer = require_tokenizer(word, tokenizer)
    files = _look_at(word)
    path = Path(os.path.abspath(word))
    root = Path(settings.cache or path.parent, _FOLDER)
    folder = root / f"{path.name[:100]}-{_key(files, tokenizer, settings)[:_KEY_DIGITS]}"
    if folder.is_dir():
        if settings.verify:
            _verify(files, folder)
    else:
        with _writing(root):
            once(folder, lambda partial: _make(word, files, partial, folder, tokenizer, settings), pace)
    return dataset_prefix(str(folder / _NAME), settings.key)


def _make(
    word: str, files: list[_File], partial: Path, folder: Path, tokenizer: TextTokenizer, settings: RawSettings
) -> None:
    like = [name for name in os.listdir(folder.parent) if len(name) == len(folder.name)]
    older = sorted(name for name in like if name.startswith(folder.name[:-_KEY_DIGITS]))
    logger.info("preparing %s (%d bytes) into %s", word, sum(file.bytes for file in files), folder)
    if older:
        logger.info("kept from earlier contents or settings, to be removed by hand: %s", ", ".join(older))
    contents = {file.path: _sha256(file.path) for file in files}
    plan = PrepareSettings(
        inputs=(word,),
        output_prefix=str(partial / _NAME),
        keys=(settings.key,),
        append_eod=True,
        workers=settings.workers,
    )
    with _writing(folder.parent):
        result = prepare(plan, tokenizer)
        record = {"files": [{**asdict(file), "sha256": contents[file.path]} for file in files]}
        text = json.dumps(record, ensure_ascii=False, indent=2) + "\n"
        (partial / _RECORD).write_text(text, encoding="utf-8", errors="backslashreplace")  # names need not be UTF-8
    if _look_at(word) != files:
        raise DataError("The data changed while it was prepared.", got=word, fix="start again when it is written")
    logger.info("prepared %s: %d documents, %d tokens", word, result.documents, result.tokens[settings.key])
    if result.bad_rows_path is not None:
        logger.warning("bad rows of %s are listed in %s", word, folder / Path(result.bad_rows_path).name)


def _look_at(word: str) -> list[_File]:
    paths = [file.path for file in resolve_inputs((word,))]
    pieces = min(_PIECES_OF_A_FILE, _PIECES_OF_ALL // max(1, len(paths)))
    with _reading():
        return [_File(path, (stat := os.stat(path)).st_size, stat.st_mtime_ns, _sample(path, pieces)) for path in paths]


def _sample(path: str, pieces: int) -> str:
    """Hash of the first, the last and ``pieces`` evenly spaced parts between them; of all of it where that is less."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        last = os.fstat(stream.fileno()).st_size - PIECE
        if last < PIECE * (pieces + 1):
            return hashlib.file_digest(stream, "sha256").hexdigest()
        for number in range(pieces + 2):
            stream.seek(last * number // (pieces + 1))
            digest.update(stream.read(PIECE))
    return digest.hexdigest()


def _key(files: list[_File], tokenizer: TextTokenizer, settings: RawSettings) -> str:
    """Identity of what would be prepared. Names are no part of it, nor is the place."""
    parts = {
        "format": FORMAT,
        "files": [(file.bytes, file.mtime_ns, file.sample) for file in files],
        "tokenizer": (tokenizer.hash, tokenizer.eod, token_dtype(tokenizer.vocab_size).name),
        "key": settings.key,
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _verify(files: list[_File], folder: Path) -> None:
    """Compare whole files with what was prepared.

    Raises:
        DataError: a file differs, or the record cannot be read.
    """
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        known = [file["sha256"] for file in record["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("The record of prepared data cannot be read.", got=error, fix=f"remove {folder}") from error
    # The key holds number and order of the files.
    for file, before in zip(files, known, strict=True):
        now = _sha256(file.path)
        if now != before:
            raise DataError(
                "The file is not the one that was prepared, though size, time and sampled parts are the same.",
                got=f"{file.path}: sha256 {now[:12]}",
                allowed=f"sha256 {before[:12]}, as {folder / _RECORD} says",
                fix=f"remove {folder}, and the file is prepared anew",
            )


def _sha256(path: str) -> str:
    with _reading(), open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _reading() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DataError("Raw data cannot be read.", got=f"{error.filename}: {error.strerror}") from error


@contextmanager
def _writing(root: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            "What is prepared from raw data cannot be written.",
            got=f"{root}: {error.strerror or error}",
            allowed="a folder to write to, with room for two or four bytes a token",
            fix="--data-cache-path DIR",
        ) from error
