"""How a field of a section dataclass says more about its flag than its name, type and default do."""

from __future__ import annotations

import dataclasses
from typing import Any

OPTION_KEY = "option"


@dataclasses.dataclass(frozen=True)
class Option:
    """What a field adds to its flag.

    Attributes:
        flags: spellings besides ``--field-name``, each with its dashes. For a boolean whose default is True they
            turn it off, as megatron-core's ``argparse_meta`` has it.
        count: how many values a sequence takes; None means any number.
        is_flag: False for a value that is only derived, never given.
    """

    flags: tuple[str, ...] = ()
    count: int | None = None
    is_flag: bool = True


def names(text: str) -> tuple[str, ...]:
    """The words of ``text``: a long list of names, readable in source."""
    return tuple(text.split())


def option(default: Any, *, flags: tuple[str, ...] = (), count: int | None = None, is_flag: bool = True) -> Any:
    """A dataclass field with ``default`` whose metadata carries an :class:`Option`."""
    return dataclasses.field(default=default, metadata={OPTION_KEY: Option(flags, count, is_flag)})
