"""RMSNorm and LayerNorm for every norm slot of a layer spec, also under sequence parallelism.

Both compute in float32 (float64 for float64 input) and return the input's dtype. Their parameters carry megatron-core's
``sequence_parallel`` mark, by which ``finalize_model_grads`` sums their gradients over tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from mindspeed_llm import ops
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019).

    Rounded where transformers rounds: Llama and Qwen cast the normalised value to the input's dtype before the weight;
    Gemma, whose weight is stored as a distance from one, multiplies in float32 and casts last.

    Args:
        x: ``[..., h]``.
        weight: ``[h]``.
        eps: added to the mean square.
        zero_centered: multiply by ``1 + weight``.

    Returns:
        ``[..., h]`` in x's dtype.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normalised * (1 + weight.to(wide.dtype))).to(x.dtype)
    return (normalised.to(x.dtype) * weight).to(x.dtype)


class RMSNorm(torch.nn.Module):
    """Root mean square norm; the constructor is that of megatron-core's norm slots.

    Args:
        config: reads ``layernorm_zero_centered_gamma``, ``sequence_parallel`` and ``params_dtype``.
        hidden_size: length of the last dimension.
        eps: see :func:`rms_norm`.
    """

    def __init__(self, config: SuiteTransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = _norm_parameter(config, hidden_size, 0.0 if self.zero_centered else 1.0)
        self.op = ops.active()["rms_norm"]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same."""
        if self.zero_centered or self.weight.dtype != x.dtype:
            return rms_norm(x, self.weight, self.eps, self.zero_centered)
        return self.op(x, self.weight, self.eps)


class LayerNorm(torch.nn.Module):
    """Layer norm with weight and bias; the constructor is that of megatron-core's norm slots.

    Args:
        config: reads ``layernorm_zero_centered_gamma``, ``sequence_parallel`` and ``params_dtype``.
        hidden_size: length of the last dimension.
        eps: added to the variance.
    """

    def __init__(self, config: SuiteTransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = _norm_parameter(config, hidden_size, 0.0 if self.zero_centered else 1.0)
        self.bias = _norm_parameter(config, hidden_size, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if weight.dtype == x.dtype:
            return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), self.bias.to(wide), self.eps).to(x.dtype)


def norm_type(config: SuiteTransformerConfig) -> type[RMSNorm | LayerNorm]:
    """The norm that ``normalization`` names."""
    return RMSNorm if config.normalization == "RMSNorm" else LayerNorm


class HeadsRMSNorm(torch.nn.Module):
    """Root mean square over all heads of a token together, for megatron-core's slots of query and key norms (OLMo 2).

    Each tensor-parallel rank holds the weights of its heads; the mean square is that of all ranks.

    Args:
        config: reads ``kv_channels``, ``params_dtype`` and the number of heads.
        hidden_size: of one head, unused.
        eps: see :func:`rms_norm`.
    """

    heads = "num_attention_heads"

    def __init__(self, config: SuiteTransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"]).tp
        self.width = getattr(config, self.heads) * hidden_size
        weight = torch.ones(self.width // self.group.size(), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, heads of this rank, head size]`` to the same, rounded as :func:`rms_norm` rounds."""
        wide = (x if x.dtype == torch.float64 else x.float()).flatten(2)
        squares = _SumOverRanks.apply(wide.square().sum(-1, keepdim=True), self.group)
        normalised = wide * torch.rsqrt(squares / self.width + self.eps)
        return (normalised.to(x.dtype) * self.weight).to(x.dtype).view(x.shape)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The weight, sharded over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class KeyHeadsRMSNorm(HeadsRMSNorm):
    """:class:`HeadsRMSNorm` over the heads of the keys."""

    heads = "num_query_groups"


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group, of which each rank goes on to make something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(x: Tensor, group: Any) -> Tensor:
    if group.size() > 1:
        x = x.clone()
        dist.all_reduce(x, group=group)
    return x


def _norm_parameter(config: SuiteTransformerConfig, hidden_size: int, value: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.full((hidden_size,), value, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return parameter
