"""The special tokens that the files beside a tokenizer name, and the reading of these files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

from mindspeed_llm.errors import DataError

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> object:
    """The content of a JSON file of the tokenizer.

    Raises:
        DataError: when it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError("A file of the tokenizer is not valid JSON.", got=f"{path}: {error}") from error


def read_settings(path: Path) -> dict[str, object]:
    """A JSON object, empty where there is no such file.

    Raises:
        DataError: when it is no JSON.
    """
    value = read_json(path) if path.is_file() else None
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def special_ids(folder: Path, token_to_id: Callable[[str], int | None]) -> dict[str, int]:
    """Role -> id, from the files that transformers reads, in its order of preference."""
    ids: dict[str, int] = {}
    for source in (read_settings(folder / "tokenizer_config.json"), read_settings(folder / "special_tokens_map.json")):
        for role in _ROLES:
            token = _content(source.get(role))
            found = token_to_id(token) if token is not None else None
            if role not in ids and found is not None:
                ids[role] = found
    config = read_settings(folder / "config.json")
    for role in ("bos_token", "eos_token", "pad_token"):
        number = _first_number(config.get(f"{role}_id"))
        if role not in ids and number is not None:
            ids[role] = number
    return ids


def _content(token: object) -> str | None:
    """The text of a special token, which is written as it is or as an object."""
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    return token if isinstance(token, str) else None


def _first_number(value: object) -> int | None:
    """An id, or the first of several."""
    if isinstance(value, list) and value:
        value = cast("list[object]", value)[0]
    return value if isinstance(value, int) else None
