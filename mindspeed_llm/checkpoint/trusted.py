"""The one place where pickles are read: what they may name, and readers that refuse everything else.

A pickle is a program: it names functions and calls them. Checkpoints hold three kinds, and each is read with a list of
what it may name:

* ``.metadata``, the index of a ``torch_dist`` save: a bare pickle of torch's ``Metadata``, with :data:`METADATA_NAMES`.
  It grows with the number of shards, so it is read by Python's fast unpickler.
* files of ``torch.save`` (objects inside ``.distcp`` files, ``pytorch_model.bin``): by torch's ``weights_only`` reader,
  with what torch allows and :data:`OBJECT_NAMES`, and nothing that other libraries have added.
* what Megatron-LM and MindSpeed keep their arguments in (``common.pt``, which is ours, too, and the per-rank
  ``model_optim_rng.pt``): the same with :data:`LEGACY_NAMES`; classes of the software that wrote them become
  :class:`Inert` stand-ins, so that it need not be installed.
"""

# pyright: basic, reportPrivateUsage=false
# What a pickle holds has no type.

from __future__ import annotations

import io
import pathlib
import pickle
import re
import signal
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch._utils import _rebuild_tensor_v2
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from mindspeed_llm.errors import CheckpointError

REMEDY = "take a checkpoint whose origin you know, or one in safetensors"


def _enum_member(kind: object, name: str) -> Enum:
    """What some versions of Python write as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"Can only take members of an enumeration, not of {kind!r}")
    return kind[name]


_INDEX_CLASSES = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    planner.SavePlan,
    planner.WriteItem,
    planner.WriteItemType,
    planner.TensorWriteData,
    planner.BytesIOWriteData,
)
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}

METADATA_NAMES: Mapping[str, Any] = {
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in _INDEX_CLASSES},
    **{f"torch.{name}": value for name, value in _DTYPES.items()},
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.serialization._get_layout": _LAYOUTS.__getitem__,
    "collections.OrderedDict": OrderedDict,
    "pathlib.PosixPath": pathlib.PosixPath,
    "builtins.getattr": _enum_member,
}
"""All that ``.metadata`` may name."""

# numpy has moved its functions between releases; a pickle names the place of its own.
_RECONSTRUCT, _SCALAR = np.zeros(0).__reduce__()[0], np.float32(0).__reduce__()[0]
_NUMPY_DTYPES = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdSU"}

OBJECT_NAMES: Mapping[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    **{f"numpy.dtypes.{kind.__name__}": kind for kind in _NUMPY_DTYPES},
    **{f"numpy.{core}.multiarray._reconstruct": _RECONSTRUCT for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _SCALAR for core in ("core", "_core")},
}
"""What the objects of a save may name beside tensors and plain data: the states of numpy's generators."""


def _rebuild_npu_tensor(*args: Any) -> torch.Tensor:
    """torch_npu's tensors: as torch's, and the memory format of the device, which means nothing elsewhere."""
    return _rebuild_tensor_v2(*args[:6])


LEGACY_NAMES: Mapping[str, Any] = {
    **OBJECT_NAMES,
    "argparse.Namespace": types.SimpleNamespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "signal.Signals": signal.Signals,
    "pathlib.PosixPath": pathlib.PosixPath,
    "_io.BytesIO": io.BytesIO,
    "torch_npu.utils.storage._rebuild_npu_tensor": _rebuild_npu_tensor,
}
"""What files with arguments may name besides; :data:`INERT` comes on top."""

INERT = re.compile(r"(torch_npu|megatron|mindspeed\w*|modellink|ascendspeed|transformer_engine)\.")
"""Where the classes come from that such files hold and nobody needs: settings, enumerations, tokenizers."""


