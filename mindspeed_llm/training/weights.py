"""Where a run's weights come from and go to: Hugging Face folders, checkpoints, or nowhere."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.convert.legacy_load import load_megatron_weights
from mindspeed_llm.checkpoint.engine import load_hf_weights
from mindspeed_llm.checkpoint.export import ParallelGroups, check_export, save_hf
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.groups import (
    data_group,
    expert_data_group,
    expert_group,
    expert_tensor_group,
    pipeline_group,
    tensor_group,
)
from mindspeed_llm.errors import CheckpointError, ConfigError, SuiteError
from mindspeed_llm.models.family import ModelFamily
from mindspeed_llm.models.registry import family_by_name, hf_config_path
from mindspeed_llm.training.state import Run

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        etp=(expert_tensor_group().rank(), expert_tensor_group().size()),
        cfg=cfg,
    )


def load_from_megatron(cfg: RunConfig, folder: Path, chunks: list[Any]) -> None:
    """Fill this rank's chunks from a save of Megatron-LM: a per-rank tree, or a ``torch_dist`` folder."""
    load_megatron_weights(
        chunks,
        family_of(cfg),
        folder,
        tp_rank=tensor_group().rank(),
        tp_size=tensor_group().size(),
        etp=(expert_tensor_group().rank(), expert_tensor_group().size()),
        cfg=cfg,
    )


def parallel_groups() -> ParallelGroups:
    """This rank's groups, as the conversion engine takes them."""
    return ParallelGroups(
        tp=tensor_group(),
        pp=pipeline_group(),
        dp=data_group(),
        experts=expert_group(),
        etp=expert_tensor_group(),
        edp=expert_data_group(),
    )


def hf_source(cfg: RunConfig) -> Path | None:
    """The Hugging Face folder that the run's architecture came from: its tokenizer goes along on export."""
    named = cfg.model.hf_config and str(hf_config_path(cfg.model.hf_config))
    for given in (cfg.checkpoint.load, cfg.checkpoint.pretrained_checkpoint, named):
        if given is None:
            continue
        folder = Path(given) if Path(given).is_dir() else Path(given).parent
        if (folder / hf_io.CONFIG).exists():
            return folder
    return None


def tokenizer_source(cfg: RunConfig) -> Path | None:
    """The folder of the tokenizer that goes along on export."""
    named = cfg.tokenizer.tokenizer_name_or_path
    return Path(named) if named is not None and Path(named).is_dir() else hf_source(cfg)


def origin(cfg: RunConfig) -> dict[str, Any] | None:
    """What a save keeps for the day when it becomes a Hugging Face folder: config.json and the tokenizer's folder."""
    try:
        source, words = hf_source(cfg), tokenizer_source(cfg)
        hf_config = hf_io.read_config(source) if source is not None else None
    except SuiteError:
        # A folder that went away during the run is no reason to lose a save.
        return None
    return {"hf_config": hf_config, "words": words and str(words.resolve())}


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
    save_hf(
        run.chunks,
        family_of(cfg),
        cfg,
        folder,
        dtype=export_dtype(cfg),
        groups=parallel_groups(),
        source=hf_source(cfg),
        tokenizer=tokenizer_source(cfg),
    )
