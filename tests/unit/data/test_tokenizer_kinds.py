"""Each kind of tokenizer against its own library, on small vocabularies that are made here."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken.load
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
from transformers import AutoTokenizer, GPT2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.tokenizer import TextTokenizer, build_tokenizer, load_tokenizer
from mindspeed_llm.errors import DataError
from tests.unit.data.odd_texts import ODD_TEXTS, shipped_texts

TEXTS = [*shipped_texts(), *ODD_TEXTS]
SPECIAL = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]


def build(kind: str, path: Path | None = None, vocab_size: int | None = None, **more: object) -> TextTokenizer:
    settings = TokenizerConfig(kind, path and str(path), **more)  # pyright: ignore[reportArgumentType]
    tokenizer = build_tokenizer(settings, vocab_size)
    assert isinstance(tokenizer, TextTokenizer)
    return tokenizer


def flat(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    ids, lengths = tokenizer.encode_flat(texts)
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int32)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def assert_ids(tokenizer: TextTokenizer, expected: list[list[int]]) -> None:
    assert tokenizer.encode_batch(TEXTS) == expected
    assert flat(tokenizer, TEXTS) == expected
    assert [tokenizer.encode(text) for text in ODD_TEXTS] == expected[-len(ODD_TEXTS) :]
    assert [len(array) for array in tokenizer.encode_flat([])] == [0, 0]
    assert max(max(ids, default=0) for ids in expected) < tokenizer.vocab_size


# sentencepiece


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def piece_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = io.BytesIO()
    bpe = request.param == "bpe"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(shipped_texts()),
        model_writer=model,
        model_type=request.param,
        vocab_size=2000,
        character_coverage=0.99,
        byte_fallback=bpe,
        normalization_rule_name="identity" if bpe else "nmt_nfkc",
        remove_extra_whitespaces=not bpe,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("kind", ["GPTSentencePieceTokenizer", "SentencePieceTokenizer"])
def test_sentencepiece_ids_are_the_librarys_and_size_and_end_megatrons(piece_model: Path, kind: str) -> None:
    import mindspeed_llm.core  # noqa: F401

    from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import SentencePieceTokenizer as Megatrons

    ours, library = build(kind, piece_model), sentencepiece.SentencePieceProcessor(model_file=str(piece_model))
    assert_ids(ours, [library.encode(text) for text in TEXTS])
    megatrons = Megatrons(str(piece_model))
    assert (ours.vocab_size, ours.eod) == (megatrons.vocab_size, megatrons.eod)
    assert ours.decode(ours.encode(TEXTS[0])) == library.decode(library.encode(TEXTS[0]))
    assert build(kind, piece_model.parent).hash == ours.hash == load_tokenizer(piece_model).hash


def test_llama2_puts_the_begin_first(piece_model: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(piece_model))
    ours = build("Llama2Tokenizer", piece_model)
    assert_ids(ours, [[library.bos_id(), *library.encode(text)] for text in TEXTS])
    assert (ours.eod, ours.vocab_size) == (library.eos_id(), library.get_piece_size())
    assert ours.hash != build("SentencePieceTokenizer", piece_model).hash


@pytest.mark.parametrize("adds", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_a_folder_with_a_sentencepiece_model_is_framed_as_its_settings_say(
    piece_model: Path, tmp_path: Path, adds: dict[str, bool]
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(piece_model.read_bytes())
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "</s>", **adds}))
    library = sentencepiece.SentencePieceProcessor(model_file=str(piece_model))
    before = [library.bos_id()] if adds.get("add_bos_token", True) else []
    after = [library.eos_id()] if adds.get("add_eos_token") else []
    ours = load_tokenizer(tmp_path)
    assert_ids(ours, [[*before, *library.encode(text), *after] for text in TEXTS])
    assert (ours.eod, ours.pad) == (library.eos_id(), library.eos_id())


# tiktoken


def byte_ranks(most: int) -> list[bytes]:
    """256 bytes, then frequent byte strings, shorter ones first, and numbers, which patterns cut differently."""
    data = [text.encode() for text in shipped_texts()]
    counts = [Counter(line[i : i + n] for line in data for i in range(len(line) - n + 1)) for n in (2, 3, 4)]
    longer = [token for counter in counts for token, _ in counter.most_common((most - 256) // 3)]
    return list(dict.fromkeys([*(bytes([value]) for value in range(256)), *longer, b"12", b"34", b"123"]))


RANKS = byte_ranks(700)


def write_json_ranks(path: Path, ranks: Sequence[bytes] = RANKS) -> Path:
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for i, token in enumerate(ranks)
    ]
    path.write_text(json.dumps(entries))
    return path


def write_plain_ranks(path: Path, ranks: Sequence[bytes] = RANKS) -> Path:
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(ranks)))
    return path


@pytest.mark.parametrize("pattern", ["v1", "v2", None])
@pytest.mark.parametrize("special", [None, [*SPECIAL, "<|endoftext|>"]])
def test_megatrons_json_of_ranks(tmp_path: Path, pattern: str | None, special: list[str] | None) -> None:
    import mindspeed_llm.core  # noqa: F401

    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer as Megatrons

    path = write_json_ranks(tmp_path / "ranks.json")
    size = len(RANKS) - 10 + 20  # the last ten ranks are cut off
    theirs = Megatrons(str(path), special, 20, pattern=pattern or "v2", vocab_size=size)
    flags = {"tiktoken_pattern": pattern, "tiktoken_special_tokens": tuple(special) if special else None}
    ours = build("TikTokenizer", path, size, tiktoken_num_special_tokens=20, **flags)
    assert_ids(ours, [theirs.text_to_ids(text) for text in TEXTS])
    assert (ours.vocab_size, ours.eod, ours.pad) == (theirs.vocab_size, theirs.eod, theirs.pad_id)
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]


def test_a_plain_file_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mindspeed_llm.core  # noqa: F401

    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import _PATTERN_TIKTOKEN_V2

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    path = write_plain_ranks(tmp_path / "some.tiktoken")
    ranks = tiktoken.load.load_tiktoken_bpe(str(path))
    names = ["<|begin_of_text|>", "<|endoftext|>"]
    special = {name: len(ranks) + i for i, name in enumerate(names)}
    library = tiktoken.Encoding("x", pat_str=_PATTERN_TIKTOKEN_V2, mergeable_ranks=ranks, special_tokens=special)
    ours = build("TikTokenizer", path, tiktoken_special_tokens=tuple(names))
    assert_ids(ours, [library.encode(text, allowed_special="all") for text in TEXTS])
    assert (ours.vocab_size, ours.eod) == (library.n_vocab, special["<|endoftext|>"])
    assert build("TikTokenizer", path).eod == len(ranks)
    assert build("TikTokenizer", tmp_path, tiktoken_special_tokens=tuple(names)).hash == ours.hash


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tiktoken.model"])
def test_a_folder_with_ranks_only_is_cut_as_transformers_would(tmp_path: Path, name: str) -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    path = write_plain_ranks(tmp_path / name)
    theirs = TikTokenConverter(vocab_file=str(path)).converted()
    texts = [text for text in TEXTS if "<|endoftext|>" not in text]
    ours = load_tokenizer(tmp_path)
    assert ours.encode_batch(texts) == [encoding.ids for encoding in theirs.encode_batch(texts)]
    assert ours.encode("a<|endoftext|>")[-1] == ours.eod == len(RANKS)
    digits = TokenizerConfig(tokenizer_name_or_path=str(tmp_path), tiktoken_pattern=r"\p{N}|\P{N}+")
    assert load_tokenizer(tmp_path, digits).hash != ours.hash


# tekken


@pytest.mark.parametrize("listed", [True, False])
def test_tekken(tmp_path: Path, listed: bool) -> None:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    entries = json.loads(write_json_ranks(tmp_path / "ranks.json").read_text())
    config = {
        "pattern": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "num_vocab_tokens": len(RANKS),
        "default_vocab_size": len(RANKS) + 30 - 7,
        "default_num_special_tokens": 30,
        "version": "v3",
    }
    content = {"config": config, "vocab": entries}
    if listed:
        names = ["<unk>", "</s>", "<s>", "<pad>", "[INST]"]
        content["special_tokens"] = [{"rank": i, "token_str": s, "is_control": True} for i, s in enumerate(names)]
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps(content))
    theirs = Tekkenizer.from_file(path)
    ours = build("MagistralTokenizer", path)
    assert_ids(ours, [theirs.encode(text, bos=False, eos=False) for text in TEXTS])
    assert (ours.vocab_size, ours.eod, ours.pad) == (theirs.n_words, theirs.eos_id, theirs.pad_id)
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]
    assert load_tokenizer(tmp_path).hash == build("MagistralTokenizer", tmp_path).hash == ours.hash


# GPT-2 and BERT


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(shipped_texts(), vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(folder))
    return folder


def test_gpt2_ids_are_transformers_and_with_the_vocabulary_as_ranks_tiktokens(gpt2_folder: Path) -> None:
    vocab_file, merge_file = str(gpt2_folder / "vocab.json"), str(gpt2_folder / "merges.txt")
    theirs = GPT2Tokenizer.from_pretrained(gpt2_folder)
    ours = build("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    assert_ids(ours, [theirs(text).input_ids for text in TEXTS])
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]
    spelled = {symbol: bytes([value]) for value, symbol in bytes_to_unicode().items()}
    vocab: dict[str, int] = json.loads(Path(vocab_file).read_text())
    ranks = {b"".join([spelled[symbol] for symbol in token]): rank for token, rank in vocab.items()}
    special = {"<|endoftext|>": ranks.pop(b"<|endoftext|>")}
    library = tiktoken.Encoding("x", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    assert_ids(ours, [library.encode(text, allowed_special="all") for text in TEXTS])


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast", None])
def test_a_folder_with_vocabulary_and_merges(gpt2_folder: Path, tmp_path: Path, name: str | None) -> None:
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((gpt2_folder / file).read_bytes())
    settings: dict[str, object] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} if name else {}
    if name is not None:
        count = len(json.loads((tmp_path / "vocab.json").read_text()))
        added = {"content": "<|im_end|>", "special": True, "normalized": False}
        added |= dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
        settings |= {"tokenizer_class": name, "added_tokens_decoder": {str(count): added}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(tmp_path) if name else GPT2Tokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert_ids(ours, [theirs(text).input_ids for text in TEXTS])
    assert ours.encode("a<|im_end|>b") == theirs("a<|im_end|>b").input_ids
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces_are_those_of_berts_own_tokenizer(tmp_path: Path, lower: bool) -> None:
    trained = BertWordPieceTokenizer(lowercase=lower)
    trained.train_from_iterator(shipped_texts(), vocab_size=900, show_progress=False)
    trained.save_model(str(tmp_path))
    vocab_file = str(tmp_path / "vocab.txt")
    # In plain Python, and with the framing that Megatron does not add.
    theirs = BertTokenizerLegacy(vocab_file, do_lower_case=lower)
    ours = build("BertWordPieceLowerCase" if lower else "BertWordPieceCase", vocab_file=vocab_file)
    assert_ids(ours, [theirs(text, add_special_tokens=False).input_ids for text in TEXTS])
    assert (ours.eod, ours.pad, ours.vocab_size) == (theirs.sep_token_id, theirs.pad_token_id, len(theirs))
    assert len({ours.hash, build("BertWordPieceCase", vocab_file=vocab_file).hash}) == (2 if lower else 1)


# mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs a vocabulary"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/nowhere"}, "needs the merges"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/nowhere", "merge_file": "/no"}, "does not exist"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "{json}", "merge_file": "{bin}"}, "cannot be read"),
        ({"tokenizer_type": "BertWordPieceCase"}, "needs a vocabulary"),
        ({"tokenizer_type": "BertWordPieceCase", "vocab_file": "/nowhere"}, "does not exist"),
        ({"tokenizer_type": "BertWordPieceCase", "vocab_file": "{bin}"}, "cannot be read"),
        ({"tokenizer_type": "BertWordPieceCase", "vocab_file": "{json}"}, "no vocabulary of BERT"),
        *(
            ({"tokenizer_type": kind, "tokenizer_name_or_path": path}, message)
            for kind, wrong in [
                ("Llama2Tokenizer", "no sentencepiece model"),
                ("TikTokenizer", "no file of ranks"),
                ("MagistralTokenizer", "no.* JSON"),
            ]
            for path, message in [
                (None, "needs a tokenizer"),
                ("/nowhere", "no tokenizer at this path"),
                ("{folder}", "no file for"),
                ("{bin}", wrong),
            ]
        ),
        ({"tokenizer_type": "MagistralTokenizer", "tokenizer_name_or_path": "{json}"}, "no tekken file"),
        ({"tokenizer_type": "TikTokenizer", "tokenizer_name_or_path": "{json}"}, "no list of ranks"),
        ({"tokenizer_name_or_path": "{bin}"}, "no sentencepiece model"),
        ({"tokenizer_name_or_path": "{folder}"}, "no tokenizer at this path"),
    ],
)
def test_a_missing_or_wrong_file_is_one_error(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.json").write_text('{"a": 1}')
    (tmp_path / "x.bin").write_bytes(bytes(range(255, 0, -1)) * 9)
    paths = {"folder": tmp_path / "folder", "json": tmp_path / "x.json", "bin": tmp_path / "x.bin"}
    filled = {key: value and value.format(**paths) for key, value in settings.items()}
    with pytest.raises(DataError, match=message):
        build_tokenizer(TokenizerConfig(**filled))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tiktoken_pattern": "v3"}, "Unknown pattern"),
        ({"tiktoken_pattern": "("}, "no regular expression"),
        ({"tiktoken_special_tokens": ("<a>", "<a>")}, "special tokens cannot be"),
        ({"tiktoken_num_special_tokens": 3}, "special tokens cannot be"),
        ({"tiktoken_num_special_tokens": 10}, "do not fill the vocabulary"),
    ],
)
def test_flags_that_do_not_fit_the_ranks(tmp_path: Path, flags: dict[str, object], message: str) -> None:
    path = write_json_ranks(tmp_path / "ranks.json")
    defaults: dict[str, object] = {"tiktoken_num_special_tokens": 20}
    size = len(RANKS) + 20
    with pytest.raises(DataError, match=message):
        build("TikTokenizer", path, size, **{**defaults, **flags})


def test_ranks_that_tiktoken_would_panic_over(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rank for byte 7"):
        load_tokenizer(write_plain_ranks(tmp_path / "a.tiktoken", [*RANKS[:7], *RANKS[8:]]))
    path = write_plain_ranks(tmp_path / "b.tiktoken")
    path.write_bytes(path.read_bytes() + b"%s 300\n" % base64.b64encode(b"another"))
    with pytest.raises(DataError, match="given twice"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="no place for a number"):
        build("TikTokenizer", path, tiktoken_num_special_tokens=5)


def test_a_run_that_tiktoken_gives_up_on_is_one_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_plain_ranks(tmp_path / "a.tiktoken"))
    for encode in (tokenizer.encode_batch, tokenizer.encode_flat):
        with pytest.raises(DataError, match="cannot be cut into words"):
            encode(["a", " " * 1_000_000])


def test_merges_without_a_class_that_says_how_text_is_cut(gpt2_folder: Path, tmp_path: Path) -> None:
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((gpt2_folder / file).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    with pytest.raises(DataError, match="do not say how"):
        load_tokenizer(tmp_path)
