"""Ops, their implementations, and the table that says which one a run uses.

An op's reference in plain torch *is* its definition. Implementations say where they run and why not; the table is
chosen once, when the device and the dtype of a run are known, and printed. Asked for and missing is an error; a
fallback is one warning and a row of the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_llm.errors import OpUnavailableError

logger = logging.getLogger(__name__)

REFERENCE = "reference"
DEVICES = ("cpu", "cuda", "npu")


@dataclass(frozen=True)
class OpSpec:
    """What an op is.

    Attributes:
        name: as users write it in ``--op NAME=IMPL``.
        reference: the definition, differentiable plain torch, for any device and floating dtype.
        tolerances: per dtype, the largest error of a value or a gradient of any implementation, relative to the
            magnitude of the terms that it is a sum of (which cancellation does not shrink).
        make_inputs: ``(shape, dtype, generator)`` to arguments of the op, with distinguishable values.
    """

    name: str
    reference: Callable[..., Any]
    tolerances: Mapping[torch.dtype, float]
    make_inputs: Callable[[tuple[int, ...], torch.dtype, torch.Generator], tuple[Any, ...]]


@dataclass(frozen=True)
class Impl:
    """One way to compute an op.

    Attributes:
        op: name of the :class:`OpSpec`.
        name: as users write it in ``--op NAME=IMPL``.
        devices: torch device types it runs on; on these it is preferred to the reference.
        dtypes: of its floating-point arguments.
        fn: same signature and meaning as the reference.
        available: why it cannot run here, or None.
        tested_on: the devices on which the tests of this project have run it.
    """

    op: str
    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    fn: Callable[..., Any]
    available: Callable[[], str | None]
    tested_on: tuple[str, ...]

    @property
    def status(self) -> str:
        """Where it has been tested, and where it never ran: ``cpu-tested, unchecked on cuda, npu``."""
        unchecked = [device for device in self.devices if device not in self.tested_on]
        parts = [f"{device}-tested" for device in self.devices if device in self.tested_on]
        if unchecked:
            parts.append("unchecked on " + ", ".join(unchecked))
        return ", ".join(parts)

    def refusal(self, device: str, dtype: torch.dtype) -> str | None:
        """Why it cannot serve ``dtype`` on ``device``, or None."""
        if device not in self.devices:
            return f"{self.name} runs on {', '.join(self.devices)}, not on {device}"
        if dtype not in self.dtypes:
            return f"{self.name} computes {', '.join(map(_dtype_name, self.dtypes))}, not {_dtype_name(dtype)}"
        return self.available()


class OpRegistry:
    """The ops there are, and their implementations in order of preference."""

    def __init__(self) -> None:
        self._specs: dict[str, OpSpec] = {}
        self._impls: dict[str, dict[str, Impl]] = {}

    def add(self, spec: OpSpec, *impls: Impl) -> None:
        """Add an op, and its implementations with the preferred first; the reference comes last by itself.

        Raises:
            ValueError: the op is there already, or an implementation is of another op or bears a taken name.
        """
        if spec.name in self._specs:
            raise ValueError(f"the op {spec.name} is registered twice")
        self._specs[spec.name] = spec
        self._impls[spec.name] = {}
        for impl in impls:
            self.add_impl(impl)

    def add_impl(self, impl: Impl) -> None:
        """Add an implementation, less preferred than those before it.

        Raises:
            ValueError: its op is unknown, or the name is taken.
        """
        if impl.op not in self._specs:
            raise ValueError(f"{impl.name} implements {impl.op}, which is not registered")
        if impl.name == REFERENCE or impl.name in self._impls[impl.op]:
            raise ValueError(f"{impl.op} has an implementation called {impl.name} already")
        self._impls[impl.op][impl.name] = impl

    def specs(self) -> tuple[OpSpec, ...]:
        """Every op, by name."""
        return tuple(self._specs[name] for name in sorted(self._specs))

    def spec(self, op: str) -> OpSpec:
        """The op called ``op``.

        Raises:
            OpUnavailableError: there is none; the error lists those there are.
        """
        if op not in self._specs:
            raise OpUnavailableError(
                "there is no such op", got=op, allowed=", ".join(sorted(self._specs)), fix="change --op"
            )
        return self._specs[op]

    def impls(self, op: str) -> tuple[Impl, ...]:
        """The implementations of ``op``, preferred first, the reference last."""
        spec = self.spec(op)
        reference = Impl(
            op=op,
            name=REFERENCE,
            devices=DEVICES,
            dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
            fn=spec.reference,
            available=lambda: None,
            tested_on=("cpu",),
        )
        return (*self._impls[op].values(), reference)

    def impl(self, op: str, name: str) -> Impl:
        """The implementation of ``op`` called ``name``.

        Raises:
            OpUnavailableError: there is none; the error lists those there are.
        """
        impls = {impl.name: impl for impl in self.impls(op)}
        if name not in impls:
            raise OpUnavailableError(
                f"{op} has no such implementation",
                got=f"{op}={name}",
                allowed=", ".join(f"{op}={known}" for known in impls),
                fix="change --op",
            )
        return impls[name]


@dataclass(frozen=True)
class OpRow:
    """One line of the start-up table: what serves ``op``, why, and where that has been tested."""

    op: str
    impl: str
    reason: str
    status: str


class OpTable:
    """Which implementation serves each op of a run; ``table["rms_norm"]`` is the function to call.

    Modules fetch the function once, when they are built, and keep it.
    """

    def __init__(self, chosen: Mapping[str, tuple[Impl, str]]) -> None:
        self._chosen = dict(chosen)

    def __getitem__(self, op: str) -> Callable[..., Any]:
        return self._chosen[op][0].fn

    def rows(self) -> tuple[OpRow, ...]:
        """One row per op, for the start-up print and the saved report."""
        return tuple(OpRow(op, impl.name, reason, impl.status) for op, (impl, reason) in self._chosen.items())


def choose(
    registry: OpRegistry, *, device: str, dtype: torch.dtype, choices: Mapping[str, str] | None = None
) -> OpTable:
    """Choose an implementation for every op: the one asked for, else the device's own, else the reference.

    Args:
        registry: the ops there are.
        device: torch device type of the run.
        dtype: floating-point type that the run computes in.
        choices: implementation asked for, by op (see :func:`parse_choices`).

    Raises:
        OpUnavailableError: an op or implementation asked for does not exist or cannot run here; the error says why.
    """
    asked = dict(choices or {})
    for op, name in asked.items():
        refusal = registry.impl(op, name).refusal(device, dtype)
        if refusal is not None:
            usable = [impl.name for impl in registry.impls(op) if impl.refusal(device, dtype) is None]
            raise OpUnavailableError(
                f"the implementation asked for cannot run here: {refusal}",
                got=f"{op}={name}",
                allowed=", ".join(f"{op}={other}" for other in usable),
                fix=f"drop --op {op}={name} to take what the device has",
            )
    chosen: dict[str, tuple[Impl, str]] = {}
    for spec in registry.specs():
        if spec.name in asked:
            chosen[spec.name] = (registry.impl(spec.name, asked[spec.name]), "asked for with --op")
        else:
            chosen[spec.name] = _preferred(registry.impls(spec.name), device, dtype)
    return OpTable(chosen)


def references(registry: OpRegistry) -> OpTable:
    """The table of definitions: every op by its reference."""
    return OpTable({spec.name: (registry.impl(spec.name, REFERENCE), "the definition") for spec in registry.specs()})


def parse_choices(words: Iterable[str]) -> dict[str, str]:
    """``["rms_norm=reference"]`` to ``{"rms_norm": "reference"}``.

    Raises:
        OpUnavailableError: a word is not ``OP=IMPL``, or two words name one op.
    """
    choices: dict[str, str] = {}
    for word in words:
        op, equals, name = word.partition("=")
        if not (op and equals and name):
            raise OpUnavailableError(
                "--op takes an op and an implementation", got=word, allowed="OP=IMPL, such as rms_norm=reference"
            )
        if choices.setdefault(op, name) != name:
            raise OpUnavailableError(f"--op asks for two implementations of {op}", got=f"{choices[op]} and {name}")
    return choices


def _preferred(impls: tuple[Impl, ...], device: str, dtype: torch.dtype) -> tuple[Impl, str]:
    """The first of ``impls`` that can run; a warning when that is the reference though the device has its own."""
    *own, reference = impls
    own = [impl for impl in own if device in impl.devices]
    refusals = []
    for impl in own:
        refusal = impl.refusal(device, dtype)
        if refusal is None:
            return impl, f"default on {device}"
        refusals.append(refusal)
    if not own:
        return reference, f"nothing else on {device}"
    cause = "; ".join(refusals)
    logger.warning("op %s falls back on its reference in plain torch, which is slower: %s", reference.op, cause)
    return reference, f"fallback: {cause}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
