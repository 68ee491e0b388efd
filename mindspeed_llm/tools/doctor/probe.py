"""Imports what a run imports, and says how far it came: a line of JSON at the begin and at the end of each stage.

It runs in a process of its own, which may die of what it imports; see ``finding.run_probe``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from mindspeed_llm.errors import SuiteError
from mindspeed_llm.tools.doctor.finding import MARK

NATIVE = {"ops": "mindspeed_llm.ops._cpu_kernels", "tokenizers": "mindspeed_llm.data._byte_bpe"}


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_available() and dist.is_backend_available(name)]
    return {"version": torch.__version__, "cuda": torch.version.cuda, "backends": backends}


def _device() -> dict[str, Any]:
    from mindspeed_llm.device import current

    device = current()
    return {"type": device.type, "backend": device.backend, "count": device.namespace.device_count()}


def _native() -> dict[str, Any]:
    """Why each compiled module does not load, or None."""
    import torch  # noqa: F401  first: the kernels use the OpenMP runtime that torch brings

    from mindspeed_llm.ops import cpu_kernels

    found: dict[str, str | None] = {}
    for name, module in NATIVE.items():
        try:
            importlib.import_module(module)
            found[name] = None
        except ImportError as error:
            found[name] = str(error)
    found["ops"] = found["ops"] and cpu_kernels.unavailable()
    return found


def _ops() -> dict[str, Any]:
    import torch

    from mindspeed_llm import ops
    from mindspeed_llm.device import current

    table = ops.choose(ops.registry(), device=current().type, dtype=torch.bfloat16)
    return {row.op: {"impl": row.impl, "reason": row.reason, "status": row.status} for row in table.rows()}


def _patches() -> dict[str, Any]:
    from mindspeed_llm.core import patches
    from mindspeed_llm.patching import fingerprint_of, known_fingerprints

    patches.revert()
    known = known_fingerprints()
    targets = [patch.target for patch in patches.every_run()]
    return {
        "count": len(targets),
        "strange": sorted({target for target in targets if fingerprint_of(target) != known.get(target)}),
    }


STAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "device": _device,
    "native": _native,
    "ops": _ops,
    "megatron-core": _patches,
}


def main() -> int:
    """Entry point; returns the exit status."""
    for name, stage in STAGES.items():
        _tell({"stage": name})
        try:
            _tell({"stage": name, "result": stage()})
        except SuiteError as error:
            _tell({"stage": name, "error": str(error)})
            return 1
    return 0


def _tell(words: dict[str, Any]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(words)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
