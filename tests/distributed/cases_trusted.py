"""Loads of whole saves, with an eye on every name that a pickle asks for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_llm.checkpoint import mcore_io
from tests.distributed import cases_core

from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

_listeners: list[list[str]] = []
_hooked = False


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    # Objects that ranks send to each other are pickles too; a rank trusts the others.
    if event == "pickle.find_class" and _listeners and sys._getframe(1).f_code.co_name != "_tensor_to_object":
        for listener in _listeners:
            listener.append(".".join(arguments))


@contextmanager
def names_looked_up() -> Iterator[list[str]]:
    """What Python's own unpickler looks up within, whoever calls it."""
    global _hooked
    if not _hooked:
        # A hook cannot be taken back.
        sys.addaudithook(_hear)
        _hooked = True
    found: list[str] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners.remove(found)


def looked_up(
    folder: str, layout: str, tokens: torch.Tensor, load: str, step: int, stock: bool = False, **more: Any
) -> list[str]:
    """The names that unrestricted unpicklers look up while a save is loaded, by us or by megatron-core's strategies."""
    ours = mcore_io.TrustedShardedStrategy, mcore_io.TrustedCommonStrategy
    if stock:
        mcore_io.TrustedShardedStrategy = TorchDistLoadShardedStrategy
        mcore_io.TrustedCommonStrategy = TorchCommonLoadStrategy
    try:
        with names_looked_up() as found:
            cases_core.loaded_weights(folder, layout, tokens, load, step, **more)
    finally:
        mcore_io.TrustedShardedStrategy, mcore_io.TrustedCommonStrategy = ours
    return sorted(set(found))
