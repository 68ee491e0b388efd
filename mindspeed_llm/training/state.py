"""What a run has done so far, and the objects that it does it with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.training.routing import Counts

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

LOSS_WINDOW = 100
"""Steps that the running mean of the loss looks back, about."""


@dataclass
class Progress:
    """Counters that a checkpoint carries."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0
    """Iterations that did not update the weights: overflow under fp16, a spike of the loss."""
    nan: int = 0
    """Iterations whose loss was not a number."""

    loss_mean: float = 0.0
    """Running mean of the loss, see :meth:`take_loss`."""
    losses: int = 0
    """Losses in the mean."""

    def take_loss(self, loss: float) -> None:
        """Let the loss of a step that updated the weights enter the mean.

        The mean is that of all such steps up to :data:`LOSS_WINDOW`, and from then on exponential: each loss enters
        with the weight ``1 / LOSS_WINDOW``.
        """
        self.losses += 1
        self.loss_mean += (loss - self.loss_mean) / min(self.losses, LOSS_WINDOW)

    def state_dict(self) -> dict[str, int | float]:
        """The counters by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Take the counters from :meth:`state_dict`'s result; what an older save lacks keeps its value."""
        for field in fields(self):
            setattr(self, field.name, state.get(field.name, getattr(self, field.name)))


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
    counts: Counts | None = None
    """What each expert gets, with ``--moe-per-layer-logging``."""

    def gather_parameters(self) -> None:
        """Bring the parameters up to date. Collective.

        With ``--overlap-param-gather`` those of other ranks' shards hold the values from before the last update until
        the next forward pass.
        """
        if self.cfg.value("overlap_param_gather"):
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
