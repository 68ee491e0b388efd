"""The text that --help shows for a field: the attribute docstring below it, read from source only when asked for."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping

from mindspeed_llm.config.mcore_source import SOURCES, class_body, wheel_folder
from mindspeed_llm.config.run import SECTIONS


def docstrings(body: list[ast.stmt]) -> dict[str, str]:
    """Attribute docstrings of a class body, by field name, on one line each."""
    found: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = following.value if isinstance(following, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[statement.target.id] = " ".join(value.value.split())
    return found


def help_texts() -> Mapping[str, str]:
    """Help of every field. Fields of megatron-core's dataclasses are described by the installed wheel itself."""
    folder = wheel_folder()
    texts: dict[str, str] = {}
    for cls in SECTIONS.values():
        if cls.__name__ in SOURCES:
            for source in SOURCES[cls.__name__]:
                texts = docstrings(class_body(folder, source)) | texts
        else:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
            texts |= docstrings(next(node.body for node in tree.body if isinstance(node, ast.ClassDef)))
    return texts
