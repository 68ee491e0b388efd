"""Training, validation and test datasets: megatron-core's, built from the configuration, checked before they are built.

Sample ``i`` is what megatron-core's ``GPTDataset`` gives. Checks come first and run on every rank, because an error
on one rank between megatron-core's barriers leaves the others waiting.
"""

# megatron-core is untyped, and most here is its objects.
# pyright: basic

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm.config.data import DataConfig
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.data.fim import FillInTheMiddle, build_fim, sample_random
from mindspeed_llm.data.indexed import IndexSummary, bin_path, idx_path, read_index
from mindspeed_llm.data.indices import Epochs, Indices, build_indices, load_indices, save_indices
from mindspeed_llm.data.inputs import (
    DEFAULT_SPLIT,
    SPLITS,
    Blend,
    read_blend,
    read_splits,
    read_text,
    with_files_read,
    words_read,
)
from mindspeed_llm.data.manifest import check_tokenizer
from mindspeed_llm.data.once import PACE
from mindspeed_llm.data.raw import RawSettings, is_raw, prepared_prefix
from mindspeed_llm.data.tokenizer import Tokenizer
from mindspeed_llm.errors import DataError

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

logger = logging.getLogger(__name__)

_NO_PAD = -1
"""An id that no text holds: megatron-core masks the loss of positions with the padding id."""

Datasets = tuple[Any | None, Any | None, Any | None]


@dataclass(frozen=True)
class _DatasetTokenizer:
    """What megatron-core's datasets ask a tokenizer for.

    Attributes:
        pad: padding id, or -1 where the tokenizer has none of its own. Many reuse their EOS, and masking every EOS
            out of the loss is not what anyone asked for.
    """

    vocab_size: int
    eod: int
    pad: int
    unique_identifiers: OrderedDict[str, str]


@dataclass
class PretrainDatasetConfig(GPTDatasetConfig):
    """GPTDatasetConfig with what our indices need.

    Attributes:
        fingerprints: prefix -> identity of its content, so that a cached index of other data is never taken for ours.
        shuffle: whether documents and samples are shuffled.
        index_cache: folder for the arrays of samples; None means beside the data, and not at all where that is
            read-only.
        fim: what rearranges the documents of each sample, if anything does.
    """

    fingerprints: dict[str, str] = field(default_factory=dict)
    shuffle: bool = True
    index_cache: str | None = None
    fim: FillInTheMiddle | None = None


class PretrainDataset(GPTDataset):
    """megatron-core's GPTDataset with our indices (``data.indices``): same samples, safer cache, also unshuffled."""

    config: PretrainDatasetConfig
    dataset: IndexedDataset

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Four bytes for each document, of no use once the indices are there.
        self.indices = self.indices[:0].copy()
        # megatron-core keeps the loss mask of the first sample for all others, with that sample's padding in it.
        self.masks_and_position_ids_are_cacheable = False

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(idx)
        if self.config.fim is not None:
            sample["loss_mask"][sample["labels"] == self.config.fim.sentinels.pad] = 0.0
        return sample

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        text, documents = super()._query_document_sample_shuffle_indices(idx)
        if self.config.fim is None:
            return text, documents
        source = self.config.fingerprints[self.dataset.path_prefix]
        random = sample_random(self.config.random_seed, source, self.index_split.name, int(idx))
        return self.config.fim(text, random), documents

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "fingerprints", "shuffle"]

    def _build_document_sample_shuffle_indices(self) -> Indices:
        explicit = self.config.index_cache
        folder = Path(explicit) if explicit else Path(self.dataset.path_prefix, "cache", "indices")
        name = f"{self.unique_description_hash}-{self.index_split.name}"
        cached = load_indices(folder, name)
        if cached is not None:
            return cached
        indices = build_indices(
            self.dataset.sequence_lengths,
            self.indices,
            Epochs.covering(self._get_num_tokens_per_epoch(), self.config.sequence_length, self.num_samples),
            self.config.random_seed if self.config.shuffle else None,
        )
        try:
            save_indices(folder, name, indices)
        except OSError as error:
            if explicit:
                raise DataError(
                    "The folder for indices cannot be written to.", got=f"{folder}: {error}", fix="--data-cache-path"
                ) from error
            logger.warning("%s cannot be written to: the indices of the data are built anew in each run", folder)
            return indices
        return load_indices(folder, name) or indices


def prepare_raw(cfg: RunConfig, tokenizer: Tokenizer, sizes: Sequence[int]) -> RunConfig:
    """Prepare the raw files among the data paths, or find them prepared.

    Call it on every rank, and before there are process groups: ranks wait for files here, for as long as it takes, and
    in a collective they would run into its timeout.

    Args:
        cfg: the run.
        tokenizer: that of the run.
        sizes: samples wanted of each split; what none of them reads is not prepared.

    Returns:
        ``cfg`` with prefixes in place of raw files, for :func:`build_datasets`.

    Raises:
        DataError: see :func:`mindspeed_llm.data.raw.prepared_prefix`.
    """
    data = cfg.data
    settings = RawSettings(
        key=data.json_key,
        cache=data.data_cache_path,
        verify=data.verify_data,
        # The other ranks of the node wait meanwhile.
        workers=len(os.sched_getaffinity(0)),
    )
    patience = 60 * cfg.distributed.distributed_timeout_minutes
    pace = replace(PACE, stale=min(PACE.stale, patience))
    data = with_files_read(data)
    changed = {
        name: _with_prefixes(words, name, lambda word: prepared_prefix(word, tokenizer, settings, pace))
        for name, words in words_read(data, sizes).items()
        if any(map(is_raw, words))
    }
    return replace(cfg, data=replace(data, **changed)) if changed else cfg


