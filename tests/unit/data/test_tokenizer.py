"""Ids and special ids against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.tokenizer import NullTokenizer, build_tokenizer, load_tokenizer
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import QUICKSTART, TOKENIZER
from tests.unit.data.odd_texts import ODD_TEXTS, shipped_texts


def with_bos(folder: Path) -> Path:
    """The shipped tokenizer, made to put a BOS first, as Llama's does."""
    shutil.copytree(TOKENIZER, folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = backend.token_to_id("<|im_start|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|im_start|>"}))
    return folder


def test_ids_equal_transformers_on_shipped_text() -> None:
    texts = shipped_texts() + ODD_TEXTS
    reference = AutoTokenizer.from_pretrained(TOKENIZER)(texts)["input_ids"]
    ours = load_tokenizer(TOKENIZER)
    assert ours.encode_batch(texts) == reference
    assert [ours.encode(text) for text in ODD_TEXTS] == reference[-len(ODD_TEXTS) :]


def test_text_comes_back() -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    for text in shipped_texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_and_size_equal_transformers() -> None:
    reference = AutoTokenizer.from_pretrained(TOKENIZER)
    ours = load_tokenizer(TOKENIZER)
    assert (ours.eod, ours.pad, ours.vocab_size) == (reference.eos_token_id, reference.pad_token_id, len(reference))


def test_special_tokens_that_the_tokenizer_adds_are_kept_and_truncation_is_not(tmp_path: Path) -> None:
    folder = with_bos(tmp_path / "bos")
    texts = shipped_texts()[:5]
    reference = AutoTokenizer.from_pretrained(folder)
    expected = [reference(text, truncation=False)["input_ids"] for text in texts]
    assert all(ids[0] == reference.bos_token_id for ids in expected)
    assert load_tokenizer(folder).encode_batch(texts) == expected


def test_a_file_alone_uses_what_lies_beside_it(tmp_path: Path) -> None:
    assert load_tokenizer(TOKENIZER / "tokenizer.json").eod == load_tokenizer(TOKENIZER).eod
    alone = shutil.copy(TOKENIZER / "tokenizer.json", tmp_path / "alone.json")
    with pytest.raises(DataError, match="end-of-document"):
        _ = load_tokenizer(alone).eod


@pytest.mark.parametrize("value", [7, [7, 9]])
def test_eos_of_config_json_is_the_last_resort(tmp_path: Path, value: object) -> None:
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    assert load_tokenizer(tmp_path).eod == 7


def test_hash_is_of_the_tokenizer_not_of_its_files(tmp_path: Path) -> None:
    ours = load_tokenizer(TOKENIZER)
    content = json.loads((TOKENIZER / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).hash == ours.hash
    first, second = content["model"]["merges"][-2:]
    content["model"]["merges"][-2:] = [second, first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).hash != ours.hash


def test_a_saved_copy_of_transformers_is_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer(["padded", "to the longest"], padding=True)
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).hash == load_tokenizer(TOKENIZER).hash


def test_null_tokenizer_counts_as_megatrons() -> None:
    import mindspeed_llm.core  # noqa: F401

    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer as MegatronNull

    ours, theirs = NullTokenizer(100), MegatronNull(100)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    assert ours.encode("3 4") == theirs.text_to_ids("3 4")


def test_shipped_tokenizer_is_what_its_script_makes(tmp_path: Path) -> None:
    import runpy

    runpy.run_path(str(QUICKSTART / "make_tokenizer.py"))["main"](tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / name).read_text() == (TOKENIZER / name).read_text(), name


@pytest.mark.parametrize(
    ("kind", "path", "message"),
    [
        ("Sideways", "x", "Unknown tokenizer type"),
        ("PretrainedFromHF", None, "needs a tokenizer"),
        ("PretrainedFromHF", "/nowhere", "no tokenizer at this path"),
        ("NullTokenizer", None, "vocabulary size"),
    ],
)
def test_what_is_missing_is_named(kind: str, path: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer(TokenizerConfig(kind, path))  # pyright: ignore[reportArgumentType] - Sideways is no type


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_flat_ids_are_those_of_each_text_end_to_end() -> None:
    tokenizer, texts = load_tokenizer(TOKENIZER), [*shipped_texts()[:5], *ODD_TEXTS]
    ids, lengths = tokenizer.encode_flat(texts)
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int32)
    assert [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] == tokenizer.encode_batch(texts)
    assert [len(array) for array in tokenizer.encode_flat([])] == [0, 0]
