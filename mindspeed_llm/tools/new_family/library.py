"""The families that there are, as material for another: their rules with the source text that makes them."""

from __future__ import annotations

import ast
import builtins
import importlib
import pkgutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspeed_llm.models as package
from mindspeed_llm.models import blocks
from mindspeed_llm.models.family import ModelFamily, ParamMap, Rule, Weight

_BUILTINS = frozenset(vars(builtins))


@dataclass(frozen=True)
class Source:
    """The source of one module: what its names are and where they come from."""

    module: ModuleType

    @cached_property
    def text(self) -> str:
        """All of it."""
        return Path(str(self.module.__file__)).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed."""
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> dict[str, str]:
        """Name -> module that it is imported from."""
        return {
            alias.name: str(node.module)
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """Name -> the statement at the top of the module that defines it."""
        found: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                for name in (part for target in node.targets for part in ast.walk(target)):
                    if isinstance(name, ast.Name):
                        found[name.id] = node
        return found

    def segment(self, node: ast.AST) -> str:
        """The text of a part of the module, as it stands there."""
        return ast.get_source_segment(self.text, node) or ast.unparse(node)


@dataclass
class Needs:
    """What text needs to stand in another file.

    Attributes:
        imports: name -> module.
        definitions: private functions and values, to be copied, by name.
    """

    imports: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)

    def add(self, other: Needs) -> None:
        """What ``other`` needs, too."""
        self.imports |= other.imports
        self.definitions |= other.definitions

    def of_names(self, module: ModuleType, *names: str) -> Needs:
        """These names of a module, too; itself."""
        self.imports |= dict.fromkeys(names, module.__name__)
        return self


def needs_of(node: ast.AST, source: Source) -> Needs:
    """What ``node`` of a module needs elsewhere: imports of public names, copies of private ones."""
    needs = Needs()
    for part in ast.walk(node):
        if not isinstance(part, ast.Name) or part.id in _BUILTINS or part.id in needs.definitions:
            continue
        name = part.id
        if name in source.imports:
            needs.imports[name] = source.imports[name]
        elif name in source.definitions and not name.startswith("_"):
            needs.imports[name] = source.module.__name__
        elif name in source.definitions:
            definition = source.definitions[name]
            inner = needs_of(definition, source) if not isinstance(definition, ast.Assign) else Needs()
            needs.imports |= inner.imports
            # What a definition uses stands before it.
            needs.definitions |= {**inner.definitions, name: source.segment(definition)}
    return needs


@dataclass(frozen=True)
class Fragment:
    """One element of a list of rules.

    Attributes:
        text: as a family file has it: ``*SIZES``, ``heads(head_dim=128)``.
        rules: that it makes.
        needs: of the text.
    """

    text: str
    rules: tuple[Rule, ...]
    needs: Needs

    @property
    def keys(self) -> frozenset[str]:
        """Keys of config.json that belong to it."""
        return frozenset(key for rule in self.rules for key in rule.hf_keys)


@dataclass(frozen=True)
class Known:
    """A family that there is.

    Attributes:
        family: itself.
        fragments: its rules.
    """

    family: ModelFamily
    fragments: tuple[Fragment, ...]

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of config.json that it has a rule for."""
        return frozenset(key for rule in self.family.config for key in rule.hf_keys)

    @cached_property
    def maps(self) -> tuple[ParamMap, ...]:
        """Its weights, without those that nobody needs."""
        return tuple(weight for weight in self.family.weights if isinstance(weight, ParamMap))


def known_families(without: Collection[str] = ()) -> list[Known]:
    """The families of this package, by name.

    Args:
        without: names of families that are not to be material.
    """
    found: list[Known] = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        family = getattr(module, "FAMILY", None)
        if isinstance(family, ModelFamily) and family.name not in without:
            found.append(Known(family, tuple(_fragments(Source(module)))))
    return found


def _fragments(source: Source) -> Iterator[Fragment]:
    """The elements of ``config=(...)`` in a family's file; none where it is another family under a name of its own."""
    calls = [
        node.value
        for node in source.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _called(node.value) == "ModelFamily"
    ]
    if not calls:
        return
    (call,) = calls
    config = next(keyword.value for keyword in call.keywords if keyword.arg == "config")
    for node in config.elts if isinstance(config, ast.Tuple) else ():
        inner = node.value if isinstance(node, ast.Starred) else node
        # Source of our own package, evaluated where it was evaluated when it was imported.
        made: Any = eval(compile(ast.Expression(inner), source.module.__name__, "eval"), vars(source.module))
        rules = tuple(made) if isinstance(node, ast.Starred) else (made,)
        yield Fragment(source.segment(node), rules, needs_of(node, source))


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def weight_blocks() -> dict[str, tuple[Weight, ...]]:
    """Groups of weights that have a name: name in ``models/blocks.py`` -> what is in it."""
    return {
        name: value if isinstance(value, tuple) else (value,)
        for name, value in vars(blocks).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, tuple | ParamMap)
    }
