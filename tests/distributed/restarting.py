"""``pretrain_gpt.py`` under ``torchrun``, where one rank of the first attempt kills itself: RANK, STEP, then flags."""

from __future__ import annotations

import os
import signal
import sys

from mindspeed_llm.cli.pretrain import main
from mindspeed_llm.training import failure


def _die_once(rank: int, step: int) -> None:
    if int(os.environ["RANK"]) != rank or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    move = failure.Position.move

    def moving(self: failure.Position, phase: str, **more: object) -> None:
        move(self, phase, **more)  # pyright: ignore[reportArgumentType]
        if (phase, self.step) == ("optimizer", step):
            os.kill(os.getpid(), signal.SIGKILL)

    failure.Position.move = moving


if __name__ == "__main__":
    _die_once(int(sys.argv[1]), int(sys.argv[2]))
    sys.argv[1:3] = []
    sys.exit(main())
