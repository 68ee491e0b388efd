"""Tokenizers as preparation and training need them: ids, special ids and an identity. No torch, no transformers.

One file for each kind; the library of a kind is imported when the kind is built.
"""

from __future__ import annotations

from mindspeed_llm.data.tokenizer.base import TextTokenizer
from mindspeed_llm.data.tokenizer.build import (
    HF_TYPES,
    NULL_TYPE,
    TEXT_TYPES,
    TOKENIZER_TYPES,
    Tokenizer,
    build_tokenizer,
    load_tokenizer,
    tokenizer_file,
)
from mindspeed_llm.data.tokenizer.null import NullTokenizer

__all__ = [
    "HF_TYPES",
    "NULL_TYPE",
    "TEXT_TYPES",
    "TOKENIZER_TYPES",
    "NullTokenizer",
    "TextTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "load_tokenizer",
    "tokenizer_file",
]
