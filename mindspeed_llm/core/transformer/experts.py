"""Mixture of experts: the router and the experts' linear maps that megatron-core lacks without TransformerEngine."""

# pyright: basic
# torch.distributed groups and modules' attributes have no types.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.device import current

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class _BestInGroups:
    """Stands where megatron-core asks a replay which experts to take: those of the groups that are best by the sum of
    their ``judges`` best experts' scores, or of a replay that is in force."""

    def __init__(self, judges: int, replay: Any) -> None:
        self._judges, self._replay = judges, replay

    def _choose(
        self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices ``[tokens, topk]`` of the chosen of ``scores [tokens, experts]``."""
        assert num_groups is not None, "a rule demands it"
        assert group_topk is not None, "a rule demands it"
        grouped = scores.unflatten(-1, (num_groups, -1))
        chosen = grouped.topk(self._judges, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, chosen, False)
        best = grouped.masked_fill(others.unsqueeze(-1), float("-inf")).flatten(-2).topk(topk, dim=-1)
        return best.values, best.indices

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, _default: Any
    ) -> tuple[Tensor, Tensor]:
        """As megatron-core's ``RouterReplay``."""
        if self._replay is None:
            return self._choose(scores, topk, num_groups, group_topk)
        return self._replay.get_replay_topk(scores, topk, num_groups, group_topk, self._choose)


class Router(TopKRouter):
    """megatron-core's router, whose scores are computed by torch; ``moe_router_group_experts`` judge each group."""

    def __init__(self, config: SuiteTransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config, pg_collection)
        if config.moe_router_group_experts is not None:
            self.router_replay: Any = _BestInGroups(config.moe_router_group_experts, self.router_replay)

    def gating(self, input: Tensor) -> Tensor:
        """Scores ``[..., experts]`` of tokens ``[..., hidden]``, in ``--moe-router-dtype`` or the tokens' own."""
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: Any,
        reduce_group_has_dp: bool = False,
        valid_token_count: int | Tensor | None = None,
    ) -> Tensor:
        """``activation``, whose gradient brings that of ``aux_loss`` along; the loss is noted without its weight."""
        # A replica's part of the global loss is by the tokens of all replicas already; data parallelism divides again.
        replicas = reduce_group.size() // self.tp_cp_group.size() if reduce_group_has_dp else 1
        return super().attach_and_log_load_balancing_loss(
            activation,
            aux_loss_coeff * replicas,
            aux_loss * replicas,
            aux_loss_name,
            reduce_group,
            reduce_group_has_dp,
            valid_token_count,
        )