def rank_needs_data(cfg: RunConfig) -> bool:
    """Whether this rank reads samples: tensor-parallel rank 0 of a stage that uses tokens or labels.

    With ``--reset-attention-mask`` every stage does: where documents end decides what each layer may attend to.
    """
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return stage_needs_batch(cfg)


def stage_needs_batch(cfg: RunConfig, vp_stage: int | None = None) -> bool:
    """Whether a pipeline stage uses a batch.

    Args:
        cfg: the run.
        vp_stage: the model chunk of this rank; None means any of them.
    """
    if cfg.data.reset_attention_mask:
        return True
    virtual: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return parallel_state.is_pipeline_first_stage(**virtual) or parallel_state.is_pipeline_last_stage(**virtual)


def build_datasets(
    cfg: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int],
    *,
    is_built_on_rank: Callable[[], bool] = lambda: True,
    shuffle: bool = True,
) -> Datasets:
    """Build the three datasets. With torch.distributed initialised, all ranks must call this together.

    Args:
        cfg: the run.
        tokenizer: the one that the data was made with.
        sizes: samples wanted of each, see :func:`split_sizes`; 0 builds none.
        is_built_on_rank: true on ranks that read samples, and on global rank 0, which writes the indices.
        shuffle: whether documents and samples are shuffled; without, they keep the order of the file.

    Returns:
        Training, validation and test dataset; None where none is wanted or this rank reads no samples.

    Raises:
        DataError: files are missing, damaged, too short for one sample, or made with another tokenizer.
    """
    source = _dataset_arguments(cfg.data)
    config = PretrainDatasetConfig(
        random_seed=cfg.training.seed,
        sequence_length=_sequence_length(cfg),
        num_dataset_builder_threads=cfg.data.num_dataset_builder_threads,
        path_to_cache=_blend_cache(cfg.data),
        index_cache=cfg.data.data_cache_path,
        shuffle=shuffle,
        mmap_bin_files=cfg.data.mmap_bin_files,
        tokenizer=_dataset_tokenizer(tokenizer),  # pyright: ignore[reportArgumentType] - duck typed upstream
        reset_position_ids=cfg.data.reset_position_ids,
        reset_attention_mask=cfg.data.reset_attention_mask,
        eod_mask_loss=cfg.data.eod_mask_loss,
        fim=build_fim(cfg.data, tokenizer),
        # The mask follows from the tokens: data.batches makes it where they are used, at 1/seq_length of the traffic.
        create_attention_mask=False,
        **source,
    )
    _drop_unwanted_splits(config, sizes)
    if not config.mock:
        config.fingerprints = _check_sources(config, tokenizer, sizes)
    kind = MockGPTDataset if config.mock else PretrainDataset
    train, valid, test = BlendedMegatronDatasetBuilder(kind, list(sizes), is_built_on_rank, config).build()
    return train, valid, test


def _blend_cache(data: DataConfig) -> str | None:
    """Where megatron-core may cache the order of a blend: rank 0 writes it, all ranks must see it."""
    if data.no_shared_storage or not torch.distributed.is_initialized():
        return None
    return data.data_cache_path


def _sequence_length(cfg: RunConfig) -> int:
    if cfg.training.seq_length is None:
        raise DataError("The length of a sequence is not given.", fix="--seq-length")
    return cfg.training.seq_length


def _dataset_tokenizer(tokenizer: Tokenizer) -> _DatasetTokenizer:
    others = {number for role, number in tokenizer.special_ids.items() if role != "pad_token"}
    pad = tokenizer.pad
    return _DatasetTokenizer(
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        pad=_NO_PAD if pad is None or pad in others else pad,
        unique_identifiers=tokenizer.unique_identifiers,
    )


def _dataset_arguments(data: DataConfig) -> dict[str, Any]:
    """The fields of GPTDatasetConfig that say which data is read for what."""
    joint = read_blend(data.data_path, "--data-path")
    per_split = [
        read_blend(data.train_data_path, "--train-data-path"),
        read_blend(data.valid_data_path, "--valid-data-path"),
        read_blend(data.test_data_path, "--test-data-path"),
    ]
    if data.data_args_path is not None:
        joint = read_blend(read_text(data.data_args_path).split(), "--data-args-path")
    if data.per_split_data_args_path is not None:
        per_split = _per_split_from_file(data.per_split_data_args_path)
    given = [joint is not None, any(blend is not None for blend in per_split), data.mock_data]
    if sum(given) != 1:
        raise DataError(
            "Training data must come from one place.",
            got=["nothing", "one", "several"][min(sum(given), 2)],
            allowed="--data-path, or --train/valid/test-data-path, or --mock-data",
        )
    if joint is not None:
        return {"blend": joint, "split": data.split or DEFAULT_SPLIT}
    if data.mock_data:
        return {}
    return {"blend_per_split": per_split}


