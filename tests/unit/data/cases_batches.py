"""What the ranks run in the tests of batches."""

from __future__ import annotations

from typing import Any

import torch

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm.data.batches import build_data_iterator, data_parallel_cut, get_batch
from mindspeed_llm.data.datasets import build_datasets, rank_needs_data, stage_needs_batch
from mindspeed_llm.data.tokenizer import NullTokenizer
from mindspeed_llm.errors import DataError
from tests.unit.data.corpus import run_config

from megatron.core import parallel_state


def read(
    layout: dict[str, Any], eod: int, steps: int, samples: int, consumed: int = 0, **values: Any
) -> list[dict[str, Any]]:
    """The batches of this rank (of its first model chunk), with its place."""
    parallel_state.initialize_model_parallel(**layout)
    cfg = run_config(**values)
    train = build_datasets(cfg, NullTokenizer(eod), [samples, 0, 0], is_built_on_rank=lambda: rank_needs_data(cfg))[0]
    assert (train is not None) == rank_needs_data(cfg)
    iterator = build_data_iterator(train, cfg, consumed)
    place = {"dp": parallel_state.get_data_parallel_rank(), "pp": parallel_state.get_pipeline_model_parallel_rank()}
    return [{**place, **get_batch(iterator, cfg, eod=eod)} for _ in range(steps)]


def needs(layout: dict[str, Any], chunks: int, **values: Any) -> list[bool]:
    """Whether each model chunk of this rank uses a batch."""
    parallel_state.initialize_model_parallel(**layout)
    cfg = run_config(**values)
    return [stage_needs_batch(cfg, vp_stage) for vp_stage in range(chunks)]


def share_weights(layout: dict[str, Any]) -> torch.Tensor:
    """A loss mask that is no sequence of zeros and ones, after its broadcast."""
    parallel_state.initialize_model_parallel(**layout)
    cfg = run_config(micro_batch_size=1, seq_length=4, vocab_size=10)
    whole = torch.arange(4)[None]
    sample = {"tokens": whole, "labels": whole, "loss_mask": torch.tensor([[0.1, 1e-30, -2.5, 1 / 3]]),
              "position_ids": whole}  # fmt: skip
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    mask = get_batch(iter([sample]) if first else None, cfg, eod=9)["loss_mask"]
    assert mask is not None
    return mask


def too_high(layout: dict[str, Any]) -> str:
    """The error of a rank when the data holds an id that the model has no row for."""
    parallel_state.initialize_model_parallel(**layout)
    cfg = run_config(micro_batch_size=1, seq_length=4, vocab_size=10)
    ids = torch.tensor([[1, 2, 10, 3]])
    sample = {"tokens": ids, "labels": ids, "loss_mask": torch.ones(1, 4), "position_ids": ids}
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    try:
        get_batch(iter([sample]) if first else None, cfg, eod=9)
    except DataError as error:
        return str(error)
    return "no error"


def run_out(layout: dict[str, Any]) -> str:
    """The error of a rank when the data ends."""
    parallel_state.initialize_model_parallel(**layout)
    cfg = run_config(micro_batch_size=1, seq_length=4, vocab_size=10)
    iterator = iter(()) if parallel_state.get_tensor_model_parallel_rank() == 0 else None
    try:
        get_batch(iterator, cfg, eod=9)
    except DataError as error:
        return error.what
    return "no error"


def build_missing(layout: dict[str, Any]) -> str:
    """The error of a rank when the data is not there; none may be left waiting for another."""
    parallel_state.initialize_model_parallel(**layout)
    cfg = run_config(data_path=("/nowhere/corpus",), seq_length=8, split="1,0,0")
    try:
        build_datasets(cfg, NullTokenizer(9), [4, 0, 0], is_built_on_rank=lambda: rank_needs_data(cfg))
    except DataError as error:
        return error.what
    return "no error"


def cut(layout: dict[str, Any]) -> tuple[int, int, int]:
    """How samples are dealt to this rank."""
    parallel_state.initialize_model_parallel(**layout)
    own = data_parallel_cut(run_config(micro_batch_size=3))
    return own.micro_batch_size, own.rank, own.size