class GroupedLinear(MegatronModule):
    """The linear maps of this rank's experts: of ``tokens [n, in]``, sorted by expert, each goes through its own.

    Weights are ``weight{i} [out, in]`` and ``bias{i} [out]`` for local expert ``i``, as TransformerEngine's are, cut
    over the expert-tensor-parallel ranks along :attr:`axis`; the token dispatcher moves what travels.
    """

    axis: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: SuiteTransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str,
        pg_collection: Any,
    ) -> None:
        super().__init__(config)
        self.num_gemms, self.use_bias, self.skip_bias_add = num_gemms, bias, skip_bias_add
        self._groups = pg_collection
        whole = (output_size, input_size)
        parts = pg_collection.expt_tp.size()
        shape = [divide(size, parts) if axis == self.axis else size for axis, size in enumerate(whole)]
        for index in range(num_gemms):
            weight = self._parameter(shape)
            self._initialize(weight, whole, init_method)
            self.register_parameter(f"weight{index}", weight)
            if bias:
                self.register_parameter(f"bias{index}", self._bias(shape[0]))

    def _parameter(self, shape: Sequence[int]) -> Parameter:
        on_cpu = self.config.use_cpu_initialization
        device = torch.device("cpu") if on_cpu else current().torch_device
        parameter = Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=device))
        # What megatron-core's data parallelism asks: reduced over replicas of the rest, or over those of this expert.
        # Its own experts look at the first size alone; where ranks share the rest and not the experts, each then keeps
        # the gradient of the tokens that it saw.
        config = self.config
        apart = (config.expert_model_parallel_size, config.expert_tensor_parallel_size)
        parameter.allreduce = apart == (1, config.tensor_model_parallel_size)  # type: ignore[attr-defined]
        return parameter

    def _initialize(self, weight: Parameter, whole: tuple[int, int], init_method: Callable[[Tensor], Any]) -> None:
        if not self.config.perform_initialization:
            set_tensor_model_parallel_attributes(weight, True, self.axis, 1)
        elif self.config.use_cpu_initialization:
            group = self._groups.expt_tp
            _initialize_affine_weight_cpu(
                weight, *whole, weight.shape[self.axis], self.axis, init_method,
                params_dtype=self.config.params_dtype, rank=group.rank(), world_size=group.size(),
            )  # fmt: skip
        else:
            _initialize_affine_weight_gpu(weight, init_method, partition_dim=self.axis, is_expert=True)

    def _bias(self, size: int) -> Parameter:
        bias = self._parameter([size])
        with torch.no_grad():
            bias.zero_()
        # An expert with biases has one part. Tensor-parallel ranks have different experts then: without the mark the
        # norm of the gradients counts those of the first rank alone.
        set_tensor_model_parallel_attributes(bias, True, 0, 1)
        return bias

    def forward(self, tokens: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """``(output [n, out], biases not yet added)``; an expert without tokens gets a gradient of zeros."""
        added = self.use_bias and not self.skip_bias_add
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        outputs = [
            F.linear(part, weight, biases[index] if added else None)
            for index, (part, weight) in enumerate(zip(tokens.split(tokens_per_expert), weights, strict=True))
        ]
        return torch.cat(outputs), biases if biases and not added else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Each expert's tensors under the keys that megatron-core's other kinds of experts have, too."""
        metadata = metadata or {}
        first = self._groups.ep.rank() * self.num_gemms
        experts = self._groups.ep.size() * self.num_gemms
        result: dict[str, Any] = {}
        for index in range(self.num_gemms):
            apart = metadata.get("singleton_local_shards", False)
            offsets = sharded_offsets if apart else (*sharded_offsets, (len(sharded_offsets), first + index, experts))
            named = {"weight": getattr(self, f"weight{index}")}
            if self.use_bias:
                named["bias"] = getattr(self, f"bias{index}")
            sharded = make_sharded_tensors_for_checkpoint(
                named,
                f"{first + index}.{prefix}" if apart else prefix,
                {"weight": self.axis, **({"bias": 0} if self.axis == 0 else {})},
                offsets,
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for (name, _), tensor in zip(named.items(), sharded.values(), strict=True):
                # Replicas are those of this expert.
                tensor.replica_id = (*tensor.replica_id[:2], self._groups.expt_dp.rank())
                result[f"{prefix}{name}{index}"] = tensor
        return result


class ColumnGroupedLinear(GroupedLinear):
    """Cut over the outputs."""

    axis = 0


class RowGroupedLinear(GroupedLinear):
    """Cut over the inputs; the dispatcher sums."""

    axis = 1


class Mixture(MoELayer):
    """megatron-core's layer of experts: router, dispatcher, experts, shared experts."""

    def __init__(self, config: SuiteTransformerConfig) -> None:
        linears = MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
        shared = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        parts = MoESubmodules(
            # TransformerEngine's but for its linear maps: the one kind that computes all experts of a rank together.
            experts=ModuleSpec(TEGroupedMLP, submodules=linears),
            shared_experts=ModuleSpec(SharedExpertMLP, submodules=shared),
            router=Router,  # pyright: ignore[reportArgumentType]  of our configuration, which is one of its kind
        )
        super().__init__(config, parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``([s, b, h], None)`` for tokens ``[s, b, h]``."""
        output = super().forward(*args, **kwargs)
        # The dispatcher keeps tensors of its last call, and with them a graph that refers to the model through
        # gradient accumulators in C++, where the collector cannot look: neither would ever go.
        for name, value in vars(self.token_dispatcher).items():
            if isinstance(value, Tensor) and value.requires_grad:
                setattr(self.token_dispatcher, name, None)
        return output
