"""Which samples a rank reads: the same global batches for any cut, and the same stream after a stop."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from mindspeed_llm.data.sampler import DataParallelCut, SequentialSampler, ShuffledSampler
from mindspeed_llm.errors import DataError

KINDS = (SequentialSampler, ShuffledSampler)
Kind = type[SequentialSampler] | type[ShuffledSampler]
CUTS = [(1, 1), (2, 1), (6, 1), (1, 2), (3, 2), (1, 6), (2, 3)]
GLOBAL_BATCH = 6


def global_batches(kind: Kind, total: int, consumed: int, micro: int, ranks: int, count: int) -> list[list[int]]:
    """Global batches of six samples, put together from all ranks as training sees them."""
    streams: list[Iterator[list[int]]] = [
        iter(kind(total, consumed, DataParallelCut(micro, rank, ranks))) for rank in range(ranks)
    ]
    steps = GLOBAL_BATCH // (micro * ranks)
    return [[sample for _ in range(steps) for stream in streams for sample in next(stream)] for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total", [60, 61, 65])
def test_global_batches_do_not_depend_on_the_cut(kind: Kind, total: int) -> None:
    batches = {cut: global_batches(kind, total, 0, *cut, 10) for cut in CUTS}
    assert all(batch == batches[1, 1] for batch in batches.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resuming_from_a_count_continues_the_stream(kind: Kind, stop: int) -> None:
    straight = global_batches(kind, 60, 0, 2, 1, 10)
    assert global_batches(kind, 60, stop * GLOBAL_BATCH, 1, 3, 10 - stop) == straight[stop:]


def test_sequential_is_each_sample_once() -> None:
    seen = [sample for batch in global_batches(SequentialSampler, 62, 0, 2, 1, 10) for sample in batch]
    assert seen == list(range(60))


@pytest.mark.parametrize(("micro", "ranks"), [(2, 3), (4, 1), (1, 4)])
def test_sequential_ends_with_the_last_step_of_all_ranks(micro: int, ranks: int) -> None:
    batches = [list(SequentialSampler(21, 2, DataParallelCut(micro, rank, ranks))) for rank in range(ranks)]
    steps = (21 - 2) // (micro * ranks)
    assert [len(own) for own in batches] == [steps] * ranks
    assert sorted(sample for own in batches for batch in own for sample in batch) == list(
        range(2, 2 + steps * micro * ranks)
    )


def test_shuffled_is_megatrons_permutation_of_each_epoch() -> None:
    """Megatron's random sampler without data sharding: epoch e is randperm under the seed e, dealt out round robin."""
    total, micro, ranks = 24, 2, 3
    for rank in range(ranks):
        expected: list[int] = []
        for epoch in range(3):
            order = torch.randperm(total, generator=torch.Generator().manual_seed(epoch)).tolist()
            step = micro * ranks
            for start in range(0, total, step):
                expected += order[start : start + step][rank * micro : (rank + 1) * micro]
        stream = iter(ShuffledSampler(total, 0, DataParallelCut(micro, rank, ranks)))
        assert [sample for batch in islice(stream, 12) for sample in batch] == expected


def test_shuffled_reads_every_sample_of_an_epoch_that_the_batch_does_not_divide() -> None:
    stream = iter(ShuffledSampler(7, 0, DataParallelCut(3)))
    seen = [sample for batch in islice(stream, 7) for sample in batch]
    for epoch in range(3):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_shuffled_batch_longer_than_the_dataset() -> None:
    assert sorted(next(iter(ShuffledSampler(2, 0, DataParallelCut(6))))) == [0, 0, 0, 1, 1, 1]


def test_opening_far_in_reads_nothing_before() -> None:
    consumed = 10**12
    batch = next(iter(SequentialSampler(consumed + 8, consumed, DataParallelCut(2, 1, 2))))
    assert batch == [consumed + 2, consumed + 3]


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(DataError, match="no samples left"):
        SequentialSampler(10, 8, DataParallelCut(1, 0, 4))
    with pytest.raises(DataError, match="no samples"):
        ShuffledSampler(0, 0, DataParallelCut(1))
