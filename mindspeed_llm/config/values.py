"""Values as people write them (command line, environment, YAML) to values as fields hold them."""

from __future__ import annotations

import ast
import math
import types
import typing
from collections.abc import Sequence
from typing import cast

from mindspeed_llm.config.schema import FieldSpec
from mindspeed_llm.errors import ConfigError

TRUE_WORDS = {"1", "true", "yes", "on"}
LONGEST_PATTERN = 100_000
FALSE_WORDS = {"0", "false", "no", "off"}


def convert(spec: FieldSpec, raw: object) -> object:
    """``raw`` as the type of ``spec``: text is read, sequences become tuples, whole floats become integers.

    Raises:
        ConfigError: ``raw`` does not fit.
    """
    kinds = members(spec.annotation)
    # Where a field takes one number or several, the command line gives a list of one.
    several = any(typing.get_origin(kind) is tuple for kind in kinds)
    single = _only_item(raw) if several else raw
    for kind in kinds:
        try:
            return _convert_as(kind, raw if typing.get_origin(kind) is tuple else single, spec.option.count)
        except (TypeError, ValueError, SyntaxError):
            continue
    if float in kinds and isinstance(raw, (str, float)) and _is_number(raw):
        raise ConfigError(f"{spec.flag} must be finite", got=raw, allowed=describe(spec.annotation, spec.option.count))
    raise ConfigError(
        f"{spec.flag} does not take this value",
        got=repr(raw),
        allowed=describe(spec.annotation, spec.option.count),
    )


def _is_number(raw: str | float) -> bool:
    try:
        float(raw)
    except ValueError:
        return False
    return True


def _only_item(raw: object) -> object:
    if not isinstance(raw, list):
        return raw
    items = cast("list[object]", raw)
    return items[0] if len(items) == 1 else items


def to_bool(raw: object, spelling: str) -> bool:
    """Whether ``raw`` says yes.

    Raises:
        ConfigError: it says neither yes nor no.
    """
    try:
        return _boolean(raw)
    except ValueError:
        raise ConfigError(f"{spelling} is either on or off", got=repr(raw), allowed="true or false") from None


def describe(annotation: object, count: int | None = None) -> str:
    """What a field of this type takes, in words."""
    words: list[str] = []
    for member in members(annotation):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is typing.Literal:
            words.append(", ".join(str(arg) for arg in args))
        elif origin is tuple:
            number = count or (len(args) if Ellipsis not in args else None)
            words.append(f"{number or 'a list of'} values of type {getattr(args[0], '__name__', args[0])}")
        elif member is not type(None):
            words.append({bool: "true or false", int: "a whole number", float: "a number", str: "text"}[member])
    return " or ".join(words)


def members(annotation: object) -> tuple[typing.Any, ...]:
    """The alternatives of a union, or the type itself."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _convert_as(member: typing.Any, raw: object, count: int | None) -> object:
    origin, args = typing.get_origin(member), typing.get_args(member)
    if member is type(None):
        if raw is None or (isinstance(raw, str) and raw.lower() == "none"):
            return None
    elif origin is typing.Literal:
        for choice in args:
            if raw == choice or (isinstance(raw, str) and raw == str(choice)):
                return choice
    elif origin is tuple:
        return _sequence(args, raw, count)
    elif member is bool:
        return _boolean(raw)
    elif member is int:
        return _integer(raw)
    elif member is float and not isinstance(raw, bool) and isinstance(raw, (int, float, str)):
        return _finite(raw)
    elif member is str and isinstance(raw, str):
        return raw
    elif member is str and isinstance(raw, (int, float)) and not isinstance(raw, bool):
        return str(raw)
    raise ValueError


def _finite(raw: str | float) -> float:
    number = float(raw)
    if not math.isfinite(number):
        raise ValueError
    return number


def _boolean(raw: object) -> bool:
    word = str(raw).lower() if isinstance(raw, (str, bool, int)) else ""
    if word in TRUE_WORDS | FALSE_WORDS:
        return word in TRUE_WORDS
    raise ValueError


def _integer(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError
    if isinstance(raw, float) and not raw.is_integer():
        raise ValueError
    return int(raw)


def _sequence(args: tuple[typing.Any, ...], raw: object, count: int | None) -> tuple[object, ...]:
    if isinstance(raw, Sequence) and not isinstance(raw, str):
        parts = cast("Sequence[object]", raw)
        if len(parts) == 1 and isinstance(parts[0], str) and args[0] is not str:
            parts = _split(parts[0], args[0])
    elif isinstance(raw, str):
        parts = _split(raw, args[0])
    else:
        raise ValueError
    types_of = [args[0]] * len(parts) if Ellipsis in args else list(args)
    expected = count if Ellipsis in args else len(args)
    if expected not in (None, len(parts)):
        raise ValueError
    return tuple(_convert_as(kind, part, None) for kind, part in zip(types_of, parts, strict=True))


def _split(text: str, kind: object) -> Sequence[object]:
    """Items of ``1,2``, ``1 2``, ``(1, 2)`` or, as Megatron writes layer patterns, ``([1]*3+[0])*2``."""
    if kind is str:
        return text.split()
    if "[" in text or "(" in text:
        return _pattern(ast.parse(text.strip(), mode="eval").body)
    return text.replace(",", " ").split()


def _pattern(node: ast.expr) -> list[object]:
    """Value of an expression of lists, ``+`` and ``*`` with a whole number; nothing else is evaluated."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return [ast.literal_eval(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left) + _pattern(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        items, times = _pattern(node.left), _integer(node.right.value)
        if len(items) * times > LONGEST_PATTERN:
            raise ValueError
        return items * times
    raise ValueError
