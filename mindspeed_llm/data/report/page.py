"""The report as one HTML page: everything inline, no script, nothing fetched.

Whatever comes from the data (token text, excerpts, keys, reasons) goes through :func:`_visible` or ``html.escape``.
Every figure is a ``<data>`` element whose ``value`` is the number in the ``.json``.
"""

from __future__ import annotations

import unicodedata
from base64 import b64encode
from collections.abc import Iterable, Mapping
from html import escape

from mindspeed_llm.data.report.findings import WARNING, Finding, Rows, counted, percent
from mindspeed_llm.data.report.statistics import DatasetStatistics, Duplicates, Vocabulary

_CSS = """
:root { color-scheme: light dark; --page: #f5f6f8; --paper: #fff; --ink: #1c2430; --muted: #5a6675; --line: #e1e5ea;
  --bar: #2f6fb4; --tint: #dbe8f5; --warn: #8a4b00; --warn-tint: #fff3df; --warn-line: #e0912f; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --paper: #1a1f27; --ink: #e6eaf0; --muted: #9aa6b4;
  --line: #323a46; --bar: #6aa5e3; --tint: #24405c; --warn: #f3bd72; --warn-tint: #33281a; --warn-line: #b97a2b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p { margin: .25rem 0 .75rem; max-width: 46rem; }
code { font: .9em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.muted { color: var(--muted); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 1rem 1.25rem;
  margin: 0 0 1rem; }
.tiles { display: grid; grid-template-columns: repeat(6, 1fr); margin: 0 0 1rem; background: var(--paper);
  border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
.tiles div { padding: .75rem 1rem; border: solid var(--line); border-width: 0 1px 1px 0; margin: 0 -1px -1px 0; }
@media (max-width: 56rem) { .tiles { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 32rem) { .tiles { grid-template-columns: repeat(2, 1fr); } }
.tiles dt { color: var(--muted); font-size: .85rem; }
.tiles dd { margin: 0; }
.tiles .big { font-size: 1.5rem; font-weight: 600; line-height: 1.3; }
.tiles .small { color: var(--muted); font-size: .85rem; }
ul.findings { list-style: none; margin: 0 0 1rem; padding: 0; }
ul.findings li { background: var(--paper); border: 1px solid var(--line); border-left: 4px solid var(--bar);
  border-radius: 6px; padding: .5rem 1rem; margin: 0 0 .5rem; }
ul.findings li.warning { background: var(--warn-tint); border-color: var(--warn-line); }
.level { font-size: .75rem; font-weight: 700; text-transform: uppercase; letter-spacing: .05em; color: var(--bar);
  margin-right: .5rem; }
.warning .level { color: var(--warn); }
.advice { display: block; color: var(--muted); }
.warning .advice { color: inherit; opacity: .85; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
table.wide { width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1.25rem .3rem 0; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { color: var(--muted); font-size: .85rem; font-weight: 600; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.words { overflow-wrap: anywhere; min-width: 9rem; }
td.share { width: 30%; min-width: 6rem; vertical-align: middle; }
.bar { height: .6rem; min-width: 1px; background: var(--bar); border-radius: 0 3px 3px 0; }
.mark { color: var(--muted); font-size: .9em; }
.token { background: var(--tint); border-radius: 3px; padding: 0 .25rem; white-space: pre-wrap; }
img { display: block; width: 100%; height: auto; margin: .75rem 0 0; }
summary { cursor: pointer; color: var(--muted); margin-top: .75rem; }
@media print { :root { color-scheme: light; --page: #fff; --paper: #fff; --ink: #000; --muted: #444; --line: #ccc;
  --bar: #2f6fb4; --tint: #e8eff7; --warn: #8a4b00; --warn-tint: #fff; --warn-line: #e0912f; }
  body { font-size: 10pt; background: none; } main { max-width: none; padding: 0; }
  section { break-inside: avoid-page; padding: .5rem 0;
  border-width: 1px 0 0; border-radius: 0; } tr, li, .tiles, img { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .bar, .token, li { print-color-adjust: exact; -webkit-print-color-adjust: exact; } details { display: none; } }
"""

_MARKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


