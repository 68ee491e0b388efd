"""Rows that gave no document: counted, listed in a file, or the end of the preparation."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mindspeed_llm.data.indexed import discard, open_alone
from mindspeed_llm.data.rows import BadRow
from mindspeed_llm.errors import DataError

logger = logging.getLogger(__name__)

SKIP, STOP = "skip", "stop"


def bad_rows_path(output_prefix: str) -> Path:
    """``<output_prefix>.bad_rows.jsonl``."""
    return Path(f"{output_prefix}.bad_rows.jsonl")


class BadRows:
    """Counts bad rows and lists them in a file, which exists only when there are some.

    The file appears with :meth:`commit`; leaving the ``with`` block without it leaves nothing.

    Args:
        output_prefix: of the preparation.
        policy: ``skip`` or ``stop``.
    """

    def __init__(self, output_prefix: str, policy: str) -> None:
        self.path = bad_rows_path(output_prefix)
        self.policy = policy
        self.reasons: Counter[str] = Counter()
        self._partial = Path(f"{self.path}.partial")
        self._stream = open_alone(self._partial)

    @property
    def count(self) -> int:
        """Bad rows so far."""
        return self.reasons.total()

    def summary(self) -> str:
        """Reasons with their counts, the most frequent first."""
        return ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common(5))

    def add(self, rows: Sequence[BadRow]) -> None:
        """Take note of rows.

        Raises:
            DataError: the policy is ``stop``.
        """
        if rows and self.policy == STOP:
            first = rows[0]
            raise DataError(
                "A row gives no document.",
                got=f"{first.path}:{first.line}: {first.reason}",
                fix="mend the row, or --on-bad-row skip",
            )
        for row in rows:
            self.reasons[row.reason.split(":")[0]] += 1
            line = json.dumps({"file": row.path, "line": row.line, "reason": row.reason}) + "\n"
            self._stream.write(line.encode())

    def commit(self) -> Path | None:
        """Make the list visible; remove the one of an earlier run when there is nothing to list."""
        self._stream.flush()
        if self.count == 0:
            self.path.unlink(missing_ok=True)
            discard(self._stream, self._partial)
            return None
        self._partial.replace(self.path)
        self._stream.close()
        logger.warning("%d bad rows skipped: %s", self.count, self.summary())
        return self.path

    def __enter__(self) -> BadRows:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._stream.closed:
            discard(self._stream, self._partial)


def read_bad_rows(output_prefix: str) -> list[BadRow]:
    """The list of an earlier preparation."""
    path = bad_rows_path(output_prefix)
    if not path.is_file():
        return []
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [BadRow(row["file"], row["line"], row["reason"]) for row in rows]
