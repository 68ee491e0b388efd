"""The C++ encoder against the tokenizers library: words, merges, added tokens, and what it leaves to the library."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from mindspeed_llm.data import byte_bpe
from mindspeed_llm.data.byte_bpe import DEEPSEEK_V3, GPT2, LLAMA3, PATTERNS, QWEN2, ByteBpe, code_point_classes
from mindspeed_llm.data.tokenizer import load_tokenizer
from tests.unit.data.corpus import QUICKSTART, TOKENIZER
from tests.unit.data.odd_texts import ODD_TEXTS

MATERIAL = Path(__file__).resolve().parents[3] / ".cache" / "material"
KINDS: dict[str, tuple[str, ...]] = {
    "gpt2": (GPT2,),
    "qwen2": (QWEN2,),
    "llama3": (LLAMA3,),
    "deepseek_v3": DEEPSEEK_V3,
}
REAL = ("qwen2_5", "qwen3", "llama3_1", "deepseek_v3", "gpt2")
SPECIAL = ("<|a|>", "<|a|>b", "<|end", "<｜中｜>")
PIECES = [
    *" \n\r\t\v\f\x00\x1c\x7f\x85\xa0\u2009\u2028\u3000\ufeff\u200d\ufe0f",
    *("  ", "   ", "\r\n", "\n\n", " \n ", "\n \n", " \r", "\u3000\u3000"),
    *("'", "'s", "'S", "'\u017f", "'T", "'re", "'Ve", "'LL", "'ll", "'l", "'d", "'M", "’s", " 's", "''", "'\u017fa"),
    *("1", "12", "123", "1234567", "٣", "½", "Ⅷ", "²", " 1", "3.14", "一", "二三"),
    *("a", "B", "é", "e\u0301", "ß", "hello", " world", "İ", "ǅ", "the", "Straße", "_", "__init__", "ﬁ"),
    *(
        "中",
        "文字",
        "日本語",
        "カタカナ",
        "・",
        "゛",
        "゠",
        "ー",
        "\u3099",
        "か\u3099",
        "が",
        "한국어",
        "\u1100\u1161",
        "𠀀",
        "龥",
        "龦",
    ),
    *("。", "，", "！？", "(", "()", "#!", "$%", "~", "^", "€", "→", "«", "¿", "…", " -", "--a", ".com", "\\n"),
    *("🙂", "👨‍👩‍👧", "🇩🇪", "❤️", "\U0001f9d1\U0001f3fd", "\U000e0062"),
    *("\u0300", "\u0316\u0301", "ก็", "नमस्ते", "العَرَبِيَّة", "\u0b3e", "\u20dd"),
    *("\ue000", "\U000f0000", "\U0010ffff", "\ufffe", "\u0378", "\U0003fffe", "\u2ffe", "\ufffd"),
    *(*SPECIAL, "<|", "<|a", "|>", "<｜", "<|endoftext|>", "<|im_start|>", "<think>", "<｜User｜>"),
]

pytestmark = pytest.mark.skipif(byte_bpe._module() is None, reason="the C++ module is not built")  # pyright: ignore[reportPrivateUsage]
nasty = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)
quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in KINDS[kind]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def trained(kind: str) -> Tokenizer:
    """A tokenizer of this kind; those with NFC or a post-processor are the kinds that have one in the wild."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    tokenizer.normalizer = normalizers.NFC() if kind == "qwen2" else None  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizer(kind)  # pyright: ignore[reportAttributeAccessIssue]
    rows = (QUICKSTART / "text" / "valid.jsonl").read_text(encoding="utf-8").splitlines()[:150]
    texts = [json.loads(row)["text"] for row in rows] + [a + b for a, b in pairwise(PIECES)] * 3
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL[:2]])  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_tokens([AddedToken(token, normalized=True) for token in SPECIAL[2:]])  # pyright: ignore[reportUnknownMemberType]
    if kind == "llama3":
        template = processors.TemplateProcessing(
            single="<|a|> $A <|end", special_tokens=[("<|a|>", 3000), ("<|end", 3002)]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def ours(library: Tokenizer) -> ByteBpe:
    encoder = ByteBpe.from_json(json.loads(library.to_str()), library)
    assert encoder is not None
    return encoder


@cache
def pair(kind: str) -> tuple[ByteBpe, Tokenizer]:
    """Encoder and library: a trained tokenizer, the shipped one, or a real one."""
    if kind in KINDS:
        library = trained(kind)
    else:
        folder = TOKENIZER if kind == "quickstart" else MATERIAL / "tokenizers" / kind
        library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    return ours(library), library


def assert_same_ids(kind: str, texts: Sequence[str]) -> None:
    encoder, library = pair(kind)
    expected = [encoding.ids for encoding in library.encode_batch(texts)]
    ids, lengths = encoder.encode_flat(texts)
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int32)
    assert lengths.tolist() == [len(row) for row in expected]
    assert ids.tolist() == [number for row in expected for number in row]


