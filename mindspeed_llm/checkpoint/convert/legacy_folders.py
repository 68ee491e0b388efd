"""Where the files of a per-rank tree of Megatron-LM or MindSpeed-LLM lie. Read without torch.

.. code-block:: text

    <root>/latest_checkpointed_iteration.txt                       a number, or "release"
    <root>/iter_0000001/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt  or <root>/release/...

``TT`` is the tensor-parallel rank; ``PPP``, the pipeline stage, and ``EEE``, the expert-parallel rank, stand there only
where there are several: ``get_checkpoint_name`` in Megatron-LM's megatron/training/checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mindspeed_llm.checkpoint.folders import TRACKER, iteration_folder, named_iteration
from mindspeed_llm.errors import CheckpointError

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_SAVES = ("iter_" + 7 * "[0-9]" + "*", "release")


def find_tree(folder: Path, step: int | None = None) -> Path | None:
    """The save inside ``folder`` that holds a per-rank tree, or ``folder`` itself; None where it is no such tree.

    Args:
        folder: the root with the tracker, or the folder of one save.
        step: the iteration of the save; by default the tracker's.

    Raises:
        CheckpointError: the tracker is missing, cannot be read, or names what is not there.
    """
    if not folder.is_dir():
        return None
    if rank_files(folder):
        return folder
    saves = {path.name: path for pattern in _SAVES for path in sorted(folder.glob(pattern)) if rank_files(path)}
    text = str(step)
    if step is None:
        if not (folder / TRACKER).is_file():
            return _no_save(saves, f"{folder} has no {TRACKER} that says which save to take")
        text = (folder / TRACKER).read_text(errors="replace").strip()
    iteration = named_iteration(text)
    if iteration is None and text != "release":
        return _no_save(saves, f"the tracker {folder / TRACKER} does not name a save: {text[:80]!r}")
    save = folder / "release" if iteration is None else iteration_folder(folder, iteration)
    return saves.get(save.name) if save.is_dir() else _no_save(saves, f"there is no {save}")


def _no_save(saves: Mapping[str, Path], what: str) -> None:
    """None where there is no tree; other formats have their own errors."""
    if saves:
        raise CheckpointError(
            what,
            allowed=", ".join(saves),
            fix=f"name the save itself, such as {next(iter(saves.values()))}, or write its number into {TRACKER}",
        )


def rank_files(folder: Path) -> dict[tuple[int, ...], Path]:
    """The file of each rank by the numbers in the name of its folder, whether it exists or not."""
    found = {
        path: match for path in folder.glob("mp_rank_*") if (match := _RANK.fullmatch(path.name)) and path.is_dir()
    }
    ranks = {tuple(int(text) for text in match.groups() if text is not None): path for path, match in found.items()}
    return {numbers: ranks[numbers] / FILE for numbers in sorted(ranks)}
