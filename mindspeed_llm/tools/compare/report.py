"""A comparison in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mindspeed_llm.tools.compare.differences import Comparison, Difference

_WORST = 5
"""Parameters shown when not all are."""


def describe(found: Comparison, tolerance: float, *, everything: bool) -> Iterator[str]:
    """The lines of the report.

    Args:
        found: what was compared.
        tolerance: largest relative RMS of tensors that count as equal.
        everything: list every module and parameter.
    """
    yield f"loss: A {found.loss[0]:.8g}, B {found.loss[1]:.8g}"
    yield from _first("forward", found.forward, tolerance)
    yield from _first("backward", found.backward, tolerance)
    beyond = [row for row in found.parameters if row.beyond(tolerance)]
    if not beyond:
        yield f"parameters: all {len(found.parameters)} gradients are equal"
    else:
        yield f"parameters: {len(beyond)} of {len(found.parameters)} gradients differ; the most:"
        yield from map(_row, sorted(beyond, key=lambda row: -row.relative_rms)[:_WORST])
    if found.left_out:
        yield f"not compared: {len(found.left_out)}" + ("" if everything else " (--all lists them)")
    if everything:
        yield from (f"  {line}" for line in found.left_out)
        for kind in ("forward", "backward", "parameters"):
            yield f"{kind}:"
            yield from (_row(row, "*" if row.beyond(tolerance) else " ") for row in getattr(found, kind))
    yield verdict(found, tolerance)


def verdict(found: Comparison, tolerance: float) -> str:
    """The last line: equal, or the first module that differs."""
    forward, backward = (_index(rows, tolerance) for rows in (found.forward, found.backward))
    if forward is not None:
        return f"FIRST DIFFERENCE: forward {found.forward[forward].ours}"
    if backward is not None:
        # Equal up to one module's output, different at that of an earlier one: it is what lies between.
        last = found.backward[backward - 1].ours if backward else "the loss"
        return f"FIRST DIFFERENCE: backward from {last} to {found.backward[backward].ours}"
    if found.differs(tolerance):
        worst = max(found.parameters, key=lambda row: row.relative_rms)
        return f"FIRST DIFFERENCE: gradient of {worst.hf}"
    return "EQUAL"


def _index(rows: Sequence[Difference], tolerance: float) -> int | None:
    return next((index for index, row in enumerate(rows) if row.beyond(tolerance)), None)


def _first(kind: str, rows: Sequence[Difference], tolerance: float) -> Iterator[str]:
    index = _index(rows, tolerance)
    what = "outputs" if kind == "forward" else "gradients of outputs"
    if index is None:
        worst = max((row.relative_rms for row in rows), default=0.0)
        yield f"{kind}: {len(rows)} {what} are equal, within {worst:.1e}"
        return
    last = f"; the last equal one: {rows[index - 1].ours}" if index else ""
    yield f"{kind}: the first of {len(rows)} {what} that differs{last}"
    yield _row(rows[index])


def _row(row: Difference, mark: str = "") -> str:
    name = f"{row.ours}  <->  {row.hf}" if row.ours else row.hf
    figures = f"norm A {row.norm_a:.6g}, B {row.norm_b:.6g}, max |d| {row.max_abs:.2e}"
    return f"  {mark}{name}: {figures}, relative RMS {row.relative_rms:.2e}"
