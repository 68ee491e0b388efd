"""What the configuration of a run says of its tokenizer and its data, read without torch.

So ``--validate-only`` and the start of a run see the same mistakes, long before there are process groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from mindspeed_llm.config.data import DataConfig
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.indexed import read_index
from mindspeed_llm.data.manifest import check_tokenizer
from mindspeed_llm.data.raw import is_raw, require_tokenizer
from mindspeed_llm.data.sources import resolve_inputs
from mindspeed_llm.data.tokenizer import NULL_TYPE, Tokenizer, build_tokenizer, tokenizer_file
from mindspeed_llm.errors import DataError

DEFAULT_SPLIT = "969,30,1"
SPLITS = ("train", "valid", "test")

Blend = tuple[list[str], list[float] | None]


def tokenizer_of(cfg: RunConfig) -> Tokenizer:
    """The tokenizer of a run: the one named, else that of the Hugging Face folder it starts from, else bare ids.

    Raises:
        DataError: when it is missing, cannot be read, or has ids for which the model has no row.
    """
    named, kind = cfg.tokenizer.tokenizer_name_or_path, cfg.tokenizer.tokenizer_type
    if named is None and kind is None:
        places = (cfg.checkpoint.load, cfg.checkpoint.pretrained_checkpoint, cfg.model.hf_config)
        folders = [folder for folder in places if folder is not None]
        named = next((folder for folder in folders if tokenizer_file(folder) is not None), None)
    if kind is None:
        kind = NULL_TYPE if named is None else "PretrainedFromHF"
    rows = cfg.model.vocab_size
    if kind == NULL_TYPE:
        # The last of the model's ids ends a document; Megatron's NullTokenizer needs one row more than it is told.
        return build_tokenizer(TokenizerConfig(NULL_TYPE), rows and rows - 1)
    tokenizer = build_tokenizer(replace(cfg.tokenizer, tokenizer_name_or_path=named), rows)
    if rows is not None and tokenizer.vocab_size > rows:
        raise DataError(
            "The tokenizer has more ids than the model's vocabulary has rows.",
            got=f"{tokenizer.vocab_size} ids of {named or cfg.tokenizer.vocab_file}, --vocab-size {rows}",
            fix="the tokenizer of this model, or a larger --vocab-size for a model trained from scratch",
        )
    return tokenizer


def split_sizes(cfg: RunConfig) -> tuple[int, int, int]:
    """Samples that training, validation and testing read.

    Every evaluation of a run is over the same held-out samples, so their losses compare; Megatron-LM goes on to other
    samples each time.
    """
    training, data = cfg.training, with_files_read(cfg.data)
    batch = training.global_batch_size or 0
    train = training.train_samples or (training.train_iters or 0) * batch
    held_out = training.eval_iters * batch
    if data.train_data_path is None and data.valid_data_path is None and data.test_data_path is None:
        # A share of 0, as in 99,1,0, says that there is nothing to evaluate on.
        shares = [float(share) for share in (data.split or DEFAULT_SPLIT).replace("/", ",").split(",")]
        valid, test = (held_out if share > 0 else 0 for share in [*shares, 0.0, 0.0][1:3])
        return train, valid, test
    given = (data.train_data_path, data.valid_data_path, data.test_data_path)
    sizes = [
        0 if path is None and name != "train" else size
        for name, path, size in zip(("train", "valid", "test"), given, (train, held_out, held_out), strict=True)
    ]
    return sizes[0], sizes[1], sizes[2]


def words_read(data: DataConfig, sizes: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """The lists of data paths that a run reads from, by the name of their field.

    Args:
        data: with the files of data paths read, see :func:`with_files_read`.
        sizes: samples wanted of each split; a list that none of them reads is left out.
    """
    train, valid, test = sizes
    lists = (
        ("data_path", data.data_path, any(sizes)),
        ("train_data_path", data.train_data_path, train),
        ("valid_data_path", data.valid_data_path, valid),
        ("test_data_path", data.test_data_path, test),
    )
    return {name: words for name, words, is_read in lists if words and is_read}


def check_inputs(cfg: RunConfig) -> None:
    """See that the tokenizer and the data of a run are there and belong together. Nothing is prepared.

    Raises:
        DataError: the first that is missing or cannot be read, or data made with another tokenizer.
    """
    tokenizer, sizes = tokenizer_of(cfg), split_sizes(cfg)
    for name, words in words_read(with_files_read(cfg.data), sizes).items():
        prefixes, _ = read_blend(words, f"--{name.replace('_', '-')}") or ([], None)
        for prefix in prefixes:
            if is_raw(prefix):
                require_tokenizer(prefix, tokenizer)
                resolve_inputs((prefix,))
            else:
                read_index(prefix)
                check_tokenizer(prefix, tokenizer)


def read_splits(path: str) -> dict[str, list[str]]:
    """The lists of a file of ``--per-split-data-args-path``.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    try:
        content: Any = json.loads(read_text(path))
    except ValueError as error:
        raise DataError(
            "The file is not valid JSON.", got=f"{path}: {error}", fix="--per-split-data-args-path"
        ) from error
    found = cast("dict[str, Any]", content) if isinstance(content, dict) else None
    if found is None or not all(isinstance(found.get(name) or [], list) for name in SPLITS):
        raise DataError(
            "The file holds no lists of data paths.",
            got=path,
            allowed='{"train": ["1.0", "PREFIX", ...], "valid": [...], "test": [...]}',
            fix="--per-split-data-args-path",
        )
    return {name: [str(word) for word in cast("list[Any]", found.get(name) or [])] for name in SPLITS}


def with_files_read(data: DataConfig) -> DataConfig:
    """``data`` with what the files of data paths say in place of these files."""
    if data.data_args_path is not None:
        data = replace(data, data_path=tuple(read_text(data.data_args_path).split()), data_args_path=None)
    if data.per_split_data_args_path is not None:
        content = read_splits(data.per_split_data_args_path)
        paths = {f"{name}_data_path": tuple(content[name]) or None for name in SPLITS}
        data = replace(data, **paths, per_split_data_args_path=None)
    return data


def read_text(path: str) -> str:
    """A file of data paths.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError("A file of data paths cannot be read.", got=f"{path}: {error.strerror}") from error


def read_blend(words: Sequence[str] | None, flag: str) -> Blend | None:
    """Read ``[prefix ...]`` or ``[weight prefix ...]`` as Megatron does, except that a mixture is an error.

    A list of even length whose words at even places are all numbers is weighted.
    """
    if not words:
        return None
    weights = [_number(word) for word in words[::2]] if len(words) % 2 == 0 else [None]
    if all(weight is None for weight in weights):
        return [_prefix(word) for word in words], None
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(weights) or min(known) <= 0:
        raise DataError(
            "Weights and paths must alternate, and weights be above 0.",
            got=f"{flag} {' '.join(words)}",
            allowed="PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ...",
        )
    return [_prefix(word) for word in words[1::2]], known


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _prefix(word: str) -> str:
    return word.strip().removesuffix(".bin").removesuffix(".idx")
