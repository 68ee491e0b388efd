"""What a check sees, and what it finds."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Severity = Literal["problem", "warning", "note", "ok"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note", "ok")
"""The worst first. A problem stops a run or spoils it, a warning may, a note is for those who wonder."""

PACKAGE = Path(__file__).resolve().parents[2]
"""The folder ``mindspeed_llm`` that runs."""

MARK = "doctor: "
"""Begins the lines of the child process that are for us; libraries print, too."""
_PROBE_SECONDS = 180.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: see :data:`SEVERITIES`.
        what: one line.
        why: what comes of it in a run; empty for ``ok``.
        remedy: what to do, best a command; empty for ``ok``.
        check: ``section.function``, set by :func:`examine`.
    """

    severity: Severity
    what: str
    why: str = ""
    remedy: str = ""
    check: str = ""


ok = functools.partial(Finding, "ok")
note = functools.partial(Finding, "note")
warning = functools.partial(Finding, "warning")
problem = functools.partial(Finding, "problem")


@dataclass(frozen=True)
class Probe:
    """What :mod:`mindspeed_llm.tools.doctor.probe` saw in a process of its own.

    Attributes:
        stages: name -> its results, of those that ended.
        failed: the stage that did not end, or None.
        cause: why, one line or a few.
    """

    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: str | None = None
    cause: str = ""

    @property
    def device(self) -> str:
        """The device that a run would take."""
        return self.stages.get("device", {}).get("type", "cpu")


@dataclass(frozen=True)
class Surroundings:
    """Where a run would take place.

    Attributes:
        environ: its environment.
        probe: what torch and megatron-core say.
        save: ``--save``.
        data: words of ``--data-path``.
        timeout_minutes: ``--distributed-timeout-minutes``.
        root: where ``dev``, ``proc`` and ``sys`` are.
    """

    environ: Mapping[str, str]
    probe: Probe = Probe()
    save: Path | None = None
    data: tuple[str, ...] = ()
    timeout_minutes: float = 10.0
    root: Path = Path("/")

    def _number(self, *names: str) -> int | None:
        for name in names:
            text = self.environ.get(name, "")
            if text.isdecimal():
                return int(text)
        return None

    @property
    def nodes(self) -> int:
        """Nodes of the run, as the launcher's or a recipe's variables have it; else 1."""
        return self._number("GROUP_WORLD_SIZE", "NNODES", "PET_NNODES", "SLURM_NNODES") or 1

    @property
    def node(self) -> int:
        """Number of this node."""
        return self._number("GROUP_RANK", "NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID") or 0

    @property
    def processes(self) -> int:
        """Processes of the run on this node."""
        return self._number("LOCAL_WORLD_SIZE", "NPUS_PER_NODE", "PET_NPROC_PER_NODE") or 1


Check = Callable[[Surroundings], Iterator[Finding]]


def examine(checks: Mapping[str, tuple[Check, ...]], surroundings: Surroundings) -> list[Finding]:
    """The findings of every check, in order."""
    found: list[Finding] = []
    for section, functions in checks.items():
        for check in functions:
            name = f"{section}.{check.__name__}"
            try:
                seen = list(check(surroundings))
            except OSError as error:
                seen = [problem(f"cannot be looked at: {error}", "what is broken here is unknown", "mend the cause")]
            found += [Finding(one.severity, one.what, one.why, one.remedy, name) for one in seen]
    return found


def run_probe(environ: Mapping[str, str]) -> Probe:
    """Let a child process import what a run imports."""
    command = [sys.executable, "-m", "mindspeed_llm.tools.doctor.probe"]
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=_PROBE_SECONDS)
        out, err, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        out, err, code = _text(late.stdout), _text(late.stderr), None
    stages: dict[str, dict[str, Any]] = {}
    begun = "python"
    for line in out.split("\n"):
        if not line.startswith(MARK):
            continue
        told: dict[str, Any] = json.loads(line.removeprefix(MARK))
        begun = told["stage"]
        if "result" in told:
            stages[begun] = told["result"]
        elif "error" in told:
            return Probe(stages, begun, told["error"])
    if code == 0:
        return Probe(stages)
    last = (err.strip().splitlines() or ["nothing on stderr"])[-1]
    if code is None:
        return Probe(stages, begun, f"it did not end within {_PROBE_SECONDS:g} s; last words: {last}")
    return Probe(stages, begun, f"ended by {signal.Signals(-code).name}" if code < 0 else last)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def nearest_folder(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    path = Path(os.path.abspath(path))
    return next(folder for folder in (path, *path.parents) if folder.exists())
