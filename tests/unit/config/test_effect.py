"""Nothing is accepted and then ignored: every field of ours is read by code that acts on it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import mindspeed_llm
from mindspeed_llm.config.schema import GENERATED_SECTIONS, field_table

PACKAGE = Path(mindspeed_llm.__file__).parent


@cache
def names_read() -> frozenset[str]:
    """Attributes and words of all code that acts: everything but the declarations and the rules."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "config" and path.name != "derive.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    return frozenset(found)


def test_every_field_is_read() -> None:
    ours = {name for name, spec in field_table().items() if spec.section not in GENERATED_SECTIONS}
    assert ours <= names_read()
