"""What a spelling means, wherever it is written: on the command line, in YAML or in the environment."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

from mindspeed_llm.config.aliases import ALIASES, Alias
from mindspeed_llm.config.no_effect import NO_EFFECT, NoEffect
from mindspeed_llm.config.refused import refusal
from mindspeed_llm.config.resolve import Layer
from mindspeed_llm.config.schema import FieldSpec, field_table
from mindspeed_llm.config.values import convert, to_bool
from mindspeed_llm.errors import ConfigError


@dataclass(frozen=True)
class FieldFlag:
    """A spelling of a field; ``means`` is what a boolean's spelling turns it to."""

    spec: FieldSpec
    means: bool


Meaning = FieldFlag | Alias | NoEffect


@functools.cache
def meanings() -> Mapping[str, Meaning]:
    """Every accepted spelling, with its dashes."""
    table: dict[str, Meaning] = {}
    for spec in field_table().values():
        if spec.has_flag:
            table |= {spelling: FieldFlag(spec, means) for spelling, means in spec.spellings().items()}
    # The hand-written tables win: they say more than the spelling that would follow from a name.
    return MappingProxyType({**table, **ALIASES, **NO_EFFECT})


def meaning_of(spelling: str) -> Meaning | None:
    """What ``spelling`` (with its dashes) means; None where it is not accepted."""
    # Spellings are lower case but for one historical field name.
    return meanings().get(spelling) or _folded().get(spelling)


def as_flag(key: str) -> str:
    """``key`` of a YAML file or the environment as it is spelled on the command line."""
    return "--" + key.strip().lower().lstrip("-").replace("_", "-")


def unknown_flag(spelling: str, source: str) -> ConfigError:
    """The error for a spelling that nothing accepts: refused with a reason, or unknown with the nearest ones."""
    row = refusal(spelling)
    if row is not None:
        return ConfigError(f"{spelling} is not available ({source}): {row.told}")
    near = difflib.get_close_matches(spelling, meanings(), n=3)
    return ConfigError(
        f"{spelling} is not a known option ({source})", fix=f"did you mean {', '.join(near)}?" if near else None
    )


@dataclass
class Reading:
    """Field values read so far from one source, with the problems and the notices on the way."""

    source: str
    values: dict[str, object] = field(default_factory=dict)
    errors: list[ConfigError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def layer(self) -> Layer:
        """The values as a layer for :func:`~mindspeed_llm.config.resolve.resolve`."""
        return Layer(self.source, self.values)


def read_settings(settings: Iterable[tuple[str, object]], source: str) -> Reading:
    """Field values from spelled settings.

    Args:
        settings: a spelling with its dashes, and what was written: text, a list of texts, or for a flag without value
            True. A later setting of the same field wins.
        source: where they are written.
    """
    reading = Reading(source)
    for spelling, raw in settings:
        meaning = meaning_of(spelling)
        if meaning is None:
            reading.errors.append(unknown_flag(spelling, source))
            continue
        try:
            _read(meaning, spelling, raw, reading)
        except ConfigError as error:
            what = f"{error.what} ({source})"
            reading.errors.append(ConfigError(what, got=error.got, allowed=error.allowed, fix=error.fix))
    return reading


@functools.cache
def _folded() -> Mapping[str, Meaning]:
    return {spelling.lower(): meaning for spelling, meaning in meanings().items()}


def _read(meaning: Meaning, spelling: str, raw: object, reading: Reading) -> None:
    if isinstance(meaning, FieldFlag):
        if meaning.spec.is_bool and raw is not None:
            raw = to_bool(raw, spelling) == meaning.means
        reading.values[meaning.spec.name] = convert(meaning.spec, raw)
    elif meaning.takes == 0 and not to_bool(raw, spelling):
        return
    elif isinstance(meaning, NoEffect):
        if meaning.only and str(raw) not in meaning.only:
            row = refusal(spelling)
            waits = f": {row.told}" if row else ""
            raise ConfigError(
                f"{spelling} is not available with this value{waits}", got=raw, allowed=", ".join(meaning.only)
            )
        reading.notices.append(f"{spelling} has no effect here: {meaning.reason}")
    else:
        for name, value in meaning.expand(_text(raw) if meaning.takes else "").items():
            reading.values[name] = convert(field_table()[name], value)


def _text(raw: object) -> str:
    """Several values of the command line as YAML and the environment write them."""
    return " ".join(cast("list[str]", raw)) if isinstance(raw, list) else str(raw)
