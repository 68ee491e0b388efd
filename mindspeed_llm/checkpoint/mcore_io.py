"""The suite's own checkpoints: megatron-core's ``torch_dist`` in a folder that is complete or invisible.

.. code-block:: text

    <root>/latest_checkpointed_iteration.txt      the tracker: the newest complete iteration
    <root>/iter_0000010/                          one save: common.pt, metadata.json, __<rank>_<n>.distcp, .metadata
    <root>/iter_0000010.tmp/                      a save that did not finish: never read, replaced by the next
    <root>/iter_0000010.replaced/                 an earlier save of the same iteration, until the new one is whole
"""

# pyright: basic, reportMissingTypeStubs=false
# Everything here is megatron-core, which has no types.

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException as CollectiveError

import mindspeed_llm.core  # noqa: F401  the device seam comes before megatron-core
from mindspeed_llm.checkpoint.durable import sync_path
from mindspeed_llm.errors import CheckpointError

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling

TRACKER = "latest_checkpointed_iteration.txt"


def iteration_folder(root: Path, iteration: int) -> Path:
    """Where the save of ``iteration`` lives."""
    return root / f"iter_{iteration:07d}"


def latest_iteration(root: Path) -> int | None:
    """The iteration that the tracker names, or None where ``root`` holds no checkpoint.

    Raises:
        CheckpointError: the tracker is not a number, or names a save that is not there.
    """
    tracker = root / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise CheckpointError(
            f"the tracker {tracker} does not name an iteration",
            got=text,
            allowed="a number",
            fix="give --ckpt-step, or write the number of a save that exists into it",
        )
    folder = iteration_folder(root, int(text))
    if not folder.is_dir():
        raise CheckpointError(
            f"the tracker {tracker} names iteration {int(text)}, and there is no {folder}",
            allowed=_complete_saves(root),
            fix=f"give --ckpt-step, or write the number of a save that exists into {tracker}",
        )
    require_save(root, int(text))
    return int(text)


def require_save(root: Path, iteration: int) -> Path:
    """The folder of a save that is there.

    Raises:
        CheckpointError: it is not, or is not a checkpoint of this suite.
    """
    folder = iteration_folder(root, iteration)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no checkpoint of iteration {iteration} in {root}",
            got=folder.name,
            allowed=_complete_saves(root),
            fix=f"give --ckpt-step, or write the number of a save that exists into {root / TRACKER}",
        )
    if not (folder / "metadata.json").exists():
        raise CheckpointError(
            f"{folder} is not a complete torch_dist checkpoint",
            got=sorted(path.name for path in folder.iterdir())[:8],
            allowed="a folder with metadata.json",
            fix="per-rank checkpoints (mp_rank_*) are read by convert_ckpt.py",
        )
    return folder


def _complete_saves(root: Path) -> list[str] | str:
    present = sorted(path.name for path in root.glob("iter_" + 7 * "[0-9]") if (path / "metadata.json").exists())
    return present or "none: the folder holds no complete checkpoint"


def save(root: Path, iteration: int, state: dict[str, Any], metadata: dict[str, Any]) -> Path:
    """Write ``state`` as the save of ``iteration`` and point the tracker at it. Collective.

    Args:
        root: the ``--save`` folder; made if need be.
        iteration: what the save is named for.
        state: a sharded state dict.
        metadata: how the optimizer's state was cut, kept with the save for the load.
    """
    final = iteration_folder(root, iteration)
    draft = final.with_name(final.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(draft), content_metadata=_plain(metadata))
    dist.barrier()
    if dist.get_rank() == 0:
        _publish(root, draft, final, iteration)
    dist.barrier()
    return final


def load(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill the sharded ``state`` from a save. Collective.

    Raises:
        CheckpointError: the save lacks something that ``state`` asks for, or its pieces do not fit.
    """
    try:
        return cast(dict[str, Any], dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_UNEXPECTED))
    except (OSError, EOFError) as error:
        raise _damaged(folder, error) from error
    except CollectiveError as error:
        # A BaseException: what each rank met, in one.
        causes = [wrapped[0] for wrapped in error.failures.values()]
        if any(isinstance(cause, OSError | EOFError) for cause in causes):
            raise _damaged(folder, causes[0]) from error
        raise _misfit(folder, causes[0]) from error
    except (CheckpointingException, KeyError, ValueError, RuntimeError) as error:
        raise _misfit(folder, error) from error


def _damaged(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} is damaged",
        got=f"{type(error).__name__}: {error}"[:600],
        fix="--ckpt-step N takes up an earlier save",
    )


def _misfit(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} does not fit this run",
        got=f"{type(error).__name__}: {error}"[:600],
        fix="resume with the flags of the run that saved it; --finetune or --no-load-optim take only weights",
    )


def load_metadata(folder: Path) -> dict[str, Any]:
    """How the optimizer's state of a save was cut."""
    return dist_checkpointing.load_content_metadata(str(folder)) or {}


def load_common(folder: Path) -> dict[str, Any]:
    """The part of a save that is not sharded: counters, schedule, configuration."""
    return dist_checkpointing.load_common_state_dict(str(folder))


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if not isinstance(value, dist.ProcessGroup)}


def _publish(root: Path, draft: Path, final: Path, iteration: int) -> None:
    for path in [*draft.iterdir(), draft]:
        sync_path(path)
    retired = final.with_name(final.name + ".replaced")
    shutil.rmtree(retired, ignore_errors=True)
    if final.exists():
        final.rename(retired)
    draft.rename(final)
    sync_path(root)
    tracker = root / TRACKER
    fresh = tracker.with_name(TRACKER + ".tmp")
    fresh.write_text(str(iteration))
    sync_path(fresh)
    fresh.replace(tracker)
    sync_path(root)
    shutil.rmtree(retired, ignore_errors=True)
