"""Rows: what is a text, what is not and why, whoever parses it."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_llm.data.rows import read_rows
from mindspeed_llm.data.sources import InputFile, read_blocks

JSON_LINES = st.one_of(
    st.binary(max_size=40),
    st.dictionaries(st.sampled_from(["text", "txt"]), st.one_of(st.none(), st.integers(), st.text(max_size=20)))
    .map(json.dumps)
    .map(str.encode),
    st.text(max_size=20).map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode(errors="replace")),
).map(lambda line: line.replace(b"\n", b" "))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(JSON_LINES, max_size=12), block=st.integers(1, 60), last_newline=st.booleans())
def test_no_line_is_lost_whatever_it_holds(tmp_path: Path, lines: list[bytes], block: int, last_newline: bool) -> None:
    source = tmp_path / "rows.jsonl"
    content = b"\n".join(lines) + (b"\n" if last_newline else b"")
    source.write_bytes(content)
    good: dict[int, str] = {}
    bad: list[int] = []
    row = 1
    for piece in read_blocks([InputFile(str(source), "jsonl", None, len(content))], block_bytes=block):
        rows = read_rows(piece, ["text"])
        row = piece.first_row or row
        good.update(zip((row + number for number in rows.numbers), rows.texts[0], strict=True))
        bad += [row + number for number, _ in rows.bad]
        row += rows.count
    content = content.removeprefix(b"\xef\xbb\xbf")
    expected = content.split(b"\n")[: content.count(b"\n") + (not content.endswith(b"\n") and content != b"")]
    assert sorted([*good, *bad]) == list(range(1, len(expected) + 1))
    for number, line in enumerate(expected, start=1):
        assert good.get(number) == python_text(line), line


def python_text(line: bytes) -> str | None:
    """The text of a row as Python's own JSON reader sees it."""
    try:
        text = json.loads(line.decode())["text"]
        text.encode()
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return text or None
