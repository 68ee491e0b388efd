"""``vocab.json`` and ``merges.txt``: byte-level BPE as GPT-2 and Qwen2 publish it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from mindspeed_llm.data.byte_bpe import QWEN2
from mindspeed_llm.data.tokenizer.fast import FastTokenizer
from mindspeed_llm.data.tokenizer.special import read_settings, special_ids
from mindspeed_llm.errors import DataError

END_OF_TEXT = "<|endoftext|>"
_GPT2_CLASSES = ("", "GPT2Tokenizer", "GPT2TokenizerFast")
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")


def load_gpt2(vocab_file: Path, merge_file: Path) -> FastTokenizer:
    """GPT-2's tokenizer, as Megatron's ``GPT2BPETokenizer``: ``<|endoftext|>`` ends a document and is found in text.

    Raises:
        DataError: a file is missing or no such file, or the vocabulary has no ``<|endoftext|>``.
    """
    tokenizer = _build(vocab_file, merge_file, str(vocab_file), qwen2=False)
    end = tokenizer.backend.token_to_id(END_OF_TEXT)
    if end is None:
        raise DataError(
            f"The vocabulary has no {END_OF_TEXT}.", got=vocab_file, fix="--vocab-file of a GPT-2 tokenizer"
        )
    tokenizer.backend.add_special_tokens([END_OF_TEXT])  # pyright: ignore[reportUnknownMemberType]
    return FastTokenizer(str(vocab_file), tokenizer.backend, {"eos_token": end, "bos_token": end})


def load_byte_level_folder(folder: Path) -> FastTokenizer:
    """A Hugging Face folder with ``vocab.json`` and ``merges.txt`` only.

    How such a folder cuts text into words is not in it: ``tokenizer_class`` of ``tokenizer_config.json`` says it, and
    GPT-2's way is taken where there is none.

    Raises:
        DataError: a file cannot be read, or the class is none of GPT-2's and Qwen2's.
    """
    settings = read_settings(folder / "tokenizer_config.json")
    name = str(settings.get("tokenizer_class") or "")
    if name not in (*_GPT2_CLASSES, *_QWEN2_CLASSES):
        raise DataError(
            "vocab.json and merges.txt do not say how this class of tokenizers cuts text.",
            got=f"{folder}: {name}",
            allowed=", ".join((*_GPT2_CLASSES[1:], *_QWEN2_CLASSES)),
            fix="write a tokenizer.json once, with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    tokenizer = _build(folder / "vocab.json", folder / "merges.txt", str(folder), qwen2=name in _QWEN2_CLASSES)
    backend = tokenizer.backend
    _add_tokens(tokenizer, settings, read_settings(folder / "added_tokens.json"))
    ids = special_ids(folder, backend.token_to_id)
    end = backend.token_to_id(END_OF_TEXT)
    if end is not None:
        ids.setdefault("eos_token", end)
    return FastTokenizer(str(folder), backend, ids)


def _build(vocab_file: Path, merge_file: Path, shown: str, *, qwen2: bool) -> FastTokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    for file, flag in ((vocab_file, "--vocab-file"), (merge_file, "--merge-file")):
        if not file.is_file():
            raise DataError("A file of the tokenizer does not exist.", got=file, fix=flag)
    try:
        vocab, merges = models.BPE.read_file(str(vocab_file), str(merge_file))
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:
        raise DataError(
            "The vocabulary and merges cannot be read.",
            got=f"{vocab_file}, {merge_file}: {error}",
            allowed="a JSON object of tokens, and a text file of merges that give tokens",
            fix="--vocab-file, --merge-file",
        ) from error
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not qwen2)
    if qwen2:
        split = pre_tokenizers.Split(Regex(QWEN2), behavior="isolated")
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    return FastTokenizer(shown, backend, {})


def _add_tokens(tokenizer: FastTokenizer, settings: dict[str, object], added: dict[str, object]) -> None:
    """Add the tokens beside the vocabulary: a special token is found in any text, before text is cut."""
    from tokenizers import AddedToken

    tokens: dict[int, AddedToken] = {
        cast("int", number): AddedToken(text, special=True) for text, number in added.items()
    }
    decoder = cast("dict[str, dict[str, object]]", settings.get("added_tokens_decoder") or {})
    for number, token in decoder.items():
        flags = {key: bool(token.get(key)) for key in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        tokens[int(number)] = AddedToken(str(token["content"]), **flags)
    ordered = [tokens[number] for number in sorted(tokens)]
    if all(token.content != END_OF_TEXT for token in ordered):
        # Both classes have it as the token of unknown text, if nothing else.
        ordered.append(AddedToken(END_OF_TEXT, special=True))
    tokenizer.backend.add_tokens(ordered)  # pyright: ignore[reportUnknownMemberType]
    for number, token in tokens.items():
        found = tokenizer.backend.token_to_id(token.content)
        if number != found:
            raise DataError(
                "An added token cannot have its id: the ids before it are not all given.",
                got=f"{tokenizer.path}: {token.content} is {number}, and would be {found}",
                fix="write a tokenizer.json once, with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            )
