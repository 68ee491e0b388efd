"""Settings from a YAML file and from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mindspeed_llm.config.run import SECTIONS
from mindspeed_llm.config.spelled import Reading, as_flag, read_settings
from mindspeed_llm.errors import ConfigError

PREFIX = "MINDSPEED_LLM_"

# Variables with the prefix that are read elsewhere and are no flags.
NOT_FLAGS = frozenset({PREFIX + "DEVICE", PREFIX + "CONFIG"})


def read_yaml(path: str) -> Reading:
    """Settings of the file at ``path``: keys are flags without their dashes or field names, flat or grouped under the
    name of a section. A list gives several values.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        compose = cast(Any, yaml.compose)  # pyright: ignore[reportUnknownMemberType]  it has no types
        errors = _repeated_keys(compose(text, yaml.SafeLoader), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the configuration file cannot be read", got=f"{path}: {error}", fix="--config") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML", got=str(error), fix="--config") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path} must map flags to values", got=type(content).__name__, fix="--config")
    settings: list[tuple[str, object]] = []
    for key, value in cast("dict[object, object]", content or {}).items():
        if isinstance(value, dict):
            grouped = cast("dict[object, object]", value)
            settings += [(as_flag(str(inner)), given) for inner, given in grouped.items()]
            if str(key) not in SECTIONS:
                errors.append(ConfigError(f"{key} is not a section ({path})", allowed=", ".join(SECTIONS)))
        else:
            settings.append((as_flag(str(key)), value))
    reading = read_settings(settings, path)
    reading.errors[:0] = errors
    return reading


def _repeated_keys(node: Any, path: str) -> list[ConfigError]:
    """Keys that a mapping below ``node`` has twice, in any spelling; YAML itself would silently take the last."""
    if not isinstance(getattr(node, "value", None), list):
        return []
    errors: list[ConfigError] = []
    lines: dict[str, int] = {}
    pairs: list[tuple[Any, Any]] = node.value if node.id == "mapping" else [(None, item) for item in node.value]
    for key, value in pairs:
        if key is not None and isinstance(key.value, str):
            line: int = key.start_mark.line + 1
            first = lines.setdefault(as_flag(key.value), line)
            if first != line:
                errors.append(ConfigError(f"{key.value} is given twice ({path})", got=f"lines {first} and {line}"))
        errors += _repeated_keys(value, path)
    return errors


def read_environment(environ: Mapping[str, str]) -> Reading:
    """Settings of the variables ``MINDSPEED_LLM_<FLAG_IN_CAPS>``."""
    reading = Reading("environment")
    for name, value in environ.items():
        if name.startswith(PREFIX) and name not in NOT_FLAGS:
            one = read_settings([(as_flag(name.removeprefix(PREFIX)), value)], f"environment {name}")
            reading.values |= one.values
            reading.errors += one.errors
            reading.notices += one.notices
    return reading
