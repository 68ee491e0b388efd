"""An error that every process of a node meets is told once."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mindspeed_llm.processes import started


def tell(program: str, text: str, environ: Mapping[str, str]) -> str:
    """What this process writes about an error: all of ``text``, or one line where another process tells the rest.

    The first process of a node to meet an error tells it, whichever that is: the launcher may end the others at once,
    and an error of one process alone is told by that one. Without ``torchrun`` each process speaks for itself.

    Args:
        program: name shown in front.
        text: the error; its first line is what went wrong.
        environ: the launcher's variables.
    """
    if "TORCHELASTIC_RUN_ID" not in environ or _is_first(text, environ):
        return f"{program}: error: {text}\n"
    first = text.partition("\n")[0]
    return f"{program}: error: {first} (rank {environ.get('RANK')}; told in full by another rank of this node)\n"


def _is_first(text: str, environ: Mapping[str, str]) -> bool:
    """Whether no process of the same launch on this node has claimed ``text``; claims it."""
    launch = (environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"))
    parts = [*launch, os.getppid(), started(os.getppid()), text]
    name = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]
    try:
        Path(tempfile.gettempdir(), f"mindspeed_llm.told.{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        # Told too often is better than not at all.
        return True
    return True
