"""The data report: its numbers against a naive count, and a page that is whole, safe and equal to the numbers."""

from __future__ import annotations

import base64
import builtins
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.indexed import IndexedWriter
from mindspeed_llm.data.report import write_report
from mindspeed_llm.data.report.findings import Rows, find, percent
from mindspeed_llm.data.report.page import render
from mindspeed_llm.data.report.statistics import DatasetStatistics, Decoder, measure
from mindspeed_llm.data.tokenizer import NullTokenizer, load_tokenizer
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import TOKENIZER, write_documents

SIZE = 7
EOD = SIZE
SCRIPT = "<script>alert('x')</script>"
PNG = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "source", "img"}

Documents = list[list[int]]


class Words:
    """A tokenizer of whole words, some of them hostile."""

    eod = 0
    special_ids = {"eos_token": 0, "unk_token": 1, "<b>role": 2}  # noqa: RUF012
    texts = ("<eos>", "<unk>", SCRIPT, ' onload="x', "&amp;", "\u202e", "中文", "\n", "\ufffd", "")

    @property
    def vocab_size(self) -> int:
        return len(self.texts)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[token] for token in ids)


class Page(HTMLParser):
    """Fails on a tag that is not closed in order; keeps tags, texts and the values of ``<data>``."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.values: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "data":
            self.values.append((str(self.tags[-1][1]["value"]), data))


def report(tmp_path: Path, prefixes: dict[str, str], tokenizer: Decoder, **values: Any) -> tuple[Page, dict[str, Any]]:
    values = {"bad_rows": {}, "truncated": 0, "text_bytes": {}, **values}
    path = write_report(prefixes, tokenizer, output=str(tmp_path / "out"), **values)
    assert path == tmp_path / "out.report.html"
    assert (tmp_path / "out.report.png").read_bytes().startswith(PNG)
    assert not list(tmp_path.glob("*.partial"))
    numbers = json.loads((tmp_path / "out.report.json").read_text(encoding="utf-8"))
    return Page(path.read_text(encoding="utf-8")), numbers


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at numbers and text: drawing takes a second."""
    monkeypatch.setattr("mindspeed_llm.data.report.write.draw_lengths", lambda *_: PNG)


def naive(documents: Documents) -> dict[str, Any]:
    """The same numbers by counting, with all of the data in memory."""
    lengths = [len(document) for document in documents]
    tokens = Counter(token for document in documents for token in document)
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, document in enumerate(documents):
        groups.setdefault(tuple(document), []).append(number)
    equal = [(members, ids) for ids, members in groups.items() if len(members) > 1]
    total = sum(lengths)
    return {
        "documents": len(documents),
        "tokens": total,
        "empty": lengths.count(0),
        "lengths": [min(lengths), np.mean(lengths), *(np.percentile(lengths, q) for q in (50, 90, 99)), max(lengths)],
        "extra": sum(len(members) - 1 for members, _ in equal),
        "extra_tokens": sum((len(members) - 1) * len(ids) for members, ids in equal),
        "groups": sorted(((-len(members), members[0], len(ids)) for members, ids in equal)),
        "top": sorted(((token, count) for token, count in tokens.items()), key=lambda item: (-item[1], item[0])),
        "covering_99": next(
            (number for number in range(1, len(tokens) + 1)
             if 100 * sum(count for _, count in tokens.most_common(number)) >= 99 * total), 0),
        "ended": sum(document[-1:] == [EOD] for document in documents),
        "alone": sum(document == [EOD] for document in documents),
    }  # fmt: skip


