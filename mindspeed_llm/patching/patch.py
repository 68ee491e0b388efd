"""One patch: what it changes, how, why there is no seam, and when it can go."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindspeed_llm.errors import PatchError

FINGERPRINTS = Path(__file__).with_name("fingerprints.json")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A change of one object of megatron-core.

    Kinds:
        * ``wrap``: ``new(original)`` gives the object that takes its place; several wraps of one target need an order.
        * ``replace``: ``new`` takes its place; at most one per target.
        * ``recode``: the function keeps its code but for literals (``constants``) and attribute names (``names``) in
          it. Used where upstream spells a device out, so that none of its code is copied here.
    """

    target: str
    """``module:qualname``."""
    kind: Literal["wrap", "replace", "recode"]
    new: Any = None
    constants: Mapping[str, str] = field(default_factory=dict[str, str])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    why: str
    """Why no configuration field, spec or callback does."""
    remove_when: str
    rebind: tuple[str, ...] = ()
    """Modules that hold a copy of a module-level target and are rebound with it."""
    name: str = ""
    """Needed only where several wraps of one target are ordered."""
    after: tuple[str, ...] = ()
    """Names of the wraps of the same target that come before, so inside, this one."""


def resolve_target(target: str) -> tuple[Any, str, Any]:
    """``(owner, attribute, value)`` of ``module:qualname``.

    Raises:
        PatchError: the module or one of the attributes does not exist.
    """
    module_name, _, qualname = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise PatchError(f"patch target {target}: module {module_name} cannot be imported", got=error) from error
    *path, attribute = qualname.split(".")
    for part in path:
        if not hasattr(owner, part):
            raise PatchError(f"patch target {target} does not resolve: {owner!r} has no {part}")
        owner = getattr(owner, part)
    if not hasattr(owner, attribute):
        raise PatchError(f"patch target {target} does not resolve: {owner!r} has no {attribute}")
    value = inspect.getattr_static(owner, attribute) if inspect.isclass(owner) else getattr(owner, attribute)
    return owner, attribute, value


def unwrapped_function(value: Any) -> Callable[..., Any]:
    """The plain function inside static methods, class methods and decorators."""
    return inspect.unwrap(getattr(value, "__func__", value))


def fingerprint_of(target: str) -> str:
    """The first 16 hex digits of the SHA-256 of the target's source, or of its ``repr`` if it has none."""
    _, _, value = resolve_target(target)
    if inspect.isclass(value) or callable(value) or hasattr(value, "__func__"):
        text = inspect.getsource(value if inspect.isclass(value) else unwrapped_function(value))
    else:
        text = repr(value)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known_fingerprints() -> dict[str, str]:
    """Target -> :func:`fingerprint_of` it in megatron-core 0.16.1, for every target that a patch of ours has."""
    return json.loads(FINGERPRINTS.read_text())
