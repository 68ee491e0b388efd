"""From the flags, or from a path, to a tokenizer."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.tokenizer.base import TextTokenizer
from mindspeed_llm.data.tokenizer.fast import load_fast
from mindspeed_llm.data.tokenizer.null import NullTokenizer
from mindspeed_llm.errors import DataError

HF_TYPES = ("PretrainedFromHF", "HuggingFaceTokenizer")
NULL_TYPE = "NullTokenizer"
TOKENIZER_TYPES = (*HF_TYPES, NULL_TYPE)

Tokenizer = NullTokenizer | TextTokenizer


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """Read a Hugging Face folder, or a ``tokenizer.json`` with whatever lies beside it.

    Raises:
        DataError: when there is no readable ``tokenizer.json``.
    """
    given = Path(path)
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise DataError(
            "There is no tokenizer at this path.",
            got=file,
            allowed="a Hugging Face folder with tokenizer.json, or that file",
            fix="--tokenizer-name-or-path; for a folder with other files only, save it once with "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    return load_fast(file, str(given))


def build_tokenizer(settings: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` and its companions ask for.

    Args:
        settings: the flags; without a type the path is taken as one of Hugging Face.
        vocab_size: ``--vocab-size``, for the null tokenizer.

    Raises:
        DataError: when the type is unknown or what it needs is missing or unreadable.
    """
    kind = settings.tokenizer_type or HF_TYPES[0]
    if kind == NULL_TYPE:
        if vocab_size is None:
            raise DataError("The null tokenizer needs a vocabulary size.", fix="--vocab-size")
        return NullTokenizer(vocab_size)
    if kind not in HF_TYPES:
        raise DataError("Unknown tokenizer type.", got=kind, allowed=", ".join(TOKENIZER_TYPES), fix="--tokenizer-type")
    if settings.tokenizer_name_or_path is None:
        raise DataError(f"{kind} needs a tokenizer.", fix="--tokenizer-name-or-path DIR, or --tokenizer-model FILE")
    return load_tokenizer(settings.tokenizer_name_or_path)
