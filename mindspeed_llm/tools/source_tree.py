"""Where the sources are, for commands that work on the repository itself."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.errors import ConfigError


def source_tree() -> Path:
    """The root of the clone that this package is run from.

    Raises:
        ConfigError: the package is an installed copy.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        raise ConfigError(
            "this command works on a clone of the repository", got=root, fix="run it in one, after make build"
        )
    return root
