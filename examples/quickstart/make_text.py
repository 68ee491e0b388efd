"""Made text/train.jsonl and text/valid.jsonl out of the two sources that text/SOURCE.md names.

Usage: python make_text.py TINYSHAKESPEARE.txt TANG_SONG_POEMS.jsonl OUTPUT_DIR

Speeches are joined to documents of about 1500 characters, a poem is a document. Documents are put in the order of their
SHA-256, so that both languages are mixed and the result is the same everywhere; the first 1/24 of each is held out.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

DOCUMENT_CHARACTERS = 1500
SHAKESPEARE_BYTES = 640_000
POEM_BYTES = 520_000
HELD_OUT = 24


def speeches(text: str) -> list[str]:
    """Join neighbouring speeches to documents."""
    documents: list[str] = []
    current: list[str] = []
    for speech in text.strip().split("\n\n"):
        current.append(speech)
        if sum(map(len, current)) >= DOCUMENT_CHARACTERS:
            documents.append("\n\n".join(current))
            current = []
    if current:
        documents.append("\n\n".join(current))
    return documents


def first_bytes(documents: list[str], limit: int) -> list[str]:
    """The leading documents that fit into ``limit`` bytes of UTF-8."""
    kept: list[str] = []
    size = 0
    for document in documents:
        size += len(document.encode())
        if size > limit:
            break
        kept.append(document)
    return kept


def by_digest(documents: list[str]) -> list[str]:
    """The documents, each once, in the order of their SHA-256."""
    return sorted(set(documents), key=lambda text: hashlib.sha256(text.encode()).digest())


def main(shakespeare: Path, poems: Path, output: Path) -> None:
    """Write both files."""
    english = first_bytes(speeches(shakespeare.read_text(encoding="utf-8")), SHAKESPEARE_BYTES)
    rows = poems.read_text(encoding="utf-8").splitlines()
    chinese = first_bytes(by_digest([json.loads(row)["text"] for row in rows]), POEM_BYTES)
    parts: dict[str, list[str]] = {"train": [], "valid": []}
    for documents in (by_digest(english), chinese):
        held_out = len(documents) // HELD_OUT
        parts["valid"] += documents[:held_out]
        parts["train"] += documents[held_out:]
    for name, documents in parts.items():
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in by_digest(documents)]
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
