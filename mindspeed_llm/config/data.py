"""Where training data comes from and how it becomes batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    """Folder for index files of prepared data; by default beside the data."""

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