def assert_same_words(kind: str, texts: Sequence[str]) -> None:
    """The cut into words alone: each word that the library finds, and each two of them together, are tokens."""
    words = [[word for word, _ in pre_tokenizer(kind).pre_tokenize_str(text)] for text in texts]
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    for row in words:
        tokens |= dict.fromkeys([*row, *(a + b for a, b in pairwise(row))])
    vocab = {token: number for number, token in enumerate(tokens)}
    library = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    library.pre_tokenizer = pre_tokenizer(kind)  # pyright: ignore[reportAttributeAccessIssue]
    ids, lengths = ours(library).encode_flat(texts)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    got = [ids[start:stop].tolist() for start, stop in pairwise(bounds.tolist())]
    expected = [[vocab[word] for word in row] for row in words]
    assert [text for text, a, b in zip(texts, got, expected, strict=True) if a != b] == []


def test_kinds_and_patterns_are_the_same() -> None:
    assert {pattern: number for number, pattern in enumerate(KINDS.values())} == PATTERNS


def test_the_classes_of_all_code_points_are_the_librarys() -> None:
    classes = code_point_classes()
    assert classes is not None
    for letter in "LMNPS":
        inside = "".join(chr(i) for i, found in enumerate(classes) if found == ord(letter))
        outside = "".join(chr(i) for i, found in enumerate(classes) if found not in (0, ord(letter)))
        for text, never in ((inside, rf"\P{{{letter}}}"), (outside, rf"\p{{{letter}}}")):
            assert pre_tokenizers.Split(Regex(never), "isolated").pre_tokenize_str(text) == [(text, (0, len(text)))]
    assert [
        i for i, found in enumerate(classes) if found == 0 and unicodedata.category(chr(i)) not in ("Cn", "Cs")
    ] == []


