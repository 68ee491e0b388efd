"""From the flags, or from a path, to a tokenizer."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.tokenizer.base import TextTokenizer
from mindspeed_llm.data.tokenizer.byte_level import load_byte_level_folder, load_gpt2
from mindspeed_llm.data.tokenizer.fast import load_fast
from mindspeed_llm.data.tokenizer.null import NullTokenizer
from mindspeed_llm.data.tokenizer.sentence_piece import load_sentence_piece, load_sentence_piece_folder
from mindspeed_llm.data.tokenizer.tiktoken_ranks import (
    GPT4_PATTERN,
    is_rank_file,
    load_rank_file,
    load_tekken,
    load_tiktoken,
)
from mindspeed_llm.data.tokenizer.word_piece import load_word_piece
from mindspeed_llm.errors import DataError

HF_TYPES = ("PretrainedFromHF", "HuggingFaceTokenizer")
NULL_TYPE = "NullTokenizer"
_SENTENCE_PIECE_TYPES = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
_FILE_TYPES = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
TEXT_TYPES = (*HF_TYPES, *_SENTENCE_PIECE_TYPES, "TikTokenizer", "MagistralTokenizer", *_FILE_TYPES)
TOKENIZER_TYPES = (*TEXT_TYPES, NULL_TYPE)

Tokenizer = NullTokenizer | TextTokenizer

_FILES = ("tokenizer.json", "tekken.json", "*.tiktoken", "tokenizer.model", "tiktoken.model", "vocab.json")
"""What makes a tokenizer of a folder; the first that is there is read."""


def tokenizer_file(folder: str | Path) -> Path | None:
    """The file that a tokenizer would be read from, or None where a folder holds none."""
    return next((file for pattern in _FILES for file in sorted(Path(folder).glob(pattern)) if file.is_file()), None)


def load_tokenizer(path: str | Path, settings: TokenizerConfig | None = None) -> TextTokenizer:
    """Read a Hugging Face folder, or the file of a tokenizer with whatever lies beside it.

    Args:
        path: a folder, or a ``tokenizer.json``, ``tekken.json``, sentencepiece model or tiktoken's file of ranks.
        settings: the ``tiktoken_*`` flags, for a file of ranks.

    Raises:
        DataError: when there is none, or it cannot be read.
    """
    settings = settings or TokenizerConfig()
    given = Path(path)
    file = tokenizer_file(given) if given.is_dir() else given
    if file is None or not file.is_file():
        raise DataError(
            "There is no tokenizer at this path.",
            got=given,
            allowed="a Hugging Face folder with tokenizer.json, tekken.json, tokenizer.model, a .tiktoken file, or "
            "vocab.json and merges.txt; or one of the first four",
            fix="--tokenizer-name-or-path",
        )
    if file.suffix == ".json":
        if file.name == "vocab.json":
            return load_byte_level_folder(file.parent)
        return load_tekken(file, str(given)) if "tekken" in file.name else load_fast(file, str(given))
    if is_rank_file(file):
        return load_rank_file(file, settings, str(given), GPT4_PATTERN)
    if given.is_dir():
        return load_sentence_piece_folder(file, given)
    return load_sentence_piece(file)


def build_tokenizer(settings: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` and its companions ask for.

    Args:
        settings: the flags; without a type, ``tokenizer_name_or_path`` is read as :func:`load_tokenizer` does.
        vocab_size: ``--vocab-size``, for ``NullTokenizer`` and ``TikTokenizer``.

    Raises:
        DataError: when the type is unknown or what it needs is missing or unreadable.
    """
    kind = settings.tokenizer_type or HF_TYPES[0]
    if kind == NULL_TYPE:
        if vocab_size is None:
            raise DataError("The null tokenizer needs a vocabulary size.", fix="--vocab-size")
        return NullTokenizer(vocab_size)
    if kind not in TOKENIZER_TYPES:
        raise DataError("Unknown tokenizer type.", got=kind, allowed=", ".join(TOKENIZER_TYPES), fix="--tokenizer-type")
    if kind in _FILE_TYPES:
        return _from_files(kind, settings)
    if settings.tokenizer_name_or_path is None:
        fix = (
            "--tokenizer-name-or-path DIR, or --tokenizer-model FILE" if kind in HF_TYPES else "--tokenizer-model FILE"
        )
        raise DataError(f"{kind} needs a tokenizer.", fix=fix)
    path = Path(settings.tokenizer_name_or_path)
    if kind in HF_TYPES:
        return load_tokenizer(path, settings)
    file = _file_of(kind, path)
    if kind == "TikTokenizer":
        return load_tiktoken(file, settings, vocab_size)
    if kind == "MagistralTokenizer":
        return load_tekken(file, str(path))
    return load_sentence_piece(file, begin=kind == "Llama2Tokenizer")


def _from_files(kind: str, settings: TokenizerConfig) -> TextTokenizer:
    """The kinds that are read from ``--vocab-file``, and GPT-2's also from ``--merge-file``."""
    if settings.vocab_file is None:
        raise DataError(f"{kind} needs a vocabulary.", fix="--vocab-file FILE")
    if kind != "GPT2BPETokenizer":
        return load_word_piece(Path(settings.vocab_file), lower_case=kind == "BertWordPieceLowerCase")
    if settings.merge_file is None:
        raise DataError(f"{kind} needs the merges of its vocabulary.", fix="--merge-file FILE")
    return load_gpt2(Path(settings.vocab_file), Path(settings.merge_file))


def _file_of(kind: str, path: Path) -> Path:
    """The file that was given, or the one of this kind in the folder that was."""
    if not path.is_dir():
        if not path.is_file():
            raise DataError("There is no tokenizer at this path.", got=path, fix="--tokenizer-model FILE")
        return path
    patterns = {
        "TikTokenizer": ("*.tiktoken", "tokenizer.model"),
        "MagistralTokenizer": ("tekken.json", "tekken*.json"),
    }
    found = [
        file for pattern in patterns.get(kind, ("tokenizer.model", "*.model")) for file in sorted(path.glob(pattern))
    ]
    if not found:
        raise DataError(f"The folder has no file for {kind}.", got=path, fix="--tokenizer-model FILE")
    return found[0]
