"""Real tokenizers on real documents, each against its own library."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mistral_common
import numpy as np
import pytest
import sentencepiece
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tiktoken_ext.openai_public import r50k_pat_str
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.tokenizer import TextTokenizer, build_tokenizer, load_tokenizer
from tests.unit.data.odd_texts import ODD_TEXTS

MATERIAL = Path(__file__).resolve().parents[3] / ".cache" / "material"
MISTRAL = Path(mistral_common.__file__).parent / "data"
SPELLED = {symbol: bytes([value]) for value, symbol in bytes_to_unicode().items()}

pytestmark = pytest.mark.material("text/en.jsonl", "text/zh.jsonl")


def real(name: str) -> pytest.param:  # pyright: ignore[reportGeneralTypeIssues]
    return pytest.param(name, marks=pytest.mark.material(f"tokenizers/{name}"))


@cache
def texts() -> list[str]:
    """300 English and 300 Chinese documents, taken evenly, and the odd ones; of long documents 2000 characters."""
    chosen: list[str] = []
    for name in ("en", "zh"):
        rows = (MATERIAL / "text" / f"{name}.jsonl").read_bytes().splitlines()
        chosen += [json.loads(rows[i])["text"][:2000] for i in np.linspace(0, len(rows) - 1, 300).astype(int)]
    return [*chosen, *ODD_TEXTS]


def assert_equal(tokenizer: TextTokenizer, library: Callable[[str], list[int]]) -> None:
    """Every document has the library's ids."""
    ids, lengths = tokenizer.encode_flat(texts())
    got = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    assert [text for text, row in zip(texts(), got, strict=True) if row != library(text)] == []


def parts(name: str) -> tuple[dict[str, int], list[str], list[str]]:
    """Vocabulary, merges, and added tokens in the order of their ids, of a real ``tokenizer.json``."""
    content = json.loads((MATERIAL / "tokenizers" / name / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return content["model"]["vocab"], merges, [token["content"] for token in content["added_tokens"]]


def rank_lines(vocab: dict[str, int], added: list[str]) -> bytes:
    tokens = sorted((rank, token) for token, rank in vocab.items() if token not in added)
    encoded = [(base64.b64encode(b"".join([SPELLED[symbol] for symbol in token])), rank) for rank, token in tokens]
    return b"".join(b"%s %d\n" % pair for pair in encoded)


@pytest.mark.parametrize("name", [real(n) for n in ("qwen3", "qwen2_5", "deepseek_v3", "llama3_1", "gpt2")])
def test_a_folder_gives_what_auto_tokenizer_gives(name: str) -> None:
    folder = MATERIAL / "tokenizers" / name
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert_equal(ours, lambda text: theirs(text).input_ids)
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)


@pytest.mark.parametrize("name", [real("internlm2"), real("chatglm3")])
def test_a_tokenizer_whose_class_is_remote_code_gives_what_its_file_says(name: str) -> None:
    folder = MATERIAL / "tokenizers" / name
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = load_tokenizer(folder)
    assert_equal(ours, lambda text: theirs(text).input_ids)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("name", [real("gpt2")])
def test_gpt2s_two_files_give_what_tiktoken_gives(name: str, tmp_path: Path) -> None:
    vocab, merges, _ = parts(name)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    ranks = {b"".join([SPELLED[symbol] for symbol in token]): rank for token, rank in vocab.items()}
    special = {"<|endoftext|>": ranks.pop(b"<|endoftext|>")}
    library = tiktoken.Encoding("x", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    vocab_file, merge_file = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    ours = build_tokenizer(TokenizerConfig("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file))
    assert isinstance(ours, TextTokenizer)
    assert_equal(ours, lambda text: library.encode(text, allowed_special="all"))
    assert (ours.vocab_size, ours.eod) == (50257, 50256)


@pytest.mark.parametrize("name", [real("qwen2_5")])
def test_qwens_two_files_give_what_its_tokenizer_json_gives(name: str, tmp_path: Path) -> None:
    folder = MATERIAL / "tokenizers" / name
    vocab, merges, _ = parts(name)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(tmp_path)
    assert_equal(ours, lambda text: theirs(text).input_ids)
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)


@pytest.mark.parametrize("name", [real("llama3_1")])
def test_llama3s_ranks_give_what_its_tokenizer_json_gives(name: str, tmp_path: Path) -> None:
    vocab, _, added = parts(name)
    (tmp_path / "tokenizer.model").write_bytes(rank_lines(vocab, added))
    theirs = AutoTokenizer.from_pretrained(MATERIAL / "tokenizers" / name)
    settings = TokenizerConfig(tokenizer_name_or_path=str(tmp_path), tiktoken_special_tokens=tuple(added))
    ours = build_tokenizer(settings)
    assert isinstance(ours, TextTokenizer)
    assert_equal(ours, lambda text: theirs(text, add_special_tokens=False).input_ids)
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.convert_tokens_to_ids("<|end_of_text|>"))


@pytest.mark.parametrize("file", sorted(path.name for path in MISTRAL.glob("tekken*.json")))
def test_tekken_gives_what_mistral_common_gives(file: str) -> None:
    theirs = Tekkenizer.from_file(MISTRAL / file)
    ours = build_tokenizer(TokenizerConfig("MagistralTokenizer", str(MISTRAL / file)))
    assert isinstance(ours, TextTokenizer)
    assert_equal(ours, lambda text: theirs.encode(text, bos=False, eos=False))
    assert (ours.vocab_size, ours.eod, ours.pad) == (theirs.n_words, theirs.eos_id, theirs.pad_id)


@pytest.mark.parametrize("file", ["tokenizer.model.v1", "mistral_instruct_tokenizer_241114.model.v7"])
def test_a_sentencepiece_model_gives_what_sentencepiece_gives(file: str) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(MISTRAL / file))
    for kind, before in (("GPTSentencePieceTokenizer", []), ("Llama2Tokenizer", [library.bos_id()])):
        ours = build_tokenizer(TokenizerConfig(kind, str(MISTRAL / file)))  # pyright: ignore[reportArgumentType]
        assert isinstance(ours, TextTokenizer)
        assert_equal(ours, lambda text, before=before: [*before, *library.encode(text)])
        assert (ours.vocab_size, ours.eod) == (library.get_piece_size(), library.eos_id())
