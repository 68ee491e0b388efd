"""One process of a side: ``python -m mindspeed_llm.tools.compare.rank FOLDER``, started by ``launch.py``.

``FOLDER`` holds ``side.txt``, ``tokens.safetensors`` and the number of seconds in ``timeout.txt``.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file

from mindspeed_llm.device import current
from mindspeed_llm.errors import SuiteError
from mindspeed_llm.tools.compare.launch import STACK_SIGNAL, stack_file
from mindspeed_llm.tools.compare.sides import parse_side


def main() -> int:
    """Capture this rank's part; the exit status."""
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faulthandler.register(STACK_SIGNAL, file=stack_file(folder, rank).open("w"), all_threads=False)
    side = parse_side((folder / "side.txt").read_text())
    tokens = load_file(folder / "tokens.safetensors")["tokens"]
    current().bind()
    try:
        if side.kind == "hf":
            from mindspeed_llm.tools.compare import run_hf

            run_hf.capture(side, tokens, folder)
            return 0
        from mindspeed_llm import api
        from mindspeed_llm.tools.compare import run_ours

        timeout = datetime.timedelta(seconds=float((folder / "timeout.txt").read_text()))
        store = dist.FileStore(str(folder / "rendezvous"), world)
        dist.init_process_group(current().backend, store=store, rank=rank, world_size=world, timeout=timeout)
        run_ours.capture(side, tokens, folder, rank)
        api.close()
    except SuiteError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
