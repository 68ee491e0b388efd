"""Holds copies of what the tests of patching patch, as ``from module import name`` makes them."""

from __future__ import annotations

from tests.unit.patching.targets import Shape, double

__all__ = ["Shape", "double"]
