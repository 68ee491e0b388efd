"""What the tests of patching patch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

LIMIT = 3


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


def double(x: int) -> int:
    """Twice ``x``."""
    return 2 * x


@decorated
def kind_of(x: Any) -> str:
    def name() -> str:
        return {"cuda": "accelerator"}.get(x, "cuda")

    return name() if x in ("cuda", "host") else x.cuda()


class Base:
    def inherited(self) -> str:
        return f"inherited by {type(self).__name__}"


class Shape(Base):
    def area(self, side: int) -> int:
        return side * side

    @staticmethod
    def sides(n: int) -> int:
        return n

    @classmethod
    def name(cls) -> str:
        return cls.__name__


def order() -> list[str]:
    return ["original"]
