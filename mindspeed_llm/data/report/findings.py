"""What a reader of the report should know first, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed_llm.data.report.statistics import DatasetStatistics

WARNING, NOTE = "warning", "note"

_MANY_DUPLICATES = 0.01
_SHORT_MEDIAN = 64
_LONG_DOCUMENT_SHARE = 0.1
_UNKNOWN_SHARE = 0.001
_FEW_BYTES = 2.0
_ENOUGH_DOCUMENTS = 20
"""Below this, one long document is no outlier."""
_ENOUGH_TOKENS = 1000
"""Below this, bytes per token say little."""


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
        level: ``warning`` or ``note``.
        what: the fact, with its figures.
        advice: what can be done about it.
        dataset: the key it is about; None for the preparation as a whole.
    """

    level: str
    what: str
    advice: str
    dataset: str | None = None


@dataclass(frozen=True)
class Rows:
    """What became of the rows of the input.

    Attributes:
        kept: rows that gave a document.
        dropped: reason -> rows that gave none.
        truncated: rows of which only a part was kept.
    """

    kept: int
    dropped: dict[str, int]
    truncated: int

    @property
    def dropped_share(self) -> float:
        """Of all rows."""
        dropped = sum(self.dropped.values())
        return dropped / (dropped + self.kept) if dropped else 0.0


def percent(share: float) -> str:
    """A share as it is written: never 0 % for something or 100 % for less than all."""
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    if 0 < share < 0.0001:
        return "<0.01 %"
    if 0.9995 <= share < 1:
        return ">99.9 %"
    return f"{share * 100:.{1 if share >= 0.1 else 2}f} %"


def counted(number: int, noun: str) -> str:
    """``1 document``, ``2 documents``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def find(rows: Rows, datasets: Mapping[str, DatasetStatistics]) -> tuple[Finding, ...]:
    """All findings, warnings first."""
    found = list(_about_rows(rows))
    for key, dataset in datasets.items():
        for finding in (_about_content, _about_ends, _about_lengths, _about_tokens):
            found.extend(Finding(level, what, advice, key) for level, what, advice in finding(dataset))
    return tuple(sorted(found, key=lambda finding: finding.level != WARNING))


def _about_rows(rows: Rows) -> Iterator[Finding]:
    dropped = sum(rows.dropped.values())
    if dropped:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in list(rows.dropped.items())[:3])
        yield Finding(
            WARNING,
            f"{counted(dropped, 'row')} dropped ({percent(rows.dropped_share)}): {reasons}"
            + (", and others." if len(rows.dropped) > 3 else "."),
            "File and line of each are in the .bad_rows.jsonl beside the data.",
        )
    if rows.truncated:
        yield Finding(
            WARNING,
            f"{counted(rows.truncated, 'row')} truncated.",
            "What was cut off is not in the data; split long texts before the preparation to keep it.",
        )


_Found = Iterator[tuple[str, str, str]]


def _about_content(data: DatasetStatistics) -> _Found:
    if data.documents == 0:
        yield WARNING, "There are no documents.", "Look at the rows that were dropped."
    if data.vocabulary.outside:
        yield (
            WARNING,
            f"{counted(data.vocabulary.outside, 'token')} with an id that the tokenizer does not have.",
            "The data was made with another tokenizer: prepare it again.",
        )
    if data.empty:
        yield (
            WARNING,
            f"{counted(data.empty, 'document')} without a token.",
            "They do no harm in training, but something went missing on the way.",
        )
    copies = data.duplicates
    if copies.documents:
        yield (
            WARNING if copies.share >= _MANY_DUPLICATES else NOTE,
            f"{percent(copies.share)} of documents are exact duplicates of an earlier one: "
            f"{counted(copies.documents, 'document')}, {percent(copies.token_share)} of the tokens.",
            "Repeated text is learnt by heart; remove duplicates from the input unless the repetition is meant.",
        )


def _about_ends(data: DatasetStatistics) -> _Found:
    end = data.end_of_document
    if end is None:
        yield (
            NOTE,
            "The tokenizer names no end-of-document token.",
            "Without one a model is not told where a document ends: give the whole folder of the tokenizer.",
        )
        return
    with_tokens = data.documents - data.empty
    if with_tokens and end.documents == 0:
        yield (
            WARNING,
            "No document ends with the end-of-document token.",
            "The model would not learn to stop, and documents run into each other: prepare with --append-eod.",
        )
    elif end.documents < with_tokens:
        yield (
            WARNING,
            f"{with_tokens - end.documents:,} of {with_tokens:,} documents do not end with the end-of-document token.",
            "Data of two preparations was mixed, or documents were cut.",
        )
    if end.alone:
        yield (
            WARNING,
            f"{counted(end.alone, 'document')} of nothing but the end-of-document token.",
            "Their rows have no text that the tokenizer sees.",
        )
    if end.inside:
        yield (
            NOTE,
            f"The end-of-document token stands {end.inside:,} × elsewhere than at an end.",
            "Flags that look for ends (--reset-position-ids, --reset-attention-mask, --eod-mask-loss) take each for "
            "one. The input most likely holds the token as text.",
        )


def _about_lengths(data: DatasetStatistics) -> _Found:
    if data.lengths is None or data.tokens == 0:
        return
    if data.lengths.median < _SHORT_MEDIAN:
        yield (
            NOTE,
            f"Documents are short: the median is {data.lengths.median:,.0f} tokens.",
            "See that a row is a document and not one line of it. With truly short documents, consider "
            "--reset-attention-mask, so that the many in one training sample do not see each other.",
        )
    share = data.lengths.maximum / data.tokens
    if share > _LONG_DOCUMENT_SHARE and data.documents >= _ENOUGH_DOCUMENTS:
        yield (
            WARNING,
            f"One document has {percent(share)} of all tokens ({data.lengths.maximum:,}).",
            "See that it is text and not a dump that slipped in.",
        )


def _about_tokens(data: DatasetStatistics) -> _Found:
    if data.vocabulary.unknown_share is not None and data.vocabulary.unknown_share > _UNKNOWN_SHARE:
        yield (
            WARNING,
            f"{percent(data.vocabulary.unknown_share)} of the tokens are the unknown token.",
            "The tokenizer lacks characters of this text: take another, or clean the text.",
        )
    if data.bytes_per_token is not None and data.bytes_per_token < _FEW_BYTES and data.tokens >= _ENOUGH_TOKENS:
        yield (
            NOTE,
            f"A token holds only {data.bytes_per_token:.2f} bytes of text.",
            "The tokenizer cuts this text finely: it may have been made for another language, or be small.",
        )