class Inert:
    """Stands for an object whose class is not loaded: keeps what the pickle gave it, and does nothing."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__}, not loaded>"


def read_metadata(path: Path) -> Metadata:
    """The index of a ``torch_dist`` save; every file that it names is one of its folder.

    Args:
        path: ``.metadata``.

    Raises:
        CheckpointError: it cannot be read, names what it may not, or points outside its folder.
    """
    before = _definitions()
    with reading(path), path.open("rb") as file:
        found = _MetadataUnpickler(file, path).load()
        if _definitions() != before:
            raise _refused(path, "it changes a class")
        entries = list(found.storage_data.values()) if type(found) is Metadata else [found]
        strange = {type(entry).__name__ for entry in entries if type(entry) is not filesystem._StorageInfo}
        if strange:
            raise CheckpointError(f"{path} is not the index of a checkpoint", got=", ".join(sorted(strange)))
        for name in {entry.relative_path for entry in entries}:
            file_beside(path, name)
    return found


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str, /) -> Any:
        found = METADATA_NAMES.get(f"{module}.{name}")
        if found is None:
            raise _refused(self._path, f"{module}.{name}")
        return found


def _definitions() -> list[dict[str, Any]]:
    """What the classes of an index are; a pickle can set attributes of what it names, classes too."""
    return [dict(vars(kind)) for kind in _INDEX_CLASSES]


def file_beside(index: Path, name: object) -> Path:
    """The file ``name`` in the folder of ``index``.

    A link that leads out of the folder is refused, but for the cache of huggingface_hub, whose ``snapshots/<revision>``
    are links into the ``blobs`` beside them.

    Raises:
        CheckpointError: it would be a file elsewhere.
    """
    if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\0" in name:
        raise CheckpointError(f"{index}: not a file name beside the index", got=repr(name), fix=REMEDY)
    home = index.parent.resolve()
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    path = index.parent / name
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be followed", got=error) from error
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise CheckpointError(
            f"{path} is a link that leads out of its folder", got=target, fix="put the file itself there"
        )
    return path


def read_common(path: Path) -> dict[str, Any]:
    """What a ``torch_dist`` save holds besides its shards: counters, schedule, configuration; in those of Megatron-LM
    its arguments.

    Args:
        path: ``common.pt``.

    Raises:
        CheckpointError: it cannot be read, names what it may not, or has something else where we keep mappings.
    """
    found = _mapping(path, read_with_stand_ins(path, path))
    config = found.get("config", {})
    parts = {name: found.get(name, {}) for name in ("config", "layout", "progress", "content_metadata")}
    parts |= {f"config, {name}": part for name, part in (config.items() if isinstance(config, dict) else ())}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise CheckpointError(f"{path}: {name} is not a mapping", got=type(part).__name__)
    return found


def read_object(source: Path | IO[bytes], label: object) -> Any:
    """An object of ``torch.save``, on the CPU: tensors, plain data, and what :data:`OBJECT_NAMES` allows.

    Args:
        source: a file, or what stands for one.
        label: how errors call it.

    Raises:
        CheckpointError: it cannot be read, or names what it may not.
    """
    with reading(label), only_names(OBJECT_NAMES):
        return torch.load(source, map_location="cpu", weights_only=True)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """A file of named tensors such as ``pytorch_model.bin``; they stay on the disk until they are used.

    Raises:
        CheckpointError: it cannot be read, names any code, or holds something else.
    """
    with reading(path), only_names({}):
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for name, tensor in _mapping(path, found).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            got = f"{name!r}: {type(tensor).__name__}"
            raise CheckpointError(f"{path} is not a mapping of names to tensors", got=got)
    return found


def read_legacy(path: Path) -> dict[str, Any]:
    """A per-rank file of Megatron-LM or MindSpeed: ``mp_rank_*/model_optim_rng.pt``, ``distrib_optim.pt``.

    Tensors stay on the disk until they are used.

    Raises:
        CheckpointError: it cannot be read, or names what it may not.
    """
    return _mapping(path, read_with_stand_ins(path, path, mmap=True))


def read_with_stand_ins(source: Path | IO[bytes], label: object, *, mmap: bool = False) -> Any:
    """An object of ``torch.save``, in which those of the software that wrote it become :class:`Inert`.

    Args:
        source: a file, or what stands for one.
        label: how errors call it.
        mmap: leave tensors on the disk until they are used; ``source`` is a path then.

    Raises:
        CheckpointError: it cannot be read, or names what it may not.
    """
    with reading(label), only_names(LEGACY_NAMES):
        unknown = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    refused = [name for name in unknown if not INERT.match(name)]
    if refused:
        raise _refused(label, ", ".join(refused))
    with reading(label), only_names({**LEGACY_NAMES, **{name: _stand_in(name) for name in unknown}}):
        if not isinstance(source, Path):
            source.seek(0)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def _stand_in(name: str) -> type[Inert]:
    module, _, qualname = name.rpartition(".")
    return type(qualname, (Inert,), {"__module__": module})


def _mapping(path: Path, found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a mapping", got=type(found).__name__)
    return cast(dict[str, Any], found)


@contextmanager
def only_names(names: Mapping[str, Any]) -> Iterator[None]:
    """Within, torch's ``weights_only`` reader allows its own list and ``names``; what others have added is put off."""
    others = get_safe_globals()
    ours: list[Any] = [(value, name) for name, value in names.items()]
    clear_safe_globals()
    add_safe_globals(ours)
    try:
        yield
    finally:
        # Parts of torch add theirs when they are first imported, which may have been now.
        others += [entry for entry in get_safe_globals() if entry not in ours]
        clear_safe_globals()
        add_safe_globals(others)


@contextmanager
def reading(label: object) -> Iterator[None]:
    """Whatever goes wrong within is one error that says what of ``label`` was refused, or that it is damaged."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged pickle fails in any way.
        raise refusal(label, error) or _damaged(label, error) from error


def refusal(label: object, error: BaseException) -> CheckpointError | None:
    """What to raise for ``error`` if it is that of a pickle that names what it may not; torch's advice is left out."""
    if not isinstance(error, pickle.UnpicklingError):
        return None
    named = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)|((?:Can only|Trying to call) .+)", str(error))
    return _refused(label, named[1] or named[2]) if named else None


def _refused(label: object, what: str) -> CheckpointError:
    return CheckpointError(f"{label} cannot be read without running code from it", got=what, fix=REMEDY)


def _damaged(label: object, error: Exception) -> CheckpointError:
    # torch adds advice, to read the file without any care for one.
    said = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return CheckpointError(
        f"{label} cannot be read: it is damaged, or not what its name says",
        got=f"{type(error).__name__}: {said.strip().partition(chr(10))[0]}"[:600],
        fix="take it from its source again; of a run's own checkpoints, --ckpt-step N takes up an earlier one",
    )
