"""What a run has done so far, and the objects that it does it with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass
class Progress:
    """Counters that a checkpoint carries."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0
    """Iterations that did not update the weights (overflow under fp16)."""
    nan: int = 0
    """Iterations whose loss was not a number."""

    def state_dict(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the counters from :meth:`state_dict`'s result."""
        for field in fields(self):
            setattr(self, field.name, state[field.name])


@dataclass
class Run:
    """A run that is set up."""

    cfg: RunConfig
    config: SuiteTransformerConfig
    chunks: list[Any]
    """This pipeline rank's model chunks, wrapped for data parallelism."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    progress: Progress

    def gather_parameters(self) -> None:
        """Bring the parameters up to date. Collective.

        With ``--overlap-param-gather`` those of other ranks' shards hold the values from before the last update until
        the next forward pass.
        """
        if self.cfg.value("overlap_param_gather"):
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
