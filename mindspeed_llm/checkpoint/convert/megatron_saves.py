"""``torch_dist`` saves that Megatron-LM wrote: which they are, and what their arguments say of the model.

.. code-block:: text

    <root>/latest_checkpointed_iteration.txt    a number, or "release"
    <root>/iter_0000001/common.pt               or <root>/release/...

``common.pt`` keeps the command line as an ``argparse.Namespace`` (``generate_state_dict`` in Megatron-LM's
megatron/training/checkpointing.py) where a save of this suite keeps its configuration. The tensors are the same, but
for the names of norms (:func:`~.legacy_spelling.local_name`). Read without torch.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from mindspeed_llm.checkpoint.folders import TRACKER, iteration_folder, latest_iteration

_ARGUMENTS = b"cargparse\nNamespace\n"
"""How protocol 2, which torch.save writes, names the class."""
_LIMIT = 2**26


def is_megatron_save(save: Path) -> bool:
    """Whether ``save`` is a ``torch_dist`` save with the arguments of Megatron-LM; nothing is unpickled."""
    try:
        with zipfile.ZipFile(save / "common.pt") as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            # The arguments are what it begins with.
            return any(_ARGUMENTS in archive.open(name).read(_LIMIT) for name in names)
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        # Whoever reads the save says what is wrong with it.
        return False


def find_megatron_save(folder: Path, step: int | None = None) -> Path | None:
    """The save of Megatron-LM that is meant by a folder of saves or of one; None where it is not one of Megatron-LM.

    Args:
        folder: the root with the tracker, or the folder of one save.
        step: the iteration of the save; by default the tracker's.

    Raises:
        CheckpointError: see :func:`~mindspeed_llm.checkpoint.folders.latest_iteration`.
    """
    if is_megatron_save(folder):
        return folder
    save = None
    if step is not None:
        save = iteration_folder(folder, step)
    elif is_release(folder):
        save = folder / "release"
    elif folder.is_dir() and (iteration := latest_iteration(folder)) is not None:
        save = iteration_folder(folder, iteration)
    return save if save is not None and is_megatron_save(save) else None


def is_release(folder: Path) -> bool:
    """Whether the tracker says ``release``, as it does for weights that are published and not gone on with."""
    tracker = folder / TRACKER
    return tracker.is_file() and tracker.read_bytes()[:64].strip() == b"release"
