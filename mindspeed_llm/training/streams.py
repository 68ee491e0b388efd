"""Streams of micro-batches for a run, from the datasets that its configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.data.batches import build_data_iterator, get_batch, sample_numbers
from mindspeed_llm.data.datasets import build_datasets, rank_needs_data
from mindspeed_llm.data.inputs import split_sizes
from mindspeed_llm.data.tokenizer import Tokenizer
from mindspeed_llm.training.failure import phase
from mindspeed_llm.training.loop import Streams
from mindspeed_llm.training.numbers import TrainingData
from mindspeed_llm.training.objective import Batch


@phase("data")
def open_streams(cfg: RunConfig, tokenizer: Tokenizer) -> tuple[TrainingData, Mapping[str, Callable[[], Streams]]]:
    """Openers of the training stream and of the held-out ones. Collective.

    Opens nothing yet: what is wrong with the data shows before a model is built.

    Args:
        cfg: the run; its data is prepared, see :func:`mindspeed_llm.data.datasets.prepare_raw`.
        tokenizer: that of the run.

    Returns:
        Training from a number of consumed samples on; split name -> opener, for the held-out splits that hold samples.
        A stream is a list: each model chunk of this rank reads the same samples.
    """
    needed = rank_needs_data(cfg)
    built = build_datasets(cfg, tokenizer, split_sizes(cfg), is_built_on_rank=lambda: needed or dist.get_rank() == 0)
    chunks = cfg.transformer.virtual_pipeline_model_parallel_size
    stages: list[int | None] = list(range(chunks)) if chunks else [None]

    def open_split(dataset: Any, consumed: int) -> Streams:
        return [
            _micro_batches(build_data_iterator(dataset if needed else None, cfg, consumed), cfg, tokenizer.eod, stage)
            for stage in stages
        ]

    training, *held_out = built
    numbered = partial(sample_numbers, training if needed else None, cfg)
    return TrainingData(partial(open_split, training), numbered), {
        split: partial(open_split, dataset, 0)
        for split, dataset in zip(("valid", "test"), held_out, strict=True)
        if _anywhere(dataset is not None)
    }


def _micro_batches(samples: Any, cfg: RunConfig, eod: int, stage: int | None) -> Iterator[Batch]:
    while True:
        with phase("data"):
            batch = get_batch(samples, cfg, eod=eod, vp_stage=stage)
        yield batch


def _anywhere(here: bool) -> bool:
    """Whether any rank says so: ranks that read nothing build nothing. Collective."""
    said: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(said, here)
    return any(said)
