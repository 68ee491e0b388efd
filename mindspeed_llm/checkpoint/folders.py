"""Where saves lie, which of them are whole, and which may go.

.. code-block:: text

    <root>/latest_checkpointed_iteration.txt      the tracker: the newest complete iteration
    <root>/iter_0000010/                          one save: common.pt, metadata.json, __<rank>_<n>.distcp, .metadata
    <root>/iter_0000010.tmp/                      a save that did not finish: never read, deleted by the next
    <root>/iter_0000010.replaced/                 an earlier save of the same iteration, until the new one is whole
    <root>/iter_0000005.removed/                  a save that is being deleted: never read
    <root>/non_persistent/                        a root of its own, for saves of which only the newest is kept

A folder gets its name by a rename when all of it is on the disk, so a save with its name and its ``metadata.json`` is
whole.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from mindspeed_llm.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
CONVERSION = "conversion.json"
"""Stands in a checkpoint that holds converted weights to start from, and says where they came from."""
NON_PERSISTENT = "non_persistent"
_LONGEST_NUMBER = 18
_SAVE = re.compile(r"iter_(\d{7,})(?:\.replaced)?")
_LEFTOVER = re.compile(r"(iter_\d{7,})\.(tmp|replaced|removed)")


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the save of ``iteration`` lives."""
    return root / f"iter_{iteration:07d}"


def draft_folder(root: Path, iteration: int) -> Path:
    """Where it is written."""
    return root / f"iter_{iteration:07d}.tmp"


def retired_folder(root: Path, iteration: int) -> Path:
    """Where an earlier save of the same iteration waits for the new one."""
    return root / f"iter_{iteration:07d}.replaced"


def named_iteration(text: str) -> int | None:
    """The iteration that the text of a tracker names; None where it is no number that a folder could have."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER else None


def delete(path: Path) -> None:
    """A folder, or the link to one that someone has moved to another disk: there it stays. Does not raise."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def clear(root: Path, kind: str) -> None:
    """Delete what saves that were cut off have left, but no save that has no other copy.

    Args:
        root: the folder of saves.
        kind: ``tmp``, ``replaced`` or ``removed``.
    """
    for path in root.glob(f"iter_*.{kind}"):
        match = _LEFTOVER.fullmatch(path.name)
        if match and (kind != "replaced" or (root / match[1] / "metadata.json").is_file()):
            delete(path)


def complete_iterations(root: Path) -> list[int]:
    """Iterations of which there is a whole save, ascending."""
    found = {
        int(match[1])
        for path in root.glob("iter_*")
        if (match := _SAVE.fullmatch(path.name)) and (path / "metadata.json").is_file()
    }
    return sorted(found)


def latest_iteration(root: Path) -> int | None:
    """The newest save: the one that the tracker names; without a tracker (a first save that was cut off between its
    last two steps) the newest whole one; None where ``root`` holds no save.

    Raises:
        CheckpointError: the tracker is not a number, or names a save that is not there.
    """
    tracker = root / TRACKER
    if not tracker.exists():
        return max(complete_iterations(root), default=None)
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else "a folder"
    iteration = named_iteration(text)
    if iteration is None:
        raise CheckpointError(
            f"the tracker {tracker} does not name an iteration",
            got=repr(text[:80]),
            allowed="a number",
            fix="give --ckpt-step, or write the number of a save that exists into it",
        )
    if not _place(root, iteration).is_dir():
        raise CheckpointError(
            f"the tracker {tracker} names iteration {iteration}, and there is no {iteration_folder(root, iteration)}",
            allowed=_present(root),
            fix=f"give --ckpt-step, or write the number of a save that exists into {tracker}",
        )
    require_save(root, iteration)
    return iteration


def require_save(root: Path, iteration: int) -> Path:
    """The folder of a save that is there.

    Raises:
        CheckpointError: it is not, or is not a checkpoint of this suite.
    """
    folder = _place(root, iteration)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no checkpoint of iteration {iteration} in {root}",
            got=folder.name,
            allowed=_present(root),
            fix=f"give --ckpt-step, or write the number of a save that exists into {root / TRACKER}",
        )
    if not (folder / "metadata.json").exists():
        ours = any(folder.glob("*.distcp"))
        raise CheckpointError(
            f"{folder} is not a complete torch_dist checkpoint",
            got=sorted(path.name for path in folder.iterdir())[:8],
            allowed="a folder with metadata.json",
            fix="--ckpt-step N takes up an earlier save" if ours else None,
        )
    return folder


def holds(root: Path, iteration: int) -> bool:
    """Whether there is a save of ``iteration``, whole or not."""
    return _place(root, iteration).is_dir()


def root_with(root: Path, non_persistent: Path, iteration: int) -> Path:
    """The one of two roots that holds the save of ``iteration``; ``root`` where both or neither do."""
    return non_persistent if holds(non_persistent, iteration) > holds(root, iteration) else root


def newest_root(root: Path, non_persistent: Path) -> Path:
    """The one of two roots with the newer save; ``root`` where neither has one.

    Raises:
        CheckpointError: see :func:`latest_iteration`.
    """
    persistent, other = latest_iteration(root), latest_iteration(non_persistent)
    if other is not None and (persistent is None or other > persistent):
        return non_persistent
    return root


def retire(root: Path, newest: int, *, limit: int | None, every: int | None) -> list[int]:
    """Delete the saves that need not be kept, now that ``newest`` is whole.

    Args:
        root: the folder of saves.
        newest: never deleted, and no save after it is: they belong to another course of the run.
        limit: saves to keep, the newest ones (``--save-total-limit``); None keeps all.
        every: with ``--save-retain-interval``, the save before ``newest`` goes unless it is a multiple of this.

    Returns:
        The iterations that went.
    """
    older = [iteration for iteration in complete_iterations(root) if iteration < newest]
    going: set[int] = set()
    if limit is not None:
        going.update(older[: max(0, len(older) - (limit - 1))])
    if every is not None:
        going = {iteration for iteration in (*going, *older[-1:]) if iteration % every}
    for iteration in sorted(going):
        # The one that may be half deleted already goes first: alone it would look like a save.
        for folder in (retired_folder(root, iteration), iteration_folder(root, iteration)):
            if folder.exists():
                # Under another name first: what is half deleted must not look like a save.
                gone = folder.with_name(f"iter_{iteration:07d}.removed")
                delete(gone)
                folder.rename(gone)
    clear(root, "removed")
    return sorted(going)


def _place(root: Path, iteration: int) -> Path:
    """Where the save is: a run may have ended between the two renames that replace a save of the same iteration."""
    folder, retired = iteration_folder(root, iteration), retired_folder(root, iteration)
    return retired if retired.is_dir() and not folder.is_dir() else folder


def _present(root: Path) -> list[str] | str:
    present = [iteration_folder(root, number).name for number in complete_iterations(root)]
    return present or "none: the folder holds no complete checkpoint"
