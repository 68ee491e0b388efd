"""Which samples each data-parallel rank reads, in which order.

Both samplers number micro-batches of all ranks in one line: micro-batch ``k`` of rank ``r`` is piece ``k * dp + r``
of the order, ``micro_batch_size`` samples long. A global batch is therefore the same set of samples, whatever the
micro-batch size and the number of ranks, and a run resumes from a count of samples alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

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


class ShuffledSampler(Sampler[list[int]]):
    """Epoch after epoch without end, each a permutation seeded by its number (``--dataloader-type cyclic``).

    The order is that of Megatron's random sampler with ``--no-data-sharding`` where the batch divides the dataset.
    Where it does not, Megatron leaves out the last samples of an epoch; here a batch goes on into the next epoch,
    which is what keeps global batches independent of the cut.

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

    def __iter__(self) -> Iterator[list[int]]:
        position = self.consumed_samples + self.cut.rank * self.cut.micro_batch_size
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        while True:
            batch: list[int] = []
            while len(batch) < self.cut.micro_batch_size:
                wanted, start = divmod(position + len(batch), self.total_samples)
                if wanted != epoch:
                    epoch, order = wanted, self._permutation(wanted)
                piece = order[start : start + self.cut.micro_batch_size - len(batch)]
                batch += cast("list[int]", piece.tolist())
            yield batch
            position += self.cut.stride

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(epoch)
        return torch.randperm(self.total_samples, generator=generator)
