"""Whether a process that left its number behind still runs. Numbers come back, so its beginning is looked at, too."""

from __future__ import annotations

import os
from pathlib import Path


def system() -> str | None:
    """Identity of the running kernel and of the process numbers of this container; None where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def started(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None for one that does not run."""
    try:
        # After the name in brackets: state, parent, ...; the start is field 22 of the line.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
