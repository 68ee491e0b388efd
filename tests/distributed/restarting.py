"""What ``torchrun --max-restarts`` does to ``pretrain_gpt.py``, from a process that imports once and forks the workers.

    python -m tests.distributed.restarting '[[1, "save", 2], [0, "optimizer", 5]]' flags...

The launcher is torch's own; in attempt ``n`` the worker of rank, phase and step ``n`` of the list kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import mindspeed_llm.training.pretrain  # noqa: F401  once, for all workers
from mindspeed_llm.cli.pretrain import main
from mindspeed_llm.training import failure

WORKERS = 2


def _work(kills: list[tuple[int, str, int]], flags: list[str]) -> None:
    attempt, move = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), failure.Position.move
    here = kills[attempt][1:] if attempt < len(kills) and kills[attempt][0] == int(os.environ["RANK"]) else None

    def moving(self: failure.Position, phase: str, **more: object) -> None:
        move(self, phase, **more)  # pyright: ignore[reportArgumentType]
        if here is not None and (phase, self.step) == tuple(here):
            os.kill(os.getpid(), signal.SIGKILL)

    failure.Position.move = moving
    sys.argv = ["pretrain_gpt.py", *flags]
    code = main()
    if code:
        sys.exit(code)


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    config = LaunchConfig(
        1, 1, WORKERS, start_method="fork", max_restarts=len(wanted), rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, _work)(wanted, sys.argv[2:])
