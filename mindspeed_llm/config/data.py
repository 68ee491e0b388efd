"""Where training data comes from and how it becomes batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_llm.config.option import option


@dataclass(frozen=True)
class DataConfig:
    """Sources, splits and loading of training data."""

    data_path: tuple[str, ...] | None = None
    """Data for all splits: one path, or weights and paths in turn for a blend."""

    split: str | None = None
    """Shares of training, validation and test data, such as 99,1,0; by default 969,30,1."""

    train_data_path: tuple[str, ...] | None = None
    """Data for training alone: one path, or weights and paths in turn."""

    valid_data_path: tuple[str, ...] | None = None
    """Data for validation alone: one path, or weights and paths in turn."""

    test_data_path: tuple[str, ...] | None = None
    """Data for testing alone: one path, or weights and paths in turn."""

    data_args_path: str | None = None
    """File that holds what would be given as the data path."""

    per_split_data_args_path: str | None = None
    """JSON file with the keys train, valid and test, each a list as the data path takes it."""

    data_cache_path: str | None = None
    """Folder for data prepared from raw files and for index files; by default beside the data."""

    json_key: str = option("text", flags=("--json-keys",))
    """Field that holds the text in the rows of raw files."""

    verify_data: bool = False
    """Read raw files whole and compare them with those that were prepared, rather than size, time and samples."""

    mock_data: bool = False
    """Train on made-up sequences, to try a set-up without data."""

    mmap_bin_files: bool = True
    """Map data files into memory rather than reading them."""

    num_dataset_builder_threads: int = 1
    """Threads of each rank that builds data indices."""

    num_workers: int = 2
    """Processes that load batches, for each rank; 0 loads in the training process."""

    dataloader_type: Literal["single", "cyclic"] | None = None
    """Order of samples: each once and resumable by count (single, the default), or shuffled in every epoch."""

    reset_position_ids: bool = False
    """Count positions from 0 again after each end of a document."""

    reset_attention_mask: bool = False
    """Keep tokens from attending across the end of a document."""

    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""

    create_attention_mask_in_dataloader: bool = True
    """Let the data loader make the attention mask. Without it the attention itself makes a causal one."""

    no_shared_storage: bool = False
    """The nodes share no storage: each node builds its own data indices rather than only the first."""

    fim_data: bool = False
    """Rearrange documents for filling in the middle."""

    fim_rate: float = 0.5
    """Share of documents that are rearranged for filling in the middle."""

    fim_spm_rate: float = 0.5
    """Share of the rearranged ones in the order suffix, prefix, middle; the others are prefix, suffix, middle."""

    fim_split_sample: str | None = None
    """Token around which a document is split into fragments, each rearranged by itself."""

    fim_fragment_rate: float | None = None
    """Share of fragments that are rearranged, of documents that are split."""

    fim_no_prefix: str | None = None
    """Documents and fragments that begin with this text stay as they are."""

    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""

    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""

    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""

    fim_pad_token: str = "<fim_pad>"
    """Token that fills up samples which became shorter; it is left out of the loss."""

    fim_eod_token: str = "<|endoftext|>"
    """Token that ends a document: the one that the tokenizer names as its end."""
