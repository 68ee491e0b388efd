"""What must hold between values: small functions, each of one concern, whose failures are shown together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import ConfigError

Rule = Callable[[RunConfig], Iterator[ConfigError]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Register a rule that holds on every device."""
    RULES.append(function)
    return function


def broken_rules(config: RunConfig, device: str | None = None) -> list[ConfigError]:
    """Every rule that ``config`` breaks; with ``device`` also those of that device."""
    return [error for check in RULES for error in check(config)]
