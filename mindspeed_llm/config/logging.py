"""What a run tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoggingConfig:
    """Log lines, metrics files and dashboards."""

    log_interval: int = 100
    """Optimizer steps between log lines."""

    log_throughput: bool = False
    """Add tokens and floating-point operations per second to the log line."""

    peak_tflops: float | None = None
    """Peak of one rank in TFLOP/s, to print the part of it that the model uses (MFU)."""

    metrics_file: str | None = None
    """JSON lines file that metrics are appended to; by default metrics.jsonl in the save folder, if there is one."""

    tensorboard_dir: str | None = None
    """Folder for TensorBoard files."""

    tensorboard_log_interval: int = 1
    """Optimizer steps between TensorBoard points."""

    tensorboard_queue_size: int = 1000
    """TensorBoard points held in memory before they are written."""

    log_loss_scale_to_tensorboard: bool = True
    """Send the loss scale to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = False
    """Send the validation perplexity to TensorBoard."""

    log_memory_to_tensorboard: bool = False
    """Send memory use to TensorBoard."""

    log_world_size_to_tensorboard: bool = False
    """Send the number of processes to TensorBoard."""

    wandb_project: str | None = None
    """Weights and Biases project; naming it turns that log on."""

    wandb_exp_name: str | None = None
    """Weights and Biases name of this run."""

    wandb_save_dir: str | None = None
    """Folder for Weights and Biases files; by default wandb in the save folder."""

    wandb_entity: str | None = None
    """Weights and Biases account or team."""

    logging_level: int | None = None
    """Level of Python's logging: 10 debug, 20 information, 30 warnings."""
