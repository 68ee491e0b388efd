"""Orders patches, refuses the ones that clash, applies and reverts them."""

from __future__ import annotations

import importlib
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from types import CodeType, TracebackType
from typing import Any, cast

from mindspeed_llm.errors import PatchError
from mindspeed_llm.patching.patch import Patch, fingerprint_of, known_fingerprints, resolve_target, unwrapped_function

logger = logging.getLogger(__name__)

_active: list[Patch] = []


def applied_patches() -> tuple[Patch, ...]:
    """The patches in force in this process, in the order in which they were applied."""
    return tuple(_active)


def plan(patches: Iterable[Patch]) -> list[Patch]:
    """``patches`` in the order in which to apply them.

    Raises:
        PatchError: a target does not resolve, two patches replace one target (those in force count), a replacement
            would drop a wrap in force, or wraps of one target have no order.
    """
    by_target: dict[str, list[Patch]] = defaultdict(list)
    for patch in patches:
        resolve_target(patch.target)
        by_target[patch.target].append(patch)
    ordered: list[Patch] = []
    for target, group in by_target.items():
        base = [patch for patch in group if patch.kind != "wrap"]
        in_force = [patch for patch in _active if patch.target == target]
        replacing = [patch for patch in in_force if patch.kind != "wrap"] + base
        if base and len(replacing) > 1:
            raise PatchError(
                f"{len(replacing)} patches replace {target}", got=[p.why for p in replacing], allowed="one per target"
            )
        if in_force and any(patch.kind == "replace" for patch in base):
            raise PatchError(f"a replacement of {target} would drop a wrap in force", got=[p.why for p in in_force])
        ordered += base + _order_wraps(target, [patch for patch in group if patch.kind == "wrap"])
    return ordered


def _order_wraps(target: str, wraps: list[Patch]) -> list[Patch]:
    if len(wraps) < 2:
        return wraps
    by_name = {patch.name: patch for patch in wraps}
    if len(by_name) < len(wraps):
        raise PatchError(
            f"wraps of {target} have no order: names are missing or equal", got=sorted(patch.name for patch in wraps)
        )
    sorter = TopologicalSorter({patch.name: [n for n in patch.after if n in by_name] for patch in wraps})
    try:
        sorter.prepare()
    except CycleError as error:
        raise PatchError(f"wraps of {target} wait for each other", got=error.args[1]) from error
    order: list[Patch] = []
    while sorter.is_active():
        ready = sorter.get_ready()
        if len(ready) > 1:
            raise PatchError(
                f"wraps of {target} have no order", got=sorted(ready), fix="name them and state `after` on all but one"
            )
        order += [by_name[name] for name in ready]
        sorter.done(*ready)
    return order


class AppliedPatches:
    """Patches in force; undone by :meth:`revert` or by leaving a ``with`` block."""

    def __init__(self) -> None:
        self._undo: list[tuple[Patch, Callable[[], None]]] = []

    def add(self, patch: Patch, undo: Callable[[], None]) -> None:
        """Record ``patch`` as applied, and how to take it back."""
        self._undo.append((patch, undo))
        _active.append(patch)

    def revert(self) -> None:
        """Put every original back, last patch first."""
        while self._undo:
            patch, undo = self._undo.pop()
            undo()
            _active.remove(patch)

    def __enter__(self) -> AppliedPatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()


def apply(patches: Iterable[Patch]) -> AppliedPatches:
    """Plan and apply ``patches``; a target whose source is not that of 0.16.1 is named in a warning.

    Raises:
        PatchError: see :func:`plan`, or a recode finds nothing to change; then none of ``patches`` stays.
    """
    applied = AppliedPatches()
    known = known_fingerprints()
    try:
        for patch in plan(patches):
            untouched = not any(patch.target == other.target for other in _active)
            if untouched and fingerprint_of(patch.target) != known.get(patch.target):
                logger.warning(
                    "%s is not that of megatron-core 0.16.1; the patch may not fit: %s", patch.target, patch.why
                )
            applied.add(patch, _recode(patch) if patch.kind == "recode" else _rebind(patch))
    except BaseException:
        applied.revert()
        raise
    return applied


def _rebind(patch: Patch) -> Callable[[], None]:
    owner, attribute, original = resolve_target(patch.target)
    if patch.kind == "wrap" and isinstance(original, staticmethod | classmethod):
        bound = cast(Any, original)
        new = type(bound)(patch.new(bound.__func__))
    else:
        new = patch.new(original) if patch.kind == "wrap" else patch.new
    inherited = attribute not in vars(owner)
    copies = [importlib.import_module(name) for name in patch.rebind]
    for site in (owner, *copies):
        setattr(site, attribute, new)

    def undo() -> None:
        for site in copies:
            setattr(site, attribute, original)
        if inherited:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)

    return undo


def _recode(patch: Patch) -> Callable[[], None]:
    _, _, value = resolve_target(patch.target)
    function = unwrapped_function(value)
    original = function.__code__
    changed = _substitute_code(original, patch.constants, patch.names)
    if changed == original:
        raise PatchError(f"recode of {patch.target} finds none of its literals", got=[*patch.constants, *patch.names])
    function.__code__ = changed

    def undo() -> None:
        function.__code__ = original

    return undo


def _substitute_code(code: CodeType, constants: Mapping[str, str], names: Mapping[str, str]) -> CodeType:
    def constant(value: Any) -> Any:
        if isinstance(value, str):
            return constants.get(value, value)
        if isinstance(value, tuple):
            return tuple(constant(item) for item in cast(tuple[Any, ...], value))
        if isinstance(value, CodeType):
            return _substitute_code(value, constants, names)
        return value

    return code.replace(
        co_consts=tuple(constant(value) for value in code.co_consts),
        co_names=tuple(names.get(name, name) for name in code.co_names),
    )


def stale_copies(patches: Iterable[Patch], originals: Mapping[str, Any], prefix: str = "megatron.core") -> list[str]:
    """``module.name`` of every module-level binding below ``prefix`` that still holds a patched original.

    Args:
        patches: the patches in force.
        originals: target -> the object before the patch.
    """
    known = {id(originals[patch.target]): patch.target for patch in patches if patch.kind != "recode"}
    found: list[str] = []
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(prefix):
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value) and id(value) in known:
                found.append(f"{name}.{attribute} still holds {known[id(value)]}")
    return found
