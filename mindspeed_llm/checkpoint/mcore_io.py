"""Reading the suite's own checkpoints: megatron-core's ``torch_dist`` (``checkpoint.saving`` writes them)."""

# pyright: basic, reportMissingTypeStubs=false
# Everything here is megatron-core, which has no types.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.api import CheckpointException as CollectiveError

import mindspeed_llm.core  # noqa: F401  the device seam comes before megatron-core
from mindspeed_llm.checkpoint.trusted import read_common
from mindspeed_llm.checkpoint.trusted_load import TrustedCommonStrategy, TrustedShardedStrategy
from mindspeed_llm.errors import CheckpointError

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling


def load(folder: Path, state: dict[str, Any], *, group: Any = None) -> dict[str, Any]:
    """Fill the sharded ``state`` from a save. Collective.

    Args:
        folder: the save.
        state: a sharded state dict.
        group: let its ranks read each piece once and send it to each other (``--ckpt-fully-parallel-load``).

    Raises:
        CheckpointError: the save lacks something that ``state`` asks for, or its pieces do not fit.
    """
    _require_description(folder)
    try:
        strategy = TrustedShardedStrategy()
        loaded = dist_checkpointing.load(
            state,
            str(folder),
            strategy if group is None else FullyParallelLoadStrategyWrapper(strategy, group),
            TrustedCommonStrategy(),
            strict=StrictHandling.RAISE_UNEXPECTED,
        )
        return cast(dict[str, Any], loaded)
    except (OSError, EOFError) as error:
        raise _damaged(folder, error) from error
    except CollectiveError as error:
        # A BaseException: what each rank met, in one.
        causes = [wrapped[0] for wrapped in error.failures.values()]
        ours = [cause for cause in causes if isinstance(cause, CheckpointError)]
        if ours:
            raise ours[0] from error
        if any(isinstance(cause, OSError | EOFError) for cause in causes):
            raise _damaged(folder, causes[0]) from error
        raise _misfit(folder, causes[0]) from error
    except (CheckpointingException, KeyError, ValueError, RuntimeError) as error:
        raise _misfit(folder, error) from error


def _require_description(folder: Path) -> None:
    """What megatron-core looks at first."""
    path = folder / "metadata.json"
    try:
        described = json.loads(path.read_bytes())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    if described != "torch_dist":
        raise CheckpointError(f"{path} is not that of a torch_dist checkpoint", got=described, allowed="torch_dist")


def _damaged(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{folder} is damaged",
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
    return dist_checkpointing.load_content_metadata(preloaded_state_dict=load_common(folder)) or {}


def load_common(folder: Path) -> dict[str, Any]:
    """The part of a save that is not sharded: counters, schedule, configuration."""
    return read_common(folder / COMMON_STATE_FNAME)
