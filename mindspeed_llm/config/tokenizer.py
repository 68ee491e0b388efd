"""Which tokenizer the data was, or will be, cut with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.config.option import option


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and how it is read."""

    tokenizer_type: Literal["PretrainedFromHF", "HuggingFaceTokenizer", "NullTokenizer"] | None = None
    """Kind of tokenizer: read from a Hugging Face folder (both first names), or none but a vocabulary size."""

    tokenizer_name_or_path: str | None = option(None, flags=("--tokenizer-model",))
    """Folder of a Hugging Face tokenizer, or its tokenizer.json."""
