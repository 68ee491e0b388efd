"""Per-rank files of Megatron-LM, read by torch alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

_RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
_BESIDE_TENSORS: list[Any] = [argparse.Namespace, np.ndarray, np.dtype, np.dtypes.UInt32DType, _RECONSTRUCT]


def load_rank(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """What a file holds."""
    with torch.serialization.safe_globals(_BESIDE_TENSORS):
        return torch.load(path, weights_only=True, mmap=mmap)