def check(found: DatasetStatistics, documents: Documents) -> None:
    expected = naive(documents)
    assert (found.documents, found.tokens, found.empty) == tuple(
        expected[name] for name in ("documents", "tokens", "empty")
    )
    assert found.lengths is not None
    assert list(asdict(found.lengths).values()) == pytest.approx(expected["lengths"], rel=1e-12)
    assert (found.duplicates.documents, found.duplicates.tokens) == (expected["extra"], expected["extra_tokens"])
    assert found.duplicates.share == expected["extra"] / len(documents)
    assert found.duplicates.groups == len(expected["groups"])
    largest = [(-group.documents, group.first, group.length) for group in found.duplicates.largest]
    assert largest == expected["groups"][:10]
    top = [(token.id, token.count) for token in found.vocabulary.top]
    assert top == expected["top"][:30]
    assert sum(token.share for token in found.vocabulary.top) == pytest.approx(1.0 if found.tokens else 0.0)
    assert found.vocabulary.unused == SIZE + 1 - len(expected["top"])
    assert found.vocabulary.covering_99 == expected["covering_99"]
    end = found.end_of_document
    assert end is not None
    occurrences = dict(expected["top"]).get(EOD, 0)
    assert (end.documents, end.alone, end.inside) == (
        expected["ended"], expected["alone"], occurrences - expected["ended"])  # fmt: skip
    edges = found.histogram.edges
    assert list(edges) == sorted(set(edges))
    in_bins = [
        [len(document) for document in documents if low <= len(document) < high] for low, high in pairwise(edges)
    ]
    assert found.histogram.documents == tuple(map(len, in_bins))
    assert found.histogram.tokens == tuple(map(sum, in_bins))
    assert sum(found.histogram.documents) == len(documents) - expected["empty"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.integers(0, SIZE), max_size=12), min_size=1, max_size=40),
    chunk_tokens=st.integers(1, 30),
)
def test_numbers_equal_a_naive_count(tmp_path: Path, documents: Documents, chunk_tokens: int) -> None:
    prefix = write_documents(tmp_path / "data", documents)
    check(measure(prefix, NullTokenizer(SIZE), chunk_tokens=chunk_tokens), documents)


def test_blocks_of_documents_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_llm.data.report.statistics._BLOCK_DOCUMENTS", 7)
    random = np.random.default_rng(0)
    documents = [random.integers(0, SIZE + 1, random.integers(0, 4)).tolist() for _ in range(500)]
    documents.append(random.integers(0, SIZE + 1, 3000).tolist())
    prefix = write_documents(tmp_path / "data", documents, dtype=np.int32)
    check(measure(prefix, NullTokenizer(SIZE), chunk_tokens=16), documents)


def test_the_chunk_changes_nothing(tmp_path: Path) -> None:
    documents = [[1, 2, 3] * 50, [4] * 7, [1, 2, 3] * 50, [5], [1, 2, 3] * 49]
    prefix = write_documents(tmp_path / "data", documents)
    whole = measure(prefix, NullTokenizer(SIZE))
    assert whole.duplicates.documents == 1
    assert whole.duplicates.largest[0].excerpt.startswith("1 2 3 1 2 3")
    for chunk_tokens in (1, 2, 149, 150, 151, 307):
        assert measure(prefix, NullTokenizer(SIZE), chunk_tokens=chunk_tokens) == whole


def test_a_document_of_several_sequences_is_one(tmp_path: Path) -> None:
    ids = np.array([1, 2, 3, 1, 2, 3, 4], dtype=np.uint16)
    with IndexedWriter(tmp_path / "data", ids.dtype, split=True) as writer:
        lengths, sequences = np.array([1, 2, 2, 1, 1], dtype=np.int32), np.array([2, 0, 2, 1], dtype=np.int32)
        writer.add_documents(ids.tobytes(), lengths.tobytes(), sequences.tobytes())
        writer.commit()
    check(measure(str(tmp_path / "data"), NullTokenizer(SIZE)), [[1, 2, 3], [], [1, 2, 3], [4]])


