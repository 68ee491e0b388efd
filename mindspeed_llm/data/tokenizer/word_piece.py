"""BERT's word pieces from a ``vocab.txt``."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.data.tokenizer.fast import FastTokenizer
from mindspeed_llm.errors import DataError

_SPECIAL = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def load_word_piece(vocab_file: Path, *, lower_case: bool) -> FastTokenizer:
    """Megatron's ``BertWordPieceLowerCase`` and ``BertWordPieceCase``.

    A text gets neither ``[CLS]`` nor ``[SEP]``; ``[SEP]`` ends a document, as in megatron-core's tokenizer.

    Args:
        vocab_file: a token a line, its id the line's number from 0.
        lower_case: text is lower-cased and loses its accents first.

    Raises:
        DataError: the file is missing or no such vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    if not vocab_file.is_file():
        raise DataError("A file of the tokenizer does not exist.", got=vocab_file, fix="--vocab-file")
    try:
        lines = vocab_file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except ValueError as error:
        raise DataError("The vocabulary cannot be read.", got=f"{vocab_file}: {error}", fix="--vocab-file") from error
    vocab = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    missing = [token for token in _SPECIAL.values() if token not in vocab]
    if missing:
        raise DataError(
            "This is no vocabulary of BERT.",
            got=f"{vocab_file} without {', '.join(missing)}",
            allowed="a text file with a token a line",
            fix="--vocab-file",
        )
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(list(_SPECIAL.values()))  # pyright: ignore[reportUnknownMemberType]
    ids = {role: vocab[token] for role, token in _SPECIAL.items()}
    return FastTokenizer(
        str(vocab_file), backend, {**ids, "bos_token": ids["cls_token"], "eos_token": ids["sep_token"]}
    )
