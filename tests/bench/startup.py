"""How long a user waits for ``--help``, against Python's own start."""

from __future__ import annotations

import platform

from tests.bench.harness import Figures, Machine, alternate, benchmark, run_python, seconds


@benchmark
def help_time(machine: Machine) -> Figures:
    """``pretrain_gpt.py --help`` brings no torch; the rest is argparse and our table of flags."""
    return [
        alternate(
            "pretrain_gpt.py --help",
            f"Python {platform.python_version()} -c pass",
            seconds(lambda: run_python(["pretrain_gpt.py", "--help"])),
            seconds(lambda: run_python(["-c", "pass"])),
            unit="s",
        )
    ]
