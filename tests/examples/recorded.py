"""Recipes run with stand-ins for ``torchrun`` and ``python``, which write down how they were started."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "quickstart" / "model"
TEXT = ROOT / "examples" / "quickstart" / "text" / "valid.jsonl"

_STAND_IN = """#!/bin/bash
printf '%s\\0' "$(basename "$0")" "$PWD" "${{WORLD_SIZE:-}}" "$@" >{call}
echo told
exit ${{STATUS:-0}}
"""


@dataclass(frozen=True)
class Call:
    """How a recipe ended, and what it started last.

    Attributes:
        status: exit status of the recipe.
        err: what it wrote to stderr.
        program: ``torchrun`` or ``python``; empty when it started nothing.
        folder: where it was started.
        world: ``WORLD_SIZE`` that it was given.
        words: its arguments.
    """

    status: int
    err: str
    program: str = ""
    folder: str = ""
    world: str = ""
    words: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """The arguments of the script that the program runs."""
        at = next(place for place, word in enumerate(self.words) if word.endswith(".py"))
        return list(self.words[at + 1 :])


def project_of(folder: Path) -> Path:
    """A project folder with the recipes and nothing that they have left: what they write stays in it."""
    examples = folder / "project" / "examples"
    for path in sorted((ROOT / "examples").iterdir()):
        if path.name == "quickstart":
            continue
        for script in sorted(file for file in path.iterdir() if file.suffix in (".sh", ".py")):
            copy = examples / path.name / script.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(script.read_bytes())
            copy.chmod(script.stat().st_mode)
    (examples / "quickstart").symlink_to(ROOT / "examples" / "quickstart")
    for script in ("pretrain_gpt.py", "preprocess_data.py", "convert_ckpt.py"):
        (folder / "project" / script).symlink_to(ROOT / script)
    return folder / "project"


def record(project: Path, name: str, *more: str, **variables: str) -> Call:
    """Start ``examples/<name>.sh`` of ``project`` from elsewhere, with these variables and no others."""
    programs, call = project.parent / "bin", project.parent / "call"
    programs.mkdir(exist_ok=True)
    for program in ("torchrun", "python"):
        (programs / program).write_text(_STAND_IN.format(call=call))
        (programs / program).chmod(0o755)
    call.unlink(missing_ok=True)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), **variables}
    done = subprocess.run(
        [project / "examples" / f"{name}.sh", *more],
        cwd=project.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if not call.exists():
        return Call(done.returncode, done.stderr)
    program, folder, world, *words = call.read_text().split("\0")[:-1]
    return Call(done.returncode, done.stderr, program, folder, world, tuple(words))
