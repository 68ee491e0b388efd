"""Settings from a YAML file and from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

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
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the configuration file cannot be read", got=f"{path}: {error}", fix="--config") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML", got=str(error), fix="--config") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path} must map flags to values", got=type(content).__name__, fix="--config")
    settings: list[tuple[str, object]] = []
    errors: list[ConfigError] = []
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


def read_environment(environ: Mapping[str, str]) -> Reading:
    """Settings of the variables ``MINDSPEED_LLM_<FLAG_IN_CAPS>``."""
    settings = [
        (as_flag(name.removeprefix(PREFIX)), value)
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in NOT_FLAGS
    ]
    return read_settings(settings, "environment")
