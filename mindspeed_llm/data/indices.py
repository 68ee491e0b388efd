"""The three arrays that turn documents into samples, and their cache.

``document_index`` is the order of documents over all epochs; ``sample_index`` says at which document and token each
sample begins; ``shuffle_index`` is the order of samples. The rule is that of megatron-core's ``GPTDataset`` (a test
compares the arrays): all epochs are one stream of tokens, sample ``i`` of it is ``stream[s i : s i + s + 1]``, and
what remains at the end of the last epoch, at most ``s`` tokens, is not used. The last epoch is shuffled apart when
less than 80 % of it is used.

megatron-core has one rank write the cache and lets all others fail where they cannot see it, and knows no order without
shuffling; that is why its method is replaced.
"""

# megatron-core is untyped, and most here is its objects.
# pyright: basic

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core

from megatron.core.datasets import helpers

logger = logging.getLogger(__name__)

Indices = tuple[np.ndarray, np.ndarray, np.ndarray]

_NAMES = ("document_index", "sample_index", "shuffle_index")
_SEPARATE_BELOW = 0.80
"""Used share of the last epoch below which it is shuffled apart, so that the others are seen whole (megatron-core)."""


@dataclass(frozen=True)
class Epochs:
    """How many epochs a dataset is read for.

    Attributes:
        tokens: in one epoch.
        sequence_length: tokens of a sample, without the one after it.
        count: epochs.
        wanted: samples asked for; None for those of one epoch.
    """

    tokens: int
    sequence_length: int
    count: int
    wanted: int | None

    @classmethod
    def covering(cls, tokens: int, sequence_length: int, wanted: int | None) -> Epochs:
        """As many epochs as ``wanted`` samples need."""
        needed = 0 if wanted is None else wanted * sequence_length + 1
        return cls(tokens, sequence_length, max(1, -(-needed // tokens)), wanted)

    def samples(self, epochs: int) -> int:
        """Samples in the stream of that many epochs."""
        return (epochs * self.tokens - 1) // self.sequence_length

    @property
    def separate_last(self) -> bool:
        """Whether the last epoch is shuffled apart."""
        if self.count == 1 or self.wanted is None:
            return False
        from_last = self.wanted - self.samples(self.count - 1)
        return from_last < int(_SEPARATE_BELOW * self.samples(1))


def build_indices(
    lengths: np.ndarray, documents: np.ndarray, epochs: Epochs, seed: int | None, drop_last_partial: bool = True
) -> Indices:
    """Build the arrays.

    Args:
        lengths: ``[all documents]`` int32, tokens in each.
        documents: ``[n]`` int32, the documents of the split.
        epochs: from :meth:`Epochs.covering`.
        seed: of the shuffling; None keeps the order of the file.
        drop_last_partial: leave out a last sample that is not full.

    Returns:
        ``document_index`` int32 ``[epochs * n]``; ``sample_index`` ``[samples + 1, 2]``, int32, or int64 where a place
        in the document index is beyond 2**31 - 1; ``shuffle_index`` ``[samples]``, uint32, or int64 from 2**32 - 2
        samples on. Nothing else of such a size is allocated.
    """
    random = None if seed is None else np.random.RandomState(seed)
    separate = epochs.separate_last
    document_index = np.tile(documents.astype(np.int32, copy=False), epochs.count)
    last_epoch = len(document_index) - len(documents) if separate else len(document_index)
    _shuffle(document_index, last_epoch, random)
    # It takes the longest of all lengths first, which reads a memory map once from end to end: no copy is needed.
    sample_index = helpers.build_sample_idx(
        lengths, document_index, epochs.sequence_length, epochs.count, epochs.tokens, drop_last_partial, True
    )
    samples = len(sample_index) - 1
    shuffle_index = np.arange(samples, dtype=np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)
    _shuffle(shuffle_index, epochs.samples(epochs.count - 1) if separate else samples, random)
    return document_index, sample_index, shuffle_index


def _shuffle(order: np.ndarray, first: int, random: np.random.RandomState | None) -> None:
    """Shuffle in place the first so many and then the others, as megatron-core does in copies; None shuffles nothing.

    What a generator draws for a shuffle depends on the number of elements alone.
    """
    if random is not None:
        random.shuffle(order[:first])
        if first < len(order):
            random.shuffle(order[first:])


def load_indices(folder: Path, name: str) -> Indices | None:
    """The cached arrays, memory mapped, or None when there are none."""
    paths = [folder / f"{name}-{array}.npy" for array in _NAMES]
    if not all(path.is_file() for path in paths):
        return None
    document_index, sample_index, shuffle_index = (np.load(path, mmap_mode="r") for path in paths)
    return document_index, sample_index, shuffle_index


def save_indices(folder: Path, name: str, indices: Indices) -> None:
    """Cache the arrays, each complete or not at all; ranks that do so at once write the same.

    Raises:
        OSError: when the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for array, values in zip(_NAMES, indices, strict=True):
        partial = folder / f"{name}-{array}.{os.getpid()}.partial.npy"
        try:
            np.save(partial, values)
            partial.replace(folder / f"{name}-{array}.npy")
        finally:
            partial.unlink(missing_ok=True)