def test_documents_that_share_half_a_hash_are_not_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HalfHash:
        """A hash whose first half is the number of tokens."""

        def __init__(self, digest_size: int) -> None:
            self.data = b""

        def update(self, data: memoryview) -> None:
            self.data += bytes(data)

        def digest(self) -> bytes:
            return len(self.data).to_bytes(8, "little") + self.data[:2].ljust(8, b"\0")

    monkeypatch.setattr("mindspeed_llm.data.report.statistics.blake2b", HalfHash)
    documents = [[1, 1], [2, 1], [3], [4], [2, 1], [5, 1], [3], [6]]
    check(measure(write_documents(tmp_path / "data", documents), NullTokenizer(SIZE)), documents)


@pytest.mark.usefixtures("no_drawing")
def test_the_page_shows_the_numbers_of_the_json(tmp_path: Path) -> None:
    documents = [[2, 3, 4, 0], [2, 3, 4, 0], [5, 6, 7, 8, 9, 1, 0], [6] * 1500]
    prefix = write_documents(tmp_path / "data", documents)
    page, numbers = report(tmp_path, {"text": prefix}, Words(), bad_rows={"null": 3, "broken JSON": 11},
                           truncated=2, text_bytes={"text": 4545})  # fmt: skip
    data = numbers["datasets"]["text"]
    assert data["bytes_per_token"] == 4545 / 1515
    assert numbers["rows"] == {"kept": 4, "dropped": {"broken JSON": 11, "null": 3}, "truncated": 2}
    expected: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                collect(item)
        elif isinstance(value, int | float):
            expected.add(repr(value))

    collect(numbers)
    shown = {value for value, _ in page.values}
    assert shown <= expected
    # The page leaves out no figure of these; the rest are shares, which it writes as percentages.
    for part in (data["lengths"], data["histogram"]["documents"], data["histogram"]["tokens"], data["bytes_per_token"],
                 [token["count"] for token in data["vocabulary"]["top"]], numbers["rows"], data["documents"],
                 data["tokens"], [data["duplicates"][name] for name in ("documents", "tokens", "groups")],
                 [data["vocabulary"][name] for name in ("used", "unused", "unknown")],
                 [group["first"] for group in data["duplicates"]["largest"]]):  # fmt: skip
        expected.clear()
        collect(part)
        assert expected <= shown
    for value, text in page.values:
        unit = 100 if text.endswith("%") else 1
        assert float(re.sub("[, %]", "", text)) == pytest.approx(float(value) * unit, abs=0.051)
    assert "earlier one: 1 (25.0 %). Tokens in them: 4 (0.26 %). Groups of equal documents: 1," in page.text
    for finding in numbers["findings"]:
        assert finding["what"] in page.text


@pytest.mark.filterwarnings("error")  # matplotlib warns of a character that its font does not have
def test_text_from_the_data_is_only_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    prefix = write_documents(tmp_path / "data", [[2, 3, 4, 5, 6, 7, 8, 9, 1, 0]] * 3)
    page, _ = report(tmp_path, {evil: prefix, "$日$": prefix}, Words(), bad_rows={evil: 1})
    tags = {tag for tag, _ in page.tags}
    assert "script" not in tags
    assert [attributes["src"] for tag, attributes in page.tags if tag == "img" and "onerror" in attributes] == []
    assert sum(tag == "img" for tag, _ in page.tags) == 2
    unseen = ("U+202E", "↵", "part of a character")
    for text in (evil, SCRIPT, "<b>role", ' onload="x', "&amp;", "中文", *unseen):
        assert text.replace(" ", "") in page.text.replace(" ", "").replace("␣", "")
    assert "\u202e" not in page.text


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", [[2, 0]])
    page, _ = report(tmp_path, {"text": prefix}, Words())
    links = [value for _, attributes in page.tags for name, value in attributes.items()
             if name in ("src", "href", "srcset", "data", "action")]  # fmt: skip
    assert len(links) == 2
    for link in links:
        assert link is not None
        kind, _, content = link.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content, validate=True).startswith(PNG)
    assert "url(" not in page.text
    assert "@import" not in page.text


