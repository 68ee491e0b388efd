"""Whether boxes fill a tensor, by counting; damaged saves are in ``tests/unit/tools/test_checkpoint.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mindspeed_llm.checkpoint.verify import coverage


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([], (12, 0)),
        ([((0, 0), (3, 4))], (0, 0)),
        ([((0, 0), (3, 4)), ((1, 1), (1, 2))], (0, 2)),
        ([((0, 0), (2, 4)), ((2, 0), (1, 3))], (1, 0)),
        # As many elements as there are, but not each once.
        ([((0, 0), (2, 4)), ((1, 0), (1, 4))], (4, 4)),
        ([((0, 0), (3, 2)), ((0, 2), (1, 2)), ((1, 2), (2, 2))], (0, 0)),
    ],
)
def test_coverage_against_counting(boxes: list[Any], expected: tuple[int, int]) -> None:
    counts = np.zeros((3, 4), dtype=int)
    for (row, column), (rows, columns) in boxes:
        counts[row : row + rows, column : column + columns] += 1
    assert coverage(boxes, (3, 4)) == expected == ((counts == 0).sum(), (counts > 1).sum())