def _per_split_from_file(path: str) -> list[Blend | None]:
    content = read_splits(path)
    return [read_blend(content[name], f"{path}: {name}") for name in SPLITS]


def _with_prefixes(words: Sequence[str], field_name: str, locate: Callable[[str], str]) -> tuple[str, ...]:
    """``words`` with ``locate`` of each raw one; weights stay, even where a file has such a name."""
    blend = read_blend(words, f"--{field_name.replace('_', '-')}")
    weighted = blend is not None and blend[1] is not None
    return tuple(
        word if (weighted and place % 2 == 0) or not is_raw(word) else locate(word) for place, word in enumerate(words)
    )


def _drop_unwanted_splits(config: PretrainDatasetConfig, sizes: Sequence[int]) -> None:
    """Build nothing where nothing is read: megatron-core would look for ever for an epoch of an empty split."""
    unwanted = [split.value for split in Split if sizes[split.value] == 0]
    for parts in (config.split_matrix, config.blend_per_split):
        if parts is not None:
            parts[:] = [None if number in unwanted else part for number, part in enumerate(parts)]  # pyright: ignore


def _check_sources(config: PretrainDatasetConfig, tokenizer: Tokenizer, sizes: Sequence[int]) -> dict[str, str]:
    """Check every dataset that will be read.

    Returns:
        prefix -> identity of its content.
    """
    fingerprints: dict[str, str] = {}
    needs_eod = bool(config.eod_mask_loss or config.reset_attention_mask or config.reset_position_ids)
    for split in Split:
        if sizes[split.value] == 0:
            continue
        if config.blend_per_split is not None:
            blend, part = config.blend_per_split[split.value], (0.0, 1.0)
        else:
            blend, part = config.blend, (config.split_matrix or [None] * len(Split))[split.value]
        if blend is None or part is None:
            raise DataError(
                f"There is no data for {_SPLIT_NAMES[split]}.",
                got=f"--split {config.split}" if config.blend else "no path",
                allowed=f"data for {sizes[split.value]} samples",
                fix=_SPLIT_FIXES[split],
            )
        for prefix in blend[0]:
            summary = read_index(prefix)
            if prefix not in fingerprints:
                check_tokenizer(prefix, tokenizer, needs_eod=needs_eod)
                fingerprints[prefix] = _fingerprint(prefix)
            _check_count(summary)
            _check_length(summary, part, config, split)
    return fingerprints


_SPLIT_NAMES = {Split.train: "training", Split.valid: "validation", Split.test: "testing"}
_SPLIT_FIXES = {
    Split.train: "--split with a share for training, or --train-data-path",
    Split.valid: "--split with a share for validation, --valid-data-path, or --eval-iters 0",
    Split.test: "--split with a share for testing, --test-data-path, or --eval-iters 0",
}


def _check_count(summary: IndexSummary) -> None:
    """megatron-core numbers documents in 32 bits."""
    most = np.iinfo(np.int32).max
    if len(summary.lengths) > most:
        raise DataError(
            "A dataset holds more documents than can be numbered.",
            got=f"{summary.prefix}: {len(summary.lengths)}",
            allowed=f"{most} in one dataset; a blend may hold more",
            fix="several datasets, blended by --data-path",
        )


def _check_length(
    summary: IndexSummary, part: tuple[float, float], config: PretrainDatasetConfig, split: Split
) -> None:
    """One epoch of a split must hold at least one sample, which is one token longer than a sequence."""
    documents = len(summary.lengths)
    first, last = (round(edge * float(documents)) for edge in part)
    needed = config.sequence_length + 1
    if last - first >= needed:
        return  # no document is empty, so this many documents are at least as many tokens
    tokens = int(np.sum(summary.lengths[first:last], dtype=np.int64))
    if tokens < needed:
        raise DataError(
            f"The data for {_SPLIT_NAMES[split]} is shorter than one sample.",
            got=f"{summary.prefix}: {last - first} of {documents} documents, {tokens} tokens",
            allowed=f"at least {needed} tokens: a sequence of {config.sequence_length} and the token after it",
            fix=f"more text, a smaller --seq-length, or {_SPLIT_FIXES[split]}",
        )


def _fingerprint(prefix: str) -> str:
    """Identity of a dataset that is cheap at any size and equal on every node: sizes and both ends of both files."""
    digest = hashlib.sha256()
    for path in (idx_path(prefix), bin_path(prefix)):
        size = path.stat().st_size
        digest.update(str(size).encode())
        with open(path, "rb") as stream:
            digest.update(stream.read(1 << 16))
            stream.seek(max(0, size - (1 << 16)))
            digest.update(stream.read())
    return digest.hexdigest()
