"""The configuration of a run: one frozen object of frozen sections, and where each of its values came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mindspeed_llm.config.checkpoint import CheckpointConfig
from mindspeed_llm.config.data import DataConfig
from mindspeed_llm.config.distributed import DistributedConfig
from mindspeed_llm.config.logging import LoggingConfig
from mindspeed_llm.config.mcore_flags import DdpFlags, OptimizerFlags, TransformerFlags
from mindspeed_llm.config.model import ModelConfig
from mindspeed_llm.config.schedule import ScheduleConfig
from mindspeed_llm.config.tokenizer import TokenizerConfig
from mindspeed_llm.config.training import TrainingConfig

# In the order in which --help and the start-up list show them.
SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "model": ModelConfig,
        "transformer": TransformerFlags,
        "training": TrainingConfig,
        "optimizer": OptimizerFlags,
        "ddp": DdpFlags,
        "schedule": ScheduleConfig,
        "data": DataConfig,
        "tokenizer": TokenizerConfig,
        "checkpoint": CheckpointConfig,
        "logging": LoggingConfig,
        "distributed": DistributedConfig,
    }
)


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run was told, after precedence, derivation and rules.

    A name belongs to one section. megatron-core repeats some names in several of its dataclasses (``bf16``,
    ``use_distributed_optimizer``, ...): they live in the first of transformer, optimizer, ddp, and the code that builds
    those objects copies them.

    Attributes:
        sources: for each field that was given or derived, who set it ("command line", "derived", ...).
        notices: what start-up must say: overridden values, options without effect here, renamed flags.
    """

    model: ModelConfig
    transformer: TransformerFlags
    training: TrainingConfig
    optimizer: OptimizerFlags
    ddp: DdpFlags
    schedule: ScheduleConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    distributed: DistributedConfig
    sources: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)
    notices: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def value(self, name: str) -> object:
        """The value of the field ``name``, whatever its section.

        Raises:
            KeyError: no section has that field.
        """
        for section in SECTIONS:
            part: object = getattr(self, section)
            if name in vars(part):
                return vars(part)[name]
        raise KeyError(name)
