"""What ``--load`` is: a Hugging Face folder, a checkpoint of ours, or nothing yet. Read without torch."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_llm.checkpoint.convert.legacy_folders import find_tree
from mindspeed_llm.checkpoint.convert.megatron_saves import find_megatron_save
from mindspeed_llm.checkpoint.folders import (
    CONVERSION,
    NON_PERSISTENT,
    TRACKER,
    iteration_folder,
    latest_iteration,
    newest_root,
    require_save,
    root_with,
)
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import CheckpointError
from mindspeed_llm.models.registry import CONFIG

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """What ``--load`` turned out to be.

    Attributes:
        kind: ``random``: nothing is loaded; ``hf``: a Hugging Face folder; ``per_rank``: the ``mp_rank_*`` files of
            Megatron-LM, ``megatron``: a ``torch_dist`` save of it, of both of which only the weights are read;
            ``checkpoint``: one of our own.
        folder: where it is.
        iteration: of the checkpoint.
        weights_only: the run starts from the weights of a checkpoint rather than going on with it.
    """

    kind: Literal["random", "hf", "per_rank", "megatron", "checkpoint"]
    folder: Path | None = None
    iteration: int = 0
    weights_only: bool = False

    def __str__(self) -> str:
        if self.kind == "random":
            return "nothing"
        save = f" of iteration {self.iteration}" if self.kind == "checkpoint" else ""
        return f"{self.kind}{save} in {self.folder}"


def find_origin(cfg: RunConfig) -> Origin:
    """Decide what ``--load`` is, before a model is built; never random weights unless that was asked for.

    An absent or empty folder means "start here" only in the restart idiom, where ``--load`` equals ``--save``.

    Raises:
        CheckpointError: the folder is missing, or is neither a Hugging Face folder nor a checkpoint.
    """
    checkpoint = cfg.checkpoint
    if checkpoint.load is None:
        return _start(cfg)
    folder = Path(checkpoint.load)
    # Unlike Path.resolve it takes links that lead round in a circle.
    here, saving = os.path.realpath(folder), checkpoint.save and os.path.realpath(checkpoint.save)
    non_persistent = Path(checkpoint.non_persistent_global_ckpt_dir or folder / NON_PERSISTENT)
    if folder.is_dir():
        if (folder / CONFIG).is_file():
            if checkpoint.ckpt_step is not None:
                raise CheckpointError(
                    "--ckpt-step chooses among the saves of a run",
                    got=f"--ckpt-step {checkpoint.ckpt_step}, and --load {folder} is a Hugging Face folder",
                    fix="leave out --ckpt-step, or --load the --save folder of a run",
                )
            if saving == here:
                raise CheckpointError(
                    f"--save {folder} is the Hugging Face folder that --load reads",
                    fix="save elsewhere; to go on from there, --load that folder and keep --hf-config here",
                )
            return Origin("hf", folder)
        theirs = _of_megatron(folder, checkpoint.ckpt_step)
        if theirs is not None:
            if theirs.folder is not None and saving in (here, os.path.realpath(theirs.folder)):
                raise CheckpointError(
                    f"--save {checkpoint.save} holds the checkpoint of Megatron-LM that --load reads",
                    fix="save elsewhere; to go on from there, --load that folder and --pretrained-checkpoint this one",
                )
            return theirs
    if checkpoint.ckpt_step is not None:
        root = root_with(folder, non_persistent, checkpoint.ckpt_step)
        require_save(root, checkpoint.ckpt_step)
        return _checkpoint(root, checkpoint.ckpt_step)
    if folder.is_dir():
        root = newest_root(folder, non_persistent)
        iteration = latest_iteration(root)
        if iteration is not None:
            return _checkpoint(root, iteration)
    return _without_saves(cfg, folder, restart=saving == here)


def _of_megatron(folder: Path, step: int | None) -> Origin | None:
    """Weights to start from that Megatron-LM or MindSpeed-LLM saved; None where there are none."""
    tree = find_tree(folder, step)
    if tree is not None:
        return Origin("per_rank", tree)
    save = find_megatron_save(folder, step)
    return Origin("megatron", save) if save is not None else None


def _without_saves(cfg: RunConfig, folder: Path, *, restart: bool) -> Origin:
    """Where a run begins whose ``--load`` holds nothing.

    Args:
        cfg: of the run.
        folder: ``--load``.
        restart: it is the ``--save`` folder, too.

    Raises:
        CheckpointError: no beginning was asked for.
    """
    checkpoint = cfg.checkpoint
    saves = sorted(path.name for path in folder.glob("iter_" + 7 * "[0-9]")) if folder.is_dir() else []
    if not saves and not folder.is_file() and checkpoint.pretrained_checkpoint is not None:
        return _start(cfg)
    if restart and not saves and not checkpoint.exit_on_missing_checkpoint:
        logger.warning("--load and --save are both %s and it holds no checkpoint: starting from random weights", folder)
        return Origin("random")
    found = "a file" if folder.is_file() else "no such folder"
    if folder.is_dir():
        found = sorted(path.name for path in folder.iterdir())[:6]
    raise CheckpointError(
        f"--load {folder} is neither a Hugging Face folder nor a checkpoint folder",
        got=found,
        allowed=f"a folder with config.json and weights, or one with {TRACKER}",
        fix="correct --load; drop it to train from random weights; --ckpt-step N takes a save without the tracker",
    )


def _checkpoint(root: Path, iteration: int) -> Origin:
    """A save to go on with, or one that a conversion wrote: weights to start from."""
    converted = (iteration_folder(root, iteration) / CONVERSION).is_file()
    return Origin("checkpoint", root, iteration, weights_only=converted)


def _start(cfg: RunConfig) -> Origin:
    """Where a run begins that goes on with nothing."""
    given = cfg.checkpoint.pretrained_checkpoint
    if given is None:
        return Origin("random")
    folder = Path(given)
    if (folder / CONFIG).is_file():
        return Origin("hf", folder)
    theirs = _of_megatron(folder, None)
    if theirs is not None:
        return theirs
    iteration = latest_iteration(folder)
    if iteration is None:
        raise CheckpointError(
            f"--pretrained-checkpoint {folder} is neither a Hugging Face folder nor a checkpoint folder",
            allowed=f"a folder with config.json and weights, or one with {TRACKER}",
        )
    return Origin("checkpoint", folder, iteration, weights_only=True)
