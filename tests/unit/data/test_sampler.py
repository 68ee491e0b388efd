"""Which samples a rank reads: the same global batches for any cut, and the same stream after a stop."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from mindspeed_llm.data import sampler
from mindspeed_llm.data.sampler import DataParallelCut, SequentialSampler, ShuffledSampler, shuffled_number
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


@pytest.mark.parametrize("total", [1, 2, 3, 5, 16, 17, 1000, 1025])
def test_a_computed_order_is_a_permutation(total: int) -> None:
    orders = [[shuffled_number(place, total, seed) for place in range(total)] for seed in range(3)]
    assert all(sorted(order) == list(range(total)) for order in orders)
    assert total < 10 or (orders[0] != orders[1] != orders[2])


def test_a_computed_order_is_as_random_as_a_drawn_one() -> None:
    """Of 64 orders: how often the next number is larger, how often it is within 10, and how many stand still."""
    total, near = 1024, 10
    orders = torch.tensor([[shuffled_number(place, total, seed) for place in range(total)] for seed in range(64)])
    steps = orders.diff(dim=1)
    count = steps.numel()
    # Neighbouring steps of a permutation are not independent: ascents vary by a twelfth each.
    assert abs((steps > 0).double().mean().item() - 0.5) < 4 * (1 / 12 / count) ** 0.5
    share = sum(2 * (total - distance) for distance in range(1, near + 1)) / (total * (total - 1))
    assert abs((steps.abs() <= near).double().mean().item() - share) < 4 * (share / count) ** 0.5
    assert abs((orders == torch.arange(total)).sum().item() - 64) < 4 * 64**0.5
    # The same place in the next epoch says nothing about this one.
    together = torch.corrcoef(orders.double()).fill_diagonal_(0)
    assert together.abs().max().item() < 5 / total**0.5


def test_large_datasets_are_read_in_the_computed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LARGEST_TABLE", 50)
    stream = [sample for batch in global_batches(ShuffledSampler, 61, 0, 2, 1, 30) for sample in batch]
    expected = [shuffled_number(place, 61, epoch) for epoch in range(3) for place in range(61)]
    assert stream == expected[: len(stream)]
    resumed = global_batches(ShuffledSampler, 61, 60, 1, 3, 20)
    assert [sample for batch in resumed for sample in batch] == stream[60:]
