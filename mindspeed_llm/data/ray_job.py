"""Preparation on a Ray cluster (``--ray``): every worker is a task that prepares one shard; the shards are merged here.

Inputs, tokenizer and output must be on storage that all nodes share.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.data.merge import merge_shards
from mindspeed_llm.data.prepare import PrepareResult, PrepareSettings, prepare
from mindspeed_llm.data.tokenizer import build_tokenizer
from mindspeed_llm.errors import DataError

_RETRIES = 3
"""A task is started again when its node dies; a shard that was written is written anew, to the same bytes."""


def prepare_on_ray(
    settings: PrepareSettings, tokenizer: TokenizerConfig, vocab_size: int | None = None
) -> PrepareResult:
    """Prepare in ``settings.workers`` tasks of one CPU each, on the cluster of ``RAY_ADDRESS`` or else on this machine.

    Args:
        settings: as for :func:`~mindspeed_llm.data.prepare.prepare`, without a shard.
        tokenizer: read by each task.
        vocab_size: ``--vocab-size``, for the null tokenizer.

    Raises:
        DataError: Ray is not installed, or a task failed for a reason that the user can mend.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise DataError("Ray is not installed.", fix="pip install ray, or --shard and --merge-shards") from error

    def shard(number: int) -> str | None:
        """The error's text, as an exception of Ray would carry the whole trace of the task to the terminal."""
        part = replace(settings, shard=(number, settings.workers), workers=1)
        try:
            prepare(part, build_tokenizer(tokenizer, vocab_size))
        except DataError as error:
            return str(error)
        return None

    started_here = not ray.is_initialized()
    if started_here:
        ray.init(log_to_driver=False, configure_logging=False, include_dashboard=False)
    try:
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(shard)
        failures = [text for text in ray.get([task.remote(number) for number in range(settings.workers)]) if text]
    finally:
        if started_here:
            ray.shutdown()
    if failures:
        raise DataError(failures[0])
    return merge_shards(settings.output_prefix)
