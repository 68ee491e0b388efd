"""Texts on which tokenizers differ when they differ at all, and ordinary ones."""

from __future__ import annotations

import json

from tests.unit.data.corpus import QUICKSTART

ODD_TEXTS = [
    "",
    " ",
    "  ",
    "\n\n",
    "\t\r\n \r\n",
    "a  b   c    d",
    "    def f(x):\n        return  x  \n\n\n",
    " leading and trailing  ",
    "line\r\nline\rline",
    "naïve café, cafe\u0301",
    "\u00e9 e\u0301 n\u0303 \u1e9b\u0323",
    "日詩\n宋太祖　全角",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "a\u200b\u00a0b\ufeffc\u2581d",
    "zero\0byte",
    "1234 5,678.90 ٣٤",
    "don't WE'LL i'd",
    "<|endoftext|>x<|pad|><s>y</s> <unk>[CLS] [SEP][MASK]",
    "ﬁ ﬂ Å ｆｕｌｌ",
    "हिन्दी العربية ไทย",
    "=" * 300 + " " * 300,
]


def shipped_texts() -> list[str]:
    """The documents that come with the quickstart."""
    rows = (QUICKSTART / "text" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(row)["text"] for row in rows]
