"""Which samples each data-parallel rank reads, in which order.

Both samplers number micro-batches of all ranks in one line: micro-batch ``k`` of rank ``r`` is piece ``k * dp + r``
of the order, ``micro_batch_size`` samples long. A global batch is therefore the same set of samples, whatever the
micro-batch size and the number of ranks, and a run resumes from a count of samples alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from mindspeed_llm.errors import DataError


@dataclass(frozen=True)
class DataParallelCut:
    """How samples are dealt out.

    Attributes:
        micro_batch_size: samples in one forward pass.
        rank: this process among those that read different samples.
        size: their number.
    """

    micro_batch_size: int
    rank: int = 0
    size: int = 1

    @property
    def stride(self) -> int:
        """Samples that all ranks together take for one micro-batch each."""
        return self.micro_batch_size * self.size


class SequentialSampler(Sampler[list[int]]):
    """Each sample once, in the order of the dataset (Megatron's ``--dataloader-type single``).

    Samples at the end that do not fill one micro-batch on every rank are left out.

    Args:
        total_samples: length of the dataset.
        consumed_samples: samples that all ranks together have seen already.
        cut: how samples are dealt out.

    Raises:
        DataError: when nothing is left.
    """

    def __init__(self, total_samples: int, consumed_samples: int, cut: DataParallelCut) -> None:
        if consumed_samples + cut.stride > total_samples:
            raise DataError(
                "There are no samples left to train on.",
                got=f"{consumed_samples} of {total_samples} samples are consumed, all ranks together take {cut.stride}",
                fix="more data, a smaller batch, or fewer iterations",
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.cut = cut

    def __iter__(self) -> Iterator[list[int]]:
        first = self.consumed_samples + self.cut.rank * self.cut.micro_batch_size
        last_start = self.total_samples - self.cut.stride + self.cut.rank * self.cut.micro_batch_size
        for start in range(first, last_start + 1, self.cut.stride):
            yield list(range(start, start + self.cut.micro_batch_size))


LARGEST_TABLE = 1 << 27
"""Samples up to which the order of an epoch is kept as a table, 1 GiB then; beyond, each number is computed."""


class ShuffledSampler(Sampler[list[int]]):
    """Epoch after epoch without end, each a permutation seeded by its number (``--dataloader-type cyclic``).

    The order is that of Megatron's random sampler with ``--no-data-sharding`` where the batch divides the dataset.
    Where it does not, Megatron leaves out the last samples of an epoch; here a batch goes on into the next epoch,
    which is what keeps global batches independent of the cut. A dataset of more than :data:`LARGEST_TABLE` samples has
    an order of its own (:func:`shuffled_number`), which takes no memory.

    Args:
        total_samples: length of the dataset.
        consumed_samples: samples that all ranks together have seen already.
        cut: how samples are dealt out.

    Raises:
        DataError: when the dataset is empty.
    """

    def __init__(self, total_samples: int, consumed_samples: int, cut: DataParallelCut) -> None:
        if total_samples <= 0:
            raise DataError("There are no samples to train on.", got="an empty dataset")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.cut = cut
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        position = self.consumed_samples + self.cut.rank * self.cut.micro_batch_size
        while True:
            batch: list[int] = []
            while len(batch) < self.cut.micro_batch_size:
                epoch, start = divmod(position + len(batch), self.total_samples)
                end = min(start + self.cut.micro_batch_size - len(batch), self.total_samples)
                batch += self._part(epoch, start, end)
            yield batch
            position += self.cut.stride

    def _part(self, epoch: int, start: int, end: int) -> list[int]:
        """The samples at places ``start`` to ``end`` of an epoch."""
        if self.total_samples > LARGEST_TABLE:
            return [shuffled_number(place, self.total_samples, epoch) for place in range(start, end)]
        return [int(number) for number in self._table(epoch)[start:end]]

    def _table(self, epoch: int) -> torch.Tensor:
        if self._epoch != epoch:
            del self._order  # so that there are never two
            self._order = torch.randperm(self.total_samples, generator=torch.Generator().manual_seed(epoch))
            self._epoch = epoch
        return self._order


def shuffled_number(place: int, total: int, seed: int) -> int:
    """What stands at one place of a pseudo-random permutation of ``range(total)``, without the others.

    A Feistel network permutes the numbers of so many bits as ``total`` has, made even: at most four times as many. It
    is applied until the result is below ``total``, which keeps it a permutation of these.

    Args:
        place: from 0 to ``total - 1``.
        total: numbers permuted.
        seed: another one is another permutation.
    """
    half = ((total - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    number = place
    while True:
        left, right = number >> half, number & mask
        for turn in range(_FEISTEL_TURNS):
            left, right = right, left ^ (_mixed(right + (seed * _FEISTEL_TURNS + turn << 32)) & mask)
        number = (left << half) | right
        if number < total:
            return number


_FEISTEL_TURNS = 6
_MASK_64 = (1 << 64) - 1


def _mixed(value: int) -> int:
    """64 bits that all depend on all bits of the value (the finaliser of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