def test_an_older_library_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Python knew a letter that the library does not."""
    category = unicodedata.category
    monkeypatch.setattr(byte_bpe.unicodedata, "category", lambda c: "Lo" if c == "\u0378" else category(c))
    assert code_point_classes.__wrapped__() is None


def in_context(characters: Sequence[str]) -> list[str]:
    frame = "{0}a{0}b  {0}{0} c1{0}2{0}'{0}s'l{0}e.{0}!{0}x\n{0}\n {0}  中{0}文 {0}é\u0300{0}\u00a0{0}\u00a0 {0}"
    return [frame.format(c) for c in characters]


@pytest.mark.parametrize("kind", KINDS)
def test_code_points_where_a_class_begins(kind: str) -> None:
    classes = code_point_classes()
    assert classes is not None
    edges = {i + 1 for i, (a, b) in enumerate(pairwise(classes)) if a != b}
    edges |= set(range(0x250)) | {0x4E00, 0x9FA5, 0x9FA6, 0x303F, 0x3040, 0x30FF, 0x3100, 0xFB05, 0xFB06}
    assert_same_words(kind, in_context([chr(i) for i in sorted(edges) if classes[i] != 0]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_point(kind: str) -> None:
    classes = code_point_classes()
    assert classes is not None
    known = [chr(i) for i, found in enumerate(classes) if found != 0]
    for start in range(0, len(known), 20000):
        assert_same_words(kind, in_context(known[start : start + 20000]))


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(texts=st.lists(nasty, max_size=4))
@example(texts=["\n \n  x", " \r\n\u3000y", "x \n", "  ", "\u3000 a", "'\u017fs 'lLx", "12345 ६७८९०"])
@example(
    texts=[
        "゛か\u3000カ・ナ12中345文",
        "\x00\x00a\x00",
        "\x00 \x00中",
        ".a'b#é",
        " .\r\n\r a",
        "\u0300\u0301",
        "x\u0300",
    ]
)
def test_words(kind: str, texts: list[str]) -> None:
    certain = [text for text in texts if all(ord(c) < 0x40000 and unicodedata.category(c) != "Cn" for c in text)]
    assert_same_words(kind, certain)


@pytest.mark.parametrize("kind", [*KINDS, "quickstart"])
@quick
@given(texts=st.lists(nasty | st.text(max_size=20), max_size=4))
@example(texts=[])
@example(texts=[""])
@example(texts=["<|a|><|a|>b<|end<|a|><｜中｜>", "<|a|<|a|>b", "<|en<|end|>"])
def test_ids(kind: str, texts: list[str]) -> None:
    assert_same_ids(kind, texts)


@pytest.mark.parametrize("kind", [*KINDS, "quickstart"])
def test_odd_texts_and_all_pairs_of_pieces(kind: str) -> None:
    assert_same_ids(kind, [*ODD_TEXTS, *(a + b + " " + b + a for a in PIECES for b in PIECES[::3])])


@pytest.mark.parametrize("kind", [*KINDS, "quickstart"])
@quick
@given(word=st.text("abehnstอ中🙂", min_size=20, max_size=300), cut=st.integers(1, 80))
def test_long_words(kind: str, word: str, cut: int) -> None:
    """On both sides of the lengths at which the way of merging changes, and of those that are remembered."""
    assert_same_ids(kind, [word, word[:cut], word * 3, word[:cut]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["a", " ", "\n ", "1", "中", "ab", "-", "\u0300", "'"])
def test_texts_without_a_break_take_no_quadratic_time(kind: str, unit: str) -> None:
    """200 kB each: a quadratic step would take minutes."""
    assert_same_ids(kind, [unit * (200_000 // len(unit.encode()))])


def left_to_the_library(kind: str, texts: list[str]) -> list[str]:
    """The texts that go there; the ids are right all the same."""
    encoder, library = pair(kind)
    asked: list[str] = []

    class Asked:
        def encode_batch_fast(self, texts: list[str]) -> list[Any]:
            asked.extend(texts)
            return library.encode_batch_fast(texts)

    ids, lengths = ByteBpe(encoder._native, encoder._nfc, Asked()).encode_flat(texts)  # pyright: ignore
    expected = [encoding.ids for encoding in library.encode_batch(texts)]
    assert (ids.tolist(), lengths.tolist()) == ([*chain.from_iterable(expected)], [len(row) for row in expected])
    return asked


def test_a_text_that_is_not_certain_goes_to_the_library_and_its_ids_to_their_place() -> None:
    texts = ["one", "\u0378", "", "e\u0301", "két", "\U000f0000", "<|a|>", "a\U0003fffe", "last"]
    assert left_to_the_library("qwen2", texts) == ["\u0378", "e\u0301", "\U000f0000", "a\U0003fffe"]
    assert left_to_the_library("gpt2", texts) == ["\u0378", "\U000f0000", "a\U0003fffe"]
    assert left_to_the_library("llama3", ["\u0378", "\u0378"]) == ["\u0378", "\u0378"]
    assert left_to_the_library("qwen2", [text for text in ODD_TEXTS if text.isascii()]) == []


def test_half_a_surrogate_pair_is_the_librarys_error() -> None:
    encoder, library = pair("gpt2")
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        library.encode_batch_fast(["a", "\ud800"])
    with pytest.raises(type(theirs.value)):
        encoder.encode_flat(["a", "\ud800"])


def test_threads_share_an_encoder() -> None:
    encoder, library = pair("quickstart")
    rows = (QUICKSTART / "text" / "valid.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    texts = [json.loads(row)["text"] for row in rows]
    expected = [number for encoding in library.encode_batch(texts) for number in encoding.ids]
    found: list[list[int]] = []

    def work() -> None:
        found.append([encoder.encode_flat(texts)[0].tolist() for _ in range(5)][-1])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_both_spellings_of_merges_are_read() -> None:
    library = trained("qwen2")
    content = json.loads(library.to_str())
    assert isinstance(content["model"]["merges"][0], list)
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    spelled = ByteBpe.from_json(content)
    assert spelled is not None
    expected = ours(library).encode_flat(PIECES)[0]
    assert spelled.encode_flat(PIECES)[0].tolist() == expected.tolist()


def test_a_merge_that_comes_twice_has_its_later_rank() -> None:
    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab = alphabet | {"ab": 256, "bc": 257}
    library = Tokenizer(models.BPE(vocab, [("a", "b"), ("b", "c"), ("a", "b")]))
    library.pre_tokenizer = pre_tokenizer("gpt2")  # pyright: ignore[reportAttributeAccessIssue]
    content = json.loads(library.to_str())
    content["model"]["merges"] = ["a b", "b c", "a b"]
    reread = Tokenizer.from_str(json.dumps(content))
    encoder = ByteBpe.from_json(content, reread)
    assert encoder is not None
    assert encoder.encode_flat(["abc"])[0].tolist() == reread.encode("abc").ids == [alphabet["a"], 257]


def test_truncation_and_padding_are_not_followed() -> None:
    content = json.loads(trained("gpt2").to_str())
    library = Tokenizer.from_str(json.dumps(content))
    library.enable_truncation(2)
    library.enable_padding(length=5)
    encoder = ByteBpe.from_json(json.loads(library.to_str()))
    assert encoder is not None
    ids, _ = encoder.encode_flat(["a b c d e", "\u0378 a b c d"])
    expected = trained("gpt2").encode_batch(["a b c d e", "\u0378 a b c d"])
    assert ids.tolist() == [number for row in expected for number in row.ids]


Change = Callable[[dict[str, Any]], object]
UNKNOWN: dict[str, Change] = {
    "normalizer": lambda c: c.update(normalizer={"type": "Lowercase"}),
    "normalizer in a sequence": lambda c: c.update(
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}
    ),
    "no pre-tokenizer": lambda c: c.update(pre_tokenizer=None),
    "prefix space": lambda c: c["pre_tokenizer"]["pretokenizers"][-1].update(add_prefix_space=True),
    "second regex": lambda c: c["pre_tokenizer"]["pretokenizers"][-1].update(use_regex=True),
    "another pattern": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": QWEN2 + "|x"}),
    "a string": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"String": QWEN2}),
    "another behaviour": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    "inverted": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(invert=True),
    "another step": lambda c: c["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Whitespace"}),
    "post-processor": lambda c: c.update(
        post_processor={"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2], "trim_offsets": True}
    ),
    "model": lambda c: c["model"].update(type="WordLevel"),
    "unigram": lambda c: c.update(model={"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}),
    "dropout": lambda c: c["model"].update(dropout=0.1),
    "unknown token": lambda c: c["model"].update(unk_token="!"),
    "byte fallback": lambda c: c["model"].update(byte_fallback=True),
    "suffix": lambda c: c["model"].update(end_of_word_suffix="</w>"),
    "prefix": lambda c: c["model"].update(continuing_subword_prefix="##"),
    "new option": lambda c: c["model"].update(shuffle=True),
    "id twice": lambda c: c["model"]["vocab"].update(more=5),
    "id too large": lambda c: c["model"]["vocab"].update(a=1 << 21),
    "id far too large": lambda c: c["model"]["vocab"].update(a=1 << 40),
    "no such byte": lambda c: c["model"]["vocab"].pop("Ġ"),
    "merge without token": lambda c: c["model"]["merges"].append(["Ã", "Ã"]),
    "merge of three": lambda c: c["model"].update(merges=["a b c"]),
    "merge outside the bytes": lambda c: c["model"].update(merges=[["中", "a"]]),
    "first line of merges.txt": lambda c: c["model"].update(merges=["#version: 0.2"]),
    "stripped token": lambda c: c["added_tokens"][0].update(lstrip=True),
    "stripped at the right": lambda c: c["added_tokens"][0].update(rstrip=True),
    "single word": lambda c: c["added_tokens"][0].update(single_word=True),
    "id that the library does not give": lambda c: c["added_tokens"][0].update(id=7),
    "same token twice": lambda c: c["added_tokens"].append(copy.deepcopy(c["added_tokens"][0])),
    "empty token": lambda c: c["added_tokens"][0].update(content=""),
    "token that NFC changes": lambda c: c["added_tokens"][0].update(content="e\u0301"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_anything_else_is_left_to_the_library(what: str) -> None:
    content = json.loads(trained("qwen2").to_str())
    assert ByteBpe.from_json(copy.deepcopy(content)) is not None
    UNKNOWN[what](content)
    assert ByteBpe.from_json(content) is None


@pytest.mark.parametrize(
    "single",
    [
        [{"Sequence": {"id": "B", "type_id": 0}}],
        [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        [{"SpecialToken": {"id": "<|a|>", "type_id": 0}}],
    ],
)
def test_a_template_without_the_text_once_is_left_to_the_library(single: list[Any]) -> None:
    content = json.loads(trained("llama3").to_str())
    content["post_processor"]["processors"][1]["single"] = single
    assert ByteBpe.from_json(content) is None


def test_a_tokenizer_takes_the_quick_way_and_is_still_pickled() -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    expected = tokenizer.encode_flat(ODD_TEXTS)
    assert isinstance(vars(tokenizer)["_byte_bpe"], ByteBpe)
    again = pickle.loads(pickle.dumps(tokenizer)).encode_flat(ODD_TEXTS)
    assert [a.tolist() for a in again] == [a.tolist() for a in expected]
    assert expected[0].tolist() == [number for row in tokenizer.encode_batch(ODD_TEXTS) for number in row]


def test_without_the_module_there_is_no_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(trained("gpt2").to_str())
    monkeypatch.setattr(byte_bpe, "_MODULE", "mindspeed_llm.data.no_such_module")
    byte_bpe._module.cache_clear()  # pyright: ignore[reportPrivateUsage]
    assert ByteBpe.from_json(content) is None
    monkeypatch.undo()
    monkeypatch.setattr(byte_bpe, "_INTERFACE", -1)
    byte_bpe._module.cache_clear()  # pyright: ignore[reportPrivateUsage]
    assert ByteBpe.from_json(content) is None
    byte_bpe._module.cache_clear()  # pyright: ignore[reportPrivateUsage]


real = pytest.mark.parametrize("kind", [pytest.param(n, marks=pytest.mark.material(f"tokenizers/{n}")) for n in REAL])


@real
@quick
@given(texts=st.lists(nasty | st.text(max_size=20), max_size=4))
def test_ids_of_real_tokenizers(kind: str, texts: list[str]) -> None:
    assert_same_ids(kind, texts)


@real
def test_odd_texts_and_added_tokens_of_real_tokenizers(kind: str) -> None:
    content = json.loads((MATERIAL / "tokenizers" / kind / "tokenizer.json").read_text(encoding="utf-8"))
    assert ByteBpe.from_json(content) is not None
    added = [token["content"] for token in content["added_tokens"]]
    assert_same_ids(kind, [*ODD_TEXTS, *(f"a {token}{token} \n{token[:-1]}{token[1:]} b" for token in added)])
    assert_same_ids(kind, [a + b + " " + b + a for a in PIECES for b in PIECES[::6]])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.material("text/en.jsonl", "text/zh.jsonl")
@real
@pytest.mark.parametrize(("language", "part"), list(product(["en", "zh"], range(2))))
def test_documents(kind: str, language: str, part: int) -> None:
    """Every Chinese document, and an eighth of the 90 MB of English ones, in parts that shards share out."""
    encoder, library = pair(kind)
    with open(MATERIAL / "text" / f"{language}.jsonl", encoding="utf-8") as rows:
        for row in islice(rows, part, None, 16 if language == "en" else 2):
            text = json.loads(row)["text"]
            ids, _ = encoder.encode_flat([text])
            assert np.array_equal(ids, library.encode(text).ids), text[:80]
