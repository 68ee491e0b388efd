"""A sentencepiece model, read by its own library: a conversion to another differs in runs of spaces."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_llm.data.tokenizer.base import TextTokenizer
from mindspeed_llm.data.tokenizer.special import read_settings, special_ids
from mindspeed_llm.errors import DataError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_FRAMED_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer", "GemmaTokenizerFast")
"""Classes of transformers that put a BOS first unless their settings say otherwise."""


class SentencePieceTokenizer(TextTokenizer):
    """Ids of the sentencepiece library; text that spells a special token stays text.

    Args:
        path: as :class:`TextTokenizer`.
        processor: the model.
        special_ids: as :class:`TextTokenizer`.
        before: ids put before every text.
        after: ids put after every text.
    """

    def __init__(
        self,
        path: str,
        processor: SentencePieceProcessor,
        special_ids: Mapping[str, int],
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        super().__init__(path, processor.get_piece_size(), special_ids)
        self.processor = processor
        self.before = list(before)
        self.after = list(after)

    def content(self) -> dict[str, object]:
        """The model's bytes, and what is put around a text."""
        model = hashlib.sha256(self.processor.serialized_model_proto()).hexdigest()
        return {"sentencepiece": model, "before": self.before, "after": self.after}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts -> ids of each."""
        # One thread: preparation has a process for each core already.
        encoded: list[list[int]] = self.processor.encode(list(texts), out_type=int, num_threads=1)
        if not self.before and not self.after:
            return encoded
        return [[*self.before, *ids, *self.after] for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids -> text; control tokens give none."""
        return self.processor.decode(list(ids))


def load_sentence_piece(file: Path, *, begin: bool = False) -> SentencePieceTokenizer:
    """A model file by itself.

    Args:
        file: the ``.model``.
        begin: put the BOS before every text, as Megatron-LM's ``Llama2Tokenizer`` does.

    Raises:
        DataError: it is missing or no such model, or it has no BOS to put first.
    """
    processor = _processor(file)
    ids = _own_special_ids(processor)
    if begin and "bos_token" not in ids:
        raise DataError("The model has no BOS.", got=file, fix="--tokenizer-type GPTSentencePieceTokenizer")
    return SentencePieceTokenizer(str(file), processor, ids, before=[ids["bos_token"]] if begin else [])


def load_sentence_piece_folder(file: Path, folder: Path) -> SentencePieceTokenizer:
    """A model in a Hugging Face folder without ``tokenizer.json``.

    ``tokenizer_config.json`` decides about BOS and EOS around a text and about the special tokens, as in transformers.

    Raises:
        DataError: a file cannot be read.
    """
    processor = _processor(file)
    settings = read_settings(folder / "tokenizer_config.json")
    unknown = processor.unk_id()

    def token_to_id(token: str) -> int | None:
        found = processor.piece_to_id(token)
        return None if found == unknown and token != processor.id_to_piece(unknown) else found

    ids = {**_own_special_ids(processor), **special_ids(folder, token_to_id)}
    framed = settings.get("tokenizer_class") in _FRAMED_CLASSES
    before = ["bos_token"] if settings.get("add_bos_token", framed) and "bos_token" in ids else []
    after = ["eos_token"] if settings.get("add_eos_token") and "eos_token" in ids else []
    return SentencePieceTokenizer(
        str(folder), processor, ids, before=[ids[role] for role in before], after=[ids[role] for role in after]
    )


def _processor(file: Path) -> SentencePieceProcessor:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise DataError(
            "A sentencepiece model needs the package sentencepiece.", fix="pip install sentencepiece"
        ) from error
    if not file.is_file():
        raise DataError("The sentencepiece model does not exist.", got=file, fix="--tokenizer-model FILE")
    try:
        return SentencePieceProcessor(model_file=str(file))
    except Exception as error:
        raise DataError(
            "This is no sentencepiece model.", got=f"{file}: {error}", fix="--tokenizer-model FILE"
        ) from error


def _own_special_ids(processor: SentencePieceProcessor) -> dict[str, int]:
    ids = {
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "pad_token": processor.pad_id(),
        "unk_token": processor.unk_id(),
    }
    return {role: number for role, number in ids.items() if number >= 0}
