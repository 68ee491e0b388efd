"""Where a run's weights come from and go to: Hugging Face folders, checkpoints, or nowhere."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.engine import ParallelGroups, check_export, load_hf_weights, save_hf
from mindspeed_llm.checkpoint.folders import NON_PERSISTENT, TRACKER, latest_iteration, newest_root, require_save
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.groups import data_group, pipeline_group, tensor_group
from mindspeed_llm.errors import CheckpointError, ConfigError
from mindspeed_llm.models.family import ModelFamily
from mindspeed_llm.models.registry import family_by_name
from mindspeed_llm.training.state import Run

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Origin:
    """What ``--load`` turned out to be.

    Attributes:
        kind: ``random``: nothing is loaded; ``hf``: a Hugging Face folder; ``checkpoint``: one of our own.
        folder: where it is.
        iteration: of the checkpoint.
        weights_only: the run starts from the weights of a checkpoint rather than going on with it.
    """

    kind: Literal["random", "hf", "checkpoint"]
    folder: Path | None = None
    iteration: int = 0
    weights_only: bool = False


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
    if folder.is_dir():
        if hf_io.is_hf_folder(folder):
            if checkpoint.save is not None and Path(checkpoint.save).resolve() == folder.resolve():
                raise CheckpointError(
                    f"--save {folder} is the Hugging Face folder that --load reads",
                    fix="save elsewhere; to go on from there, --load that folder and keep --hf-config here",
                )
            return Origin("hf", folder)
        if checkpoint.ckpt_step is not None:
            require_save(folder, checkpoint.ckpt_step)
            return Origin("checkpoint", folder, checkpoint.ckpt_step)
        root = newest_root(folder, Path(checkpoint.non_persistent_global_ckpt_dir or folder / NON_PERSISTENT))
        iteration = latest_iteration(root)
        if iteration is not None:
            return Origin("checkpoint", root, iteration)
    saves = sorted(path.name for path in folder.glob("iter_" + 7 * "[0-9]")) if folder.is_dir() else []
    restart = checkpoint.save is not None and folder.resolve() == Path(checkpoint.save).resolve()
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


def _start(cfg: RunConfig) -> Origin:
    """Where a run begins that goes on with nothing."""
    given = cfg.checkpoint.pretrained_checkpoint
    if given is None:
        return Origin("random")
    folder = Path(given)
    if hf_io.is_hf_folder(folder):
        return Origin("hf", folder)
    iteration = latest_iteration(folder)
    if iteration is None:
        raise CheckpointError(
            f"--pretrained-checkpoint {folder} is neither a Hugging Face folder nor a checkpoint folder",
            allowed=f"a folder with config.json and weights, or one with {TRACKER}",
        )
    return Origin("checkpoint", folder, iteration, weights_only=True)


def family_of(cfg: RunConfig) -> ModelFamily:
    """The model family that reads and writes this run's Hugging Face folders.

    Raises:
        ConfigError: nothing says which it is.
    """
    if cfg.model.model_type_hf is None:
        raise ConfigError(
            "nothing says which Hugging Face model this is",
            fix="--load a Hugging Face folder, or name the architecture with --hf-config or --model-type-hf",
        )
    return family_by_name(cfg.model.model_type_hf)


def load_from_hf(cfg: RunConfig, folder: Path, chunks: list[Any]) -> None:
    """Fill this rank's chunks from a Hugging Face folder."""
    load_hf_weights(
        chunks,
        family_of(cfg),
        folder,
        tp_rank=tensor_group().rank(),
        tp_size=tensor_group().size(),
        cfg=cfg,
    )


def parallel_groups() -> ParallelGroups:
    """This rank's groups, as the conversion engine takes them."""
    return ParallelGroups(tp=tensor_group(), pp=pipeline_group(), dp=data_group())


def hf_source(cfg: RunConfig) -> Path | None:
    """The Hugging Face folder that the run's architecture came from: its tokenizer goes along on export."""
    for given in (cfg.checkpoint.load, cfg.checkpoint.pretrained_checkpoint, cfg.model.hf_config):
        if given is None:
            continue
        folder = Path(given) if Path(given).is_dir() else Path(given).parent
        if (folder / hf_io.CONFIG).exists():
            return folder
    return None


def export_dtype(cfg: RunConfig) -> torch.dtype:
    """The dtype of exported weights: ``--params-dtype``, else the run's if 16 bits, else that of the folder loaded."""
    return _DTYPES[cfg.checkpoint.params_dtype]  # pyright: ignore[reportArgumentType]  derived by now


def check_exports(cfg: RunConfig) -> None:
    """Learn before training whether ``--save-hf`` can be done.

    Raises:
        SuiteError: nothing says which family it is, the family cannot express the model, or the folder is taken.
    """
    if cfg.checkpoint.save_hf is not None:
        check_export(family_of(cfg), cfg, cfg.checkpoint.save_hf, dtype=export_dtype(cfg), source=hf_source(cfg))


def check_outputs(cfg: RunConfig) -> None:
    """Make every folder that the run will write to, and see that it can.

    Raises:
        CheckpointError: one of them cannot be made or written to.
    """
    export, metrics = cfg.checkpoint.save_hf, cfg.logging.metrics_file
    folders = {
        "--save": cfg.checkpoint.save,
        "--save-hf": export and str(Path(export).absolute().parent),
        "--metrics-file": metrics and str(Path(metrics).absolute().parent),
        "--tensorboard-dir": cfg.logging.tensorboard_dir,
    }
    if metrics is not None and Path(metrics).is_dir():
        raise CheckpointError(
            "--metrics-file is a folder", got=metrics, fix="the path of a file, such as metrics.jsonl"
        )
    for flag, folder in folders.items():
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise CheckpointError(
                f"{flag}: the folder cannot be written to", got=f"{folder}: {error.strerror}", fix=f"another {flag}"
            ) from error


def export_hf(run: Run, folder: Path) -> None:
    """Write the run's weights as a Hugging Face folder. Collective.

    Raises:
        CheckpointError: it cannot be written; on all ranks.
    """
    cfg = run.cfg
    run.gather_parameters()
    named = cfg.tokenizer.tokenizer_name_or_path
    save_hf(
        run.chunks,
        family_of(cfg),
        cfg,
        folder,
        dtype=export_dtype(cfg),
        groups=parallel_groups(),
        source=hf_source(cfg),
        tokenizer=named if named is not None and Path(named).is_dir() else None,
    )