def render(
    title: str,
    rows: Rows,
    datasets: Mapping[str, DatasetStatistics],
    findings: Iterable[Finding],
    pictures: Mapping[str, tuple[bytes, bytes]],
) -> str:
    """The page.

    Args:
        title: what was prepared.
        rows: what became of the rows.
        datasets: key -> what is in it.
        findings: in the order in which they are shown.
        pictures: key -> its histogram as PNG, for a light and a dark page.
    """
    several = len(datasets) > 1
    body = [f"<header><h1>Data report: {_visible(title)}</h1></header>", _finding_list(findings, several)]
    for key, dataset in datasets.items():
        body += [f"<h2>{_visible(key)}</h2>"] * several + [_tiles(rows, dataset)]
    body += ["<h2>Rows of the input</h2>", _rows(rows)]
    for key, dataset in datasets.items():
        body.append(f"<h2>Dataset <code>{_visible(key)}</code></h2>")
        body.append(f'<p class="muted"><code>{_visible(dataset.prefix)}</code>')
        body.append("Documents are numbered from 0, in the order of the file.</p>")
        body += [_lengths(dataset, pictures[key]), _duplicates(dataset.duplicates), _vocabulary(dataset.vocabulary)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Data report: {_plain(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _tiles(rows: Rows, dataset: DatasetStatistics) -> str:
    lengths, vocabulary = dataset.lengths, dataset.vocabulary
    tiles = [
        ("Documents", _short(dataset.documents), f"{counted(sum(rows.dropped.values()), 'row')} dropped"),
        ("Tokens", _short(dataset.tokens), f"{dataset.tokens:,}" if dataset.tokens >= 1e6 else ""),
        ("Median length", *_median(dataset)),
        ("Bytes per token", _decimal(dataset.bytes_per_token), _bytes(dataset.text_bytes)),
        ("Exact duplicates", percent(dataset.duplicates.share), f"{percent(dataset.duplicates.token_share)} of tokens"),
        ("Vocabulary in use", percent(vocabulary.used / vocabulary.size) if vocabulary.size else "–",
         f"{vocabulary.unused:,} ids never occur"),
    ]  # fmt: skip
    if lengths is None:
        del tiles[2:5]
    cells = "".join(
        f'<div><dt>{name}</dt><dd class="big">{big}</dd><dd class="small">{small}</dd></div>'
        for name, big, small in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _median(dataset: DatasetStatistics) -> tuple[str, str]:
    if dataset.lengths is None:
        return "–", ""
    return f"{dataset.lengths.median:,.0f}", f"tokens; p99 {dataset.lengths.p99:,.0f}, max {dataset.lengths.maximum:,}"


def _finding_list(findings: Iterable[Finding], several: bool) -> str:
    items: list[str] = []
    for finding in findings:
        kind = "warning" if finding.level == WARNING else "note"
        where = f"<code>{_visible(finding.dataset)}</code>: " if several and finding.dataset is not None else ""
        items.append(
            f'<li class="{kind}"><span class="level">{kind}</span>{where}{_visible(finding.what)}'
            f'<span class="advice">{_visible(finding.advice)}</span></li>'
        )
    if not items:
        items = ['<li class="note"><span class="level">all good</span>Nothing that needs attention was found.</li>']
    return f'<ul class="findings">{"".join(items)}</ul>'


def _rows(rows: Rows) -> str:
    lines = [("kept", _number(rows.kept)), ("of them truncated", _number(rows.truncated))]
    lines += [(f"dropped: {_visible(reason)}", _number(count)) for reason, count in rows.dropped.items()]
    return f"<section>{_table(('', '#rows'), lines)}</section>"


def _lengths(dataset: DatasetStatistics, picture: tuple[bytes, bytes]) -> str:
    if dataset.lengths is None:
        return "<section><h3>Tokens per document</h3><p>There are no documents.</p></section>"
    value = dataset.lengths
    table = _table(
        ("#min", "#mean", "#median", "#90 %", "#99 %", "#max", "#without tokens"),
        [[_number(value.minimum), _number(value.mean), _number(value.median), _number(value.p90), _number(value.p99),
          _number(value.maximum), _number(dataset.empty)]],
    )  # fmt: skip
    light, dark = (f"data:image/png;base64,{b64encode(image).decode()}" for image in picture)
    bins = dataset.histogram
    ranges = zip(bins.edges[:-1], bins.edges[1:], bins.documents, bins.tokens, strict=True)
    details = _table(
        ("length", "#documents", "#tokens"),
        [
            (f"{low:,}" if high == low + 1 else f"{low:,} – {high - 1:,}", _number(documents), _number(tokens))
            for low, high, documents, tokens in ranges
        ],
    )
    return (
        f"<section><h3>Tokens per document</h3>{table}"
        f'<picture><source srcset="{dark}" media="screen and (prefers-color-scheme: dark)">'
        f'<img src="{light}" alt="Histogram of the tokens per document: half of the documents have up to '
        f'{value.median:,.0f} tokens, 90 % up to {value.p90:,.0f}, the longest has {value.maximum:,}."></picture>'
        f"<details><summary>The histogram as a table</summary>{details}</details></section>"
    )


def _duplicates(found: Duplicates) -> str:
    if not found.groups:
        return "<section><h3>Exact duplicates</h3><p>No document has the same ids as an earlier one.</p></section>"
    text = (
        f"<p>Documents with the same ids as an earlier one: {_number(found.documents)} ({percent(found.share)}). "
        f"Tokens in them: {_number(found.tokens)} ({percent(found.token_share)}). "
        f"Groups of equal documents: {_number(found.groups)}, the largest first:</p>"
    )
    table = _table(
        ("#documents", "#first", "#tokens each", "begins with"),
        [
            (_number(group.documents), _number(group.first), _number(group.length), _excerpt(group.excerpt))
            for group in found.largest
        ],
        wide="words",
    )
    return f"<section><h3>Exact duplicates</h3>{text}{table}</section>"


def _vocabulary(found: Vocabulary) -> str:
    facts = [
        f"{_number(found.used)} of {_number(found.size)} ids occur, {_number(found.unused)} never do; the "
        f"{_number(found.covering_99)} most frequent ones make up 99 % of the tokens."
    ]
    if found.unknown is not None and found.unknown_share is not None:
        facts.append(f"Unknown tokens: {_number(found.unknown)} ({percent(found.unknown_share)}).")
    if found.outside:
        facts.append(f"Ids outside the vocabulary: {_number(found.outside)}.")
    widest = found.top[0].share if found.top else 1.0
    table = _table(
        ("#id", "token", "#count", "#share", ""),
        [
            (
                _number(token.id, grouped=False),
                f'<span class="token">{_visible(token.text, spaces=True)}</span>'
                + "".join(f' <span class="mark">{_plain(role)}</span>' for role in token.roles),
                _number(token.count),
                f'<data value="{token.share!r}">{percent(token.share)}</data>',
                f'<div class="bar" style="width:{token.share / widest * 100:.1f}%"></div>',
            )
            for token in found.top
        ],
        wide="share",
    )
    return f"<section><h3>Most frequent tokens</h3><p>{' '.join(facts)}</p>{table}</section>"


def _table(head: Iterable[str], lines: Iterable[Iterable[str]], *, wide: str = "") -> str:
    """A table of cells that are HTML.

    Args:
        head: titles; one with ``#`` stands over a column of numbers.
        lines: the rows.
        wide: class of the last column when the table takes the whole width.
    """
    titles = list(head)
    kinds = ["number" if title.startswith("#") else "words" for title in titles]
    if wide:
        kinds[-1] = wide
    top = "".join(
        f'<th scope="col" class="{kind}">{title.removeprefix("#")}</th>'
        for kind, title in zip(kinds, titles, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"
        for cells in lines
    )
    kind = "wide" if wide else "narrow"
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float, *, grouped: bool = True) -> str:
    if isinstance(value, int):
        shown = f"{value:,}" if grouped else str(value)
    else:
        shown = f"{value:,.1f}".removesuffix(".0")
    return f'<data value="{value!r}">{shown}</data>'


def _short(value: int) -> str:
    """Three or four digits with a unit; the exact number stands below it or in a table."""
    shown = f"{value:,}"
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= unit:
            shown = f"{value / unit:.{2 if value < 10 * unit else 1}f} {name}"
            break
    return f'<data value="{value!r}">{shown}</data>'


def _decimal(value: float | None) -> str:
    return "–" if value is None else f'<data value="{value!r}">{value:.2f}</data>'


def _bytes(value: int | None) -> str:
    return "size of the text not known" if value is None else f"{_number(value)} bytes of text"


def _excerpt(text: str) -> str:
    return f"<bdi>{_visible(text)}</bdi>" if text else '<span class="mark">no text</span>'


def _plain(text: str) -> str:
    """For places that hold no elements."""
    return escape("".join(" " if unicodedata.category(char).startswith("C") else char for char in text))


def _visible(text: str, *, spaces: bool = False) -> str:
    """Text as HTML, with marks for what has no shape of its own.

    Args:
        text: from the data.
        spaces: mark spaces as well.
    """
    if spaces and not text:
        return '<span class="mark">no text</span>'
    if spaces and not text.strip("\ufffd"):
        return '<span class="mark">part of a character</span>'
    parts: list[str] = []
    for char in text:
        mark = None if char == " " and not spaces else _MARKS.get(char)
        # Control and format characters: a right-to-left override would reorder the page.
        if mark is None and unicodedata.category(char)[0] == "C":
            mark = f"U+{ord(char):04X}"
        parts.append(escape(char) if mark is None else f'<span class="mark">{mark}</span>')
    return "".join(parts)
