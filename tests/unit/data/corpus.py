"""Small corpora for tests, and configurations that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_llm.config.run import SECTIONS, RunConfig
from mindspeed_llm.data.indexed import IndexedWriter

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"
TOKENIZER = QUICKSTART / "model"


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], dtype: type = np.uint16) -> str:
    """Write documents of ids; returns the prefix."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            ids = np.array(document, dtype=dtype)
            writer.add_documents(ids.tobytes(), np.array([len(ids)], dtype=np.int32).tobytes())
        writer.commit()
    return str(prefix)


def numbered_documents(lengths: Sequence[int], eod: int) -> list[list[int]]:
    """Documents of ``lengths`` tokens, the last of each ``eod``; all other tokens of the corpus differ."""
    documents: list[list[int]] = []
    start = 0
    for length in lengths:
        documents.append([*range(start, start + length - 1), eod])
        start += length - 1
    return documents


def run_config(**values: Any) -> RunConfig:
    """A configuration of defaults, with the fields named; each goes to the section that has it."""
    cfg = RunConfig(**{name: section() for name, section in SECTIONS.items()})
    for name in SECTIONS:
        section = getattr(cfg, name)
        mine = {key: value for key, value in values.items() if key in vars(section)}
        cfg = replace(cfg, **{name: replace(section, **mine)})
    return cfg
