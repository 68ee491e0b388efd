"""Which tokenizer the data was, or will be, cut with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.config.option import option


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and how it is read."""

    tokenizer_type: (
        Literal[
            "PretrainedFromHF",
            "HuggingFaceTokenizer",
            "GPTSentencePieceTokenizer",
            "SentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MagistralTokenizer",
            "GPT2BPETokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "NullTokenizer",
        ]
        | None
    ) = None
    """Kind of tokenizer. The first two read what a Hugging Face folder holds and are the default; the sentencepiece
    kinds, TikTokenizer and MagistralTokenizer read --tokenizer-model, the next three --vocab-file, and NullTokenizer
    is none but --vocab-size."""

    tokenizer_name_or_path: str | None = option(None, flags=("--tokenizer-model",))
    """Folder of a Hugging Face tokenizer; or a tokenizer.json, sentencepiece model, tekken.json or tiktoken file."""

    vocab_file: str | None = None
    """Vocabulary of GPT2BPETokenizer (JSON) or of the BertWordPiece kinds (a token a line)."""

    merge_file: str | None = None
    """Merges of GPT2BPETokenizer."""

    tiktoken_pattern: str | None = None
    """How a tiktoken file's text is cut into words: v1 or v2 (Megatron-LM's; v2 is TikTokenizer's default), or a
    regular expression."""

    tiktoken_num_special_tokens: int | None = None
    """Ids that Megatron-LM's JSON of ranks leaves to special tokens, before the ranks; 1000 by default."""

    tiktoken_special_tokens: tuple[str, ...] | None = option(None, flags=("--tokenizer-special-tokens",))
    """Special tokens of a tiktoken file, in the order of their ids: before the ranks in Megatron-LM's JSON, after them
    in a plain file, where <|endoftext|> alone is the default."""
