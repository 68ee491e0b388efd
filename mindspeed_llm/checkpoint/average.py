"""The mean of models with one architecture, as a Hugging Face folder."""

# pyright: basic, reportMissingTypeStubs=false
# JSON has no types.

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.checkpoint.survey import HfModel
from mindspeed_llm.errors import CheckpointError, ConfigError

_NOT_THE_MODEL = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"}
"""Keys of config.json that may differ between models that can be averaged."""


def average(folders: Sequence[Path], output: Path, weights: Sequence[float] | None = None) -> None:
    """Write the mean of the models to ``output``, complete or not at all.

    Each tensor is summed in fp32 (float64 stays so) and written in the dtype of the first folder, whose config.json and
    tokenizer are copied. In memory are one tensor of the sum and one of a model.

    Args:
        folders: Hugging Face folders.
        output: a folder that does not exist yet.
        weights: one for each folder, divided by their sum; equal without.

    Raises:
        ConfigError: weights that make no mean.
        CheckpointError: the models do not fit each other, cannot be read or hold values that are not finite, or
            ``output`` is there.
    """
    shares = _shares(len(folders), weights)
    _require_models(folders)
    if output.exists():
        raise CheckpointError(
            "the place for the average is taken", got=output, fix="--output a folder that is not there"
        )
    with ExitStack() as stack:
        models = [HfModel(folder, stack) for folder in folders]
        for model in models[1:]:
            _require_same(models[0], model)
        tensors = {n: hf_io.TensorInfo(stored.shape, stored.dtype) for n, stored in models[0].tensors.items()}
        plans = [plan for _, plan in hf_io.plan_shards(tensors, dict.fromkeys(tensors, 0))]
        staging = hf_io.open_staging(output)
        try:
            writer = hf_io.ShardWriter(staging, plans, tensors)
            for name in tensors:
                writer.write(name, _mean(name, models, shares))
            writer.finish()
            hf_io.write_index(staging, plans, tensors)
            hf_io.copy_companions(folders[0], staging, (hf_io.CONFIG, hf_io.GENERATION, *hf_io.TOKENIZER_FILES))
            hf_io.publish(output)
        except OSError as error:
            raise CheckpointError(f"the average cannot be written to {output}", got=error) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    given = [1.0] * count if weights is None else list(weights)
    if len(given) != count:
        raise ConfigError("one weight for each folder", got=f"{len(given)} for {count} folders", fix="--weights")
    if any(not math.isfinite(weight) or weight < 0 for weight in given) or sum(given) <= 0:
        raise ConfigError("the weights make no mean", got=given, allowed="numbers from 0, not all of them 0")
    return [weight / sum(given) for weight in given]


def _require_models(folders: Sequence[Path]) -> None:
    for folder in folders:
        if not hf_io.is_hf_folder(folder):
            raise CheckpointError(
                "only Hugging Face folders can be averaged",
                got=folder,
                fix="the optimizer state of saves has no mean; export their weights first, with --load and --save-hf",
            )


def _require_same(first: HfModel, other: HfModel) -> None:
    one, two = (hf_io.read_config(model.folder) for model in (first, other))
    differs = {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)} - _NOT_THE_MODEL
    if differs:
        raise CheckpointError(
            "the models compute something else",
            got=", ".join(f"{key} {one.get(key)} and {two.get(key)}" for key in sorted(differs)),
            allowed=f"the same config.json in {first.folder} and {other.folder}",
        )
    lacking = first.tensors.keys() ^ other.tensors.keys()
    if lacking:
        raise CheckpointError("not in both models", got=sorted(lacking)[:5], allowed=f"{first.folder}, {other.folder}")
    for name, stored in first.tensors.items():
        if stored.shape != other.tensors[name].shape:
            raise CheckpointError(f"{name} has two shapes", got=f"{stored.shape}, {other.tensors[name].shape}")
        if stored.dtype.is_floating_point != other.tensors[name].dtype.is_floating_point:
            raise CheckpointError(f"{name} has two dtypes", got=f"{stored.dtype}, {other.tensors[name].dtype}")
        if stored.dtype.is_floating_point and stored.dtype.itemsize == 1:
            raise CheckpointError(f"{name} is quantised and has no mean", got=stored.dtype, allowed="16 bits or more")


def _mean(name: str, models: Sequence[HfModel], shares: Sequence[float]) -> Tensor:
    dtype, box = models[0].tensors[name].dtype, models[0].tensors[name].pieces[0].box
    if not dtype.is_floating_point:
        first = models[0].read(name, box)
        if not all(torch.equal(first, model.read(name, box)) for model in models[1:]):
            raise CheckpointError(f"{name} holds whole numbers that differ between the models, and has no mean")
        return first
    total = torch.zeros(box[1], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for model, share in zip(models, shares, strict=True):
        part = model.read(name, box)
        if not part.isfinite().all():
            raise CheckpointError(
                f"{name} holds NaN or infinite values, and has no mean",
                got=model.folder,
                fix="verify FOLDER tells all such tensors; leave the folder out",
            )
        total.add_(part, alpha=share)
    mean = total.to(dtype)
    if not mean.isfinite().all():
        raise CheckpointError(
            f"the mean of {name} does not fit {dtype}",
            got=f"values up to {total.abs().max():.4g}",
            allowed=f"up to {torch.finfo(dtype).max:.4g}: the dtype of the first folder",
            fix="give a folder with another dtype first",
        )
    return mean