@pytest.mark.usefixtures("no_drawing")
def test_chinese_is_readable_and_a_cut_character_is_not_shown(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    poem = "海上生明月，天涯共此時。" * 30
    ids = tokenizer.encode(poem)
    prefix = write_documents(tmp_path / "data", [ids, ids, tokenizer.encode("月")])
    page, numbers = report(tmp_path, {"text": prefix}, tokenizer, text_bytes={"text": 2 * len(poem.encode()) + 3})
    excerpt = numbers["datasets"]["text"]["duplicates"]["largest"][0]["excerpt"]
    assert excerpt.endswith(" …")
    assert len(excerpt) > 40
    assert poem.startswith(excerpt.removesuffix(" …"))
    assert excerpt in page.text
    token = numbers["datasets"]["text"]["vocabulary"]["top"][0]
    assert token["text"] == tokenizer.decode([token["id"]])


def test_an_excerpt_does_not_end_in_half_a_character(tmp_path: Path) -> None:
    found = measure(write_documents(tmp_path / "data", [[6] * 95 + [8] * 9] * 2), Words())
    assert found.duplicates.largest[0].excerpt == "中文" * 80 + " …"
    found = measure(write_documents(tmp_path / "data", [[7] * 95 + [8] * 9] * 2), Words())
    assert found.duplicates.largest[0].excerpt == "\n" * 95 + " …"


@pytest.mark.parametrize(
    ("tokens", "short"),
    [(999_999, "999,999"), (1_234_567, "1.23 M"), (12_345_678_901, "12.3 B"), (5 * 10**12, "5.00 T")],
)
def test_large_numbers_have_a_unit_and_stand_in_full(tmp_path: Path, tokens: int, short: str) -> None:
    data = replace(measure(write_documents(tmp_path / "data", [[3, 0]]), Words()), tokens=tokens)
    page = Page(render("data", Rows(1, {}, 0), {"text": data}, (), {"text": (PNG, PNG)}))
    assert (str(tokens), short) in page.values
    assert f"{tokens:,}" in page.text


def test_a_space_that_a_tokenizer_drops_at_the_start_is_shown(tmp_path: Path) -> None:
    class Dropping(Words):
        texts = (" the", "the")
        special_ids = {}  # noqa: RUF012

        def decode(self, ids: Sequence[int]) -> str:
            return super().decode(ids).removeprefix(" ")

    found = measure(write_documents(tmp_path / "data", [[0, 0, 1]]), Dropping())
    assert [token.text for token in found.vocabulary.top] == [" the", "the"]


@pytest.mark.parametrize("documents", [[], [[]], [[], []], [[EOD]], [[3]]])
def test_corners(tmp_path: Path, documents: Documents) -> None:
    prefix = write_documents(tmp_path / "data", documents)
    page, numbers = report(tmp_path, {"text": prefix}, NullTokenizer(SIZE), text_bytes={"text": 0})
    data = numbers["datasets"]["text"]
    assert data["documents"] == len(documents)
    assert (data["lengths"] is None) == (not documents)
    assert ("There are no documents." in page.text) == (not documents)


def findings(tmp_path: Path, documents: Documents, tokenizer: Decoder, **values: Any) -> dict[str, str]:
    rows = Rows(len(documents), values.pop("dropped", {}), values.pop("truncated", 0))
    data = measure(write_documents(tmp_path / "data", documents), tokenizer, **values)
    found = find(rows, {"text": data})
    levels = [finding.level for finding in found]
    assert levels == sorted(levels, reverse=True)
    return {finding.what: finding.level for finding in found}


def test_good_data_has_no_findings(tmp_path: Path) -> None:
    documents = [[2 + number % 2, *[3] * (70 + number), 0] for number in range(25)]
    assert findings(tmp_path, documents, Words(), text_bytes=10_000) == {}
    data = measure(write_documents(tmp_path / "data", documents), Words())
    html = render("data", Rows(25, {}, 0), {"text": data}, (), {"text": (PNG, PNG)})
    assert "Nothing that needs attention was found." in Page(html).text


@pytest.mark.parametrize(
    ("documents", "values", "what", "level"),
    [
        ([[3] * 80 + [0]], {"dropped": {"null": 3}}, "3 rows dropped (75.0 %): 3 × null.", "warning"),
        ([[3] * 80 + [0]], {"truncated": 1}, "1 row truncated.", "warning"),
        ([[3] * 80 + [0]] * 2, {}, "50.0 % of documents are exact duplicates of an earlier one: 1 document, 50.0 % of "
         "the tokens.", "warning"),
        ([[3] * 80, [4] * 80], {}, "No document ends with the end-of-document token.", "warning"),
        ([[3] * 80, [4] * 80 + [0]], {}, "1 of 2 documents do not end with the end-of-document token.", "warning"),
        ([[3] * 80 + [0], [0]], {}, "1 document of nothing but the end-of-document token.", "warning"),
        ([[3] * 40 + [0] + [3] * 40 + [0]], {}, "The end-of-document token stands 1 × elsewhere than at an end.",
         "note"),
        ([[3] * 80 + [0], []], {}, "1 document without a token.", "warning"),
        ([[3] * 39 + [0]], {}, "Documents are short: the median is 40 tokens.", "note"),
        ([[3] * (number + 70) + [0] for number in range(24)] + [[3] * 5000 + [0]], {},
         "One document has 71.6 % of all tokens (5,001).", "warning"),
        ([[3] * 80 + [1, 0]], {}, "1.22 % of the tokens are the unknown token.", "warning"),
        ([[3] * 1999 + [0]], {"text_bytes": 3000}, "A token holds only 1.50 bytes of text.", "note"),
        ([[3] * 80 + [99, 0]], {}, "1 token with an id that the tokenizer does not have.", "warning"),
        ([], {}, "There are no documents.", "warning"),
    ],
)  # fmt: skip
def test_findings(tmp_path: Path, documents: Documents, values: dict[str, Any], what: str, level: str) -> None:
    assert findings(tmp_path, documents, Words(), **values).get(what) == level


def test_tokenizers_without_special_ids(tmp_path: Path) -> None:
    class Bare(Words):
        special_ids = {}  # noqa: RUF012

        @property
        def eod(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
            raise DataError("The tokenizer names no end-of-document token.")

    class Shared(Words):
        special_ids = {"eos_token": 0, "unk_token": 0}  # noqa: RUF012

    prefix = write_documents(tmp_path / "data", [[1, 2, 0]])
    bare, shared = measure(prefix, Bare()), measure(prefix, Shared())
    assert bare.end_of_document is None
    assert bare.vocabulary.unknown is None
    assert shared.vocabulary.unknown is None
    assert measure(prefix, Words()).vocabulary.unknown == 1
    assert "names no end-of-document" in find(Rows(1, {}, 0), {"text": bare})[0].what


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (1.0, "100 %"), (1e-7, "<0.01 %"), (0.0123, "1.23 %"), (0.5, "50.0 %"), (1 - 1e-7, ">99.9 %")],
)
def test_a_share_is_not_rounded_to_nothing_or_all(share: float, text: str) -> None:
    assert percent(share) == text


def test_floats_are_no_ids(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", [[1]], dtype=np.float32)
    with pytest.raises(DataError, match="holds no token ids"):
        measure(prefix, Words())


def test_missing_matplotlib_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_documents(tmp_path / "data", [[1]])
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="pip install matplotlib"):
        report(tmp_path, {"text": prefix}, Words())
    assert not list(tmp_path.glob("out*"))


def test_importing_the_report_is_light() -> None:
    code = (
        "import sys, mindspeed_llm.data.report; print([name for name in "
        "('torch', 'transformers', 'megatron', 'matplotlib') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
