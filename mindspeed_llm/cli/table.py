"""Tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def write_table(title: str, head: Sequence[str], rows: Sequence[Iterable[object]]) -> None:
    """Write rows under their heads to stdout, with lines around them on a terminal.

    Args:
        head: one for each column; empty ones are not shown.
        rows: of the same length.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*head, title=Text(title), title_justify="left", show_header=any(head))
        for row in cells:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    lines = [list(head), *cells] if any(head) else cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sys.stdout.write(f"{title}\n")
    for line in lines:
        sys.stdout.write(
            ("  " + "  ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True))).rstrip() + "\n"
        )
