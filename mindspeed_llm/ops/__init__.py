"""Fused ops: definitions, implementations per device, and the table of a run. ``README.md`` says how to add one.

Importing this builds nothing and chooses nothing. A run chooses once, :func:`activate`; modules ask :func:`active` for
their functions when they are built. Until then, and in library use, every op is its reference.
"""

from __future__ import annotations

import functools
from importlib.metadata import entry_points

from mindspeed_llm.ops.dispatch import (
    Impl,
    OpRegistry,
    OpRow,
    OpSpec,
    OpTable,
    choose,
    parse_choices,
    references,
)

ENTRY_POINT_GROUP = "mindspeed_llm.ops"


@functools.cache
def registry() -> OpRegistry:
    """Every op of the suite, and of installed packages with an entry point in ``mindspeed_llm.ops``.

    Such an entry point is a function that takes the :class:`OpRegistry` and adds to it.
    """
    from mindspeed_llm.ops import rms_norm

    known = OpRegistry()
    rms_norm.register(known)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        entry.load()(known)
    return known


class _Active:
    table: OpTable | None = None


def activate(table: OpTable | None) -> None:
    """Make ``table`` (see :func:`choose`) the one that modules built from now on use; None for the references."""
    _Active.table = table


def active() -> OpTable:
    """The table that :func:`activate` set, else the references."""
    return _Active.table if _Active.table is not None else references(registry())


__all__ = [
    "Impl",
    "OpRegistry",
    "OpRow",
    "OpSpec",
    "OpTable",
    "activate",
    "active",
    "choose",
    "parse_choices",
    "references",
    "registry",
]
