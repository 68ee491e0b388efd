"""From prepared datasets to the three files of the report."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mindspeed_llm.data.report.figure import DARK, LIGHT, draw_lengths, require_matplotlib
from mindspeed_llm.data.report.findings import Rows, find
from mindspeed_llm.data.report.page import render
from mindspeed_llm.data.report.statistics import DatasetStatistics, Decoder, measure

logger = logging.getLogger(__name__)

FORMAT = 1


def write_report(
    prefixes: Mapping[str, str],
    tokenizer: Decoder,
    *,
    bad_rows: Mapping[str, int],
    truncated: int,
    text_bytes: Mapping[str, int],
    output: str,
) -> Path:
    """Describe prepared datasets in ``<output>.report.html``, ``.report.png`` and ``.report.json``.

    Args:
        prefixes: key -> prefix of its dataset.
        tokenizer: the one that made them.
        bad_rows: reason -> rows that gave no document.
        truncated: rows of which only a part was kept.
        text_bytes: key -> UTF-8 bytes of the text that was encoded; a key may be missing.
        output: what the names of the three files begin with; of ``dir/`` they lie in ``dir``.

    Returns:
        The HTML page.

    Raises:
        DataError: a dataset is missing or damaged, or matplotlib is not installed.
    """
    require_matplotlib()
    datasets: dict[str, DatasetStatistics] = {}
    for key, prefix in prefixes.items():
        logger.info("Reading %s for the report.", prefix)
        datasets[key] = measure(prefix, tokenizer, text_bytes=text_bytes.get(key))
    kept = max((dataset.documents for dataset in datasets.values()), default=0)
    dropped = dict(sorted(bad_rows.items(), key=lambda item: (-item[1], item[0])))
    rows = Rows(kept, dropped, truncated)
    findings = find(rows, datasets)
    pictures = {
        key: (draw_lengths({key: dataset}, LIGHT), draw_lengths({key: dataset}, DARK))
        for key, dataset in datasets.items()
    }
    numbers = {
        "format": FORMAT,
        "rows": asdict(rows),
        "findings": [asdict(finding) for finding in findings],
        "datasets": {key: asdict(dataset) for key, dataset in datasets.items()},
    }
    _write(Path(f"{output}.report.json"), json.dumps(numbers, ensure_ascii=False, indent=2) + "\n")
    _write(Path(f"{output}.report.png"), draw_lengths(datasets))
    page = Path(f"{output}.report.html")
    _write(page, render(os.path.basename(output), rows, datasets, findings, pictures))
    return page


def _write(path: Path, content: bytes | str) -> None:
    """Write a file, complete or not at all."""
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")  # the name of a file need not be UTF-8
    partial = Path(f"{path}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
