"""The source of the installed megatron-core, found and parsed without importing it (its import brings torch)."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import ConfigError


@dataclass(frozen=True)
class McoreClass:
    """A dataclass of megatron-core: file under ``megatron/core`` and class name."""

    file: str
    qualname: str


# In the order in which a name that occurs twice finds its owner; base classes first.
SOURCES: dict[str, tuple[McoreClass, ...]] = {
    "TransformerFlags": (
        McoreClass("model_parallel_config.py", "ModelParallelConfig"),
        McoreClass("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "OptimizerFlags": (McoreClass("optimizer/optimizer_config.py", "OptimizerConfig"),),
    "DdpFlags": (McoreClass("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
}


def wheel_folder() -> Path:
    """Folder of the installed ``megatron.core``.

    Raises:
        ConfigError: megatron-core is not installed.
    """
    # `megatron` is a namespace package: finding it runs none of its code, finding `megatron.core` would not either,
    # but importing it would.
    spec = importlib.util.find_spec("megatron")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "core"
        if (folder / "package_info.py").is_file():
            return folder
    raise ConfigError("megatron-core is not installed", allowed="0.16.1", fix="pip install megatron-core==0.16.1")


def class_body(folder: Path, source: McoreClass) -> list[ast.stmt]:
    """Statements of the body of ``source``, read from ``folder``."""
    tree = ast.parse((folder / source.file).read_text(encoding="utf-8"))
    return next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == source.qualname)
