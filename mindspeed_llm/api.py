"""The public functions, for Python programs: the same runs as the command lines, without a command line.

    from mindspeed_llm import api

    run = api.load_hf("Qwen2.5-0.5B", tensor_model_parallel_size=2, bf16=True)
    for name, tensor in api.iter_hf_weights(run):
        ...
    api.close()

Every process of the launcher calls the same functions in the same order (``torchrun``; one process without it).
``tests/unit/api.txt`` holds names and signatures: they change with a line in the change log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_llm.checkpoint import export, hf_io
from mindspeed_llm.config.resolve import Layer, resolve
from mindspeed_llm.config.rules import PRETRAIN_RULES
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.config.spelled import as_flag, read_settings
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.registry import family_layer
from mindspeed_llm.training.initialize import finalize, initialize
from mindspeed_llm.training.pretrain import pretrain
from mindspeed_llm.training.setup import setup
from mindspeed_llm.training.state import Run
from mindspeed_llm.training.weights import export_hf, family_of, load_from_hf, parallel_groups

__all__ = ["load_hf", "iter_hf_weights", "save_hf", "train", "close", "Run", "RunConfig"]


def load_hf(folder: str | os.PathLike[str], **flags: object) -> Run:
    """A live, sharded model with the weights of a Hugging Face folder, ready to train or to be read.

    Collective over all processes: it joins the process group (an existing one is used), cuts it into model-parallel
    groups, and every rank reads the rows that it holds.

    Args:
        folder: ``config.json`` and safetensors, as ``save_pretrained`` writes them.
        flags: fields of the configuration by name (``tensor_model_parallel_size=2``, ``bf16=True``). Without a length
            (``train_iters``, ``train_samples``) neither micro-batch nor learning rate need be given.

    Returns:
        ``run.chunks``: this pipeline rank's model chunks, each ``(tokens [b, s], position_ids [b, s],
        attention_mask | None) -> logits [b, s, v / tp]`` on the last stage.

    Raises:
        CheckpointError: there is no Hugging Face folder.
        ConfigError: flags that cannot work, or that contradict the weights.
        ConversionError: no family knows the model, or its weights are not what its config.json says.
    """
    source = Path(folder)
    hf_io.read_config(source)
    given = {"load": str(source), **flags}
    if not given.keys() & {"train_iters", "train_samples"}:
        given["train_iters"] = 0
    cfg = _configuration(Layer("python", given))
    initialize(cfg)
    return setup(cfg, lambda chunks: load_from_hf(cfg, source, chunks))


def iter_hf_weights(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """The current weights under their Hugging Face names, whole, one after the other: ``(name, [...])`` in the
    model's dtype.

    Collective over the tensor and pipeline groups of the first replica and of every other: all ranks iterate to the
    end, and the first tensor-parallel rank of the first stage gets the weights; the others get none. Memory stays near
    the largest weight; a tensor may share memory with the model, so copy it to keep it.

    Raises:
        ConversionError: the stages together do not hold exactly the family's weights.
    """
    run.gather_parameters()
    return export.iter_hf_weights(run.chunks, family_of(run.cfg), run.cfg, groups=parallel_groups())


def save_hf(run: Run, folder: str | os.PathLike[str]) -> None:
    """Write the current weights as a Hugging Face folder, complete or not at all, in ``params_dtype``; the tokenizer
    goes along. Collective over all processes, which see one file system.

    Raises:
        CheckpointError: ``folder`` is the folder that was loaded, or holds something else than an earlier export.
        ConversionError: the model cannot be written as its family.
    """
    export_hf(run, Path(folder))


def train(configuration: RunConfig | Mapping[str, object]) -> None:
    """A whole pretraining run, as ``pretrain_gpt.py`` does it: load, train, evaluate, save, export. Collective.

    Args:
        configuration: a resolved configuration, or flags as in a YAML file: ``{"load": "Qwen2.5-0.5B",
            "train-iters": 10, "tensor_model_parallel_size": 2}``.

    Raises:
        SuiteError: whatever the command line would refuse, with the same words.
    """
    if isinstance(configuration, RunConfig):
        pretrain(configuration)
        return
    reading = read_settings(((as_flag(name), value) for name, value in configuration.items()), "python")
    if reading.errors:
        raise ConfigError.collect(reading.errors)
    pretrain(_configuration(reading.layer(), notices=reading.notices, rules=PRETRAIN_RULES))


def close() -> None:
    """Leave the process group, so that another run can be set up in this process. Collective."""
    finalize()


def _configuration(layer: Layer, **more: object) -> RunConfig:
    """``layer`` over what the model family says."""
    family = family_layer(layer.values)
    layers = [family, layer] if family else [layer]
    return resolve(layers, world_size=_world_size(), **more)  # pyright: ignore[reportArgumentType]  as resolve has them


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
